"use strict";
// Draws the curves of one run and keeps them current. Data: GET {run}/series.json (see server/ui/series.py).

const page = document.querySelector("[data-series]");
const resolve = (name) => {
  const probe = document.createElement("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
};
const inks = {};
for (const name of ["--accent", "--good", "--bad", "--warn", "--quiet", "--line", "--dim"]) inks[name] = resolve(name);

const axis = (extra) => ({ stroke: inks["--dim"], grid: { stroke: inks["--line"], width: 1 }, ticks: { show: false }, font: "12px system-ui", ...extra });
const whole = (_, splits) => splits.map((v) => (Number.isInteger(v) ? String(v) : ""));
const plain = (_, splits) => splits.map((v) => String(Number(v.toPrecision(7))));
const percent = (_, splits) => splits.map((v) => `${Math.round(v * 100)} %`);

function base(element, height) {
  return { width: element.clientWidth, height, cursor: { drag: { x: false, y: false } }, legend: { show: false }, scales: { x: { time: false } } };
}

// Whiskers: the 95 % interval of each held-out point (series 3 and 4 are its bounds).
function whiskers(plot) {
  const { ctx } = plot;
  ctx.save();
  ctx.strokeStyle = inks["--good"];
  ctx.lineWidth = 1.5 * devicePixelRatio;
  plot.data[0].forEach((x, i) => {
    const low = plot.data[3][i], high = plot.data[4][i];
    if (low == null) return;
    const px = plot.valToPos(x, "x", true);
    ctx.beginPath();
    ctx.moveTo(px, plot.valToPos(low, "y", true));
    ctx.lineTo(px, plot.valToPos(high, "y", true));
    ctx.stroke();
  });
  ctx.restore();
}

function rateChart(element, data) {
  return new uPlot({
    ...base(element, 250),
    scales: { x: { time: false, range: [-0.3, Math.max(data.steps_expected, 1) + 0.3] }, y: { range: [0, 1] } },
    axes: [axis({ values: whole }), axis({ values: percent, size: 52 })],
    series: [
      {},
      { stroke: inks["--accent"], width: 2, points: { show: true, size: 5, fill: inks["--accent"] }, spanGaps: true },
      { stroke: inks["--good"], width: 1.5, dash: [5, 4], points: { show: true, size: 9, fill: inks["--good"] }, spanGaps: true },
      { show: true, stroke: "transparent", points: { show: false } },
      { show: true, stroke: "transparent", points: { show: false } },
      // Second verdicts, never mixed into the curves above: hollow points.
      { stroke: inks["--warn"], width: 1, dash: [2, 4], points: { show: true, size: 8, width: 2, fill: "transparent" }, spanGaps: true },
      { stroke: inks["--warn"], width: 1, dash: [2, 4], points: { show: true, size: 12, width: 2, fill: "transparent" }, spanGaps: true },
    ],
    hooks: { draw: [whiskers] },
  }, rates(data), element);
}

function rates(data) {
  const xs = [...new Set([...data.steps, ...data.held_out.map((p) => p.step), ...data.held_out_regraded.map((p) => p.step)])].sort((a, b) => a - b);
  const regraded = new Map(data.steps.map((s, i) => [s, data.regraded[i]]));
  const heldAgain = new Map(data.held_out_regraded.map((p) => [p.step, p.value]));
  const reward = new Map(data.steps.map((s, i) => [s, data.reward[i]]));
  const held = new Map(data.held_out.map((p) => [p.step, p]));
  const pick = (f) => xs.map((x) => (held.has(x) ? f(held.get(x)) : null));
  return [xs, xs.map((x) => reward.get(x) ?? null), pick((p) => p.value), pick((p) => p.low), pick((p) => p.high),
    xs.map((x) => regraded.get(x) ?? null), xs.map((x) => heldAgain.get(x) ?? null)];
}

const bars = uPlot.paths.bars({ size: [0.7, 40] });

// Stacked by drawing the sums from the tallest down.
function stacked(data) {
  const solved = data.solved;
  const unsolved = solved.map((v, i) => v + data.unsolved[i]);
  const failed = unsolved.map((v, i) => v + data.failed[i]);
  return [data.steps, failed, unsolved, solved];
}

function outcomeChart(element, data) {
  const bar = (ink) => ({ fill: inks[ink], stroke: inks[ink], width: 0, paths: bars, points: { show: false } });
  return new uPlot({
    ...base(element, 250),
    scales: { x: { time: false, range: [0.3, Math.max(data.steps_expected, 1) + 0.7] }, y: { range: (u, min, max) => [0, Math.max(max, 1)] } },
    axes: [axis({ values: whole }), axis({ size: 52 })],
    series: [{}, bar("--bad"), bar("--quiet"), bar("--good")],
  }, stacked(data), element);
}

// A constant metric, or one that moves in its seventh digit only, still needs an axis.
function padded(_, min, max) {
  if (min == null) return [0, 1];
  const half = Math.max((max - min) / 2, Math.abs(max) * 1e-4, 1e-9) * 1.15;
  const middle = (min + max) / 2;
  return [middle - half, middle + half];
}

function metricChart(element, data) {
  return new uPlot({
    ...base(element, 200),
    scales: { x: { time: false, range: [0.3, Math.max(data.steps_expected, 1) + 0.7] }, y: { range: padded } },
    axes: [axis({ values: whole }), axis({ values: plain, size: 84 })],
    series: [{}, { stroke: inks["--accent"], width: 2, points: { show: true, size: 5, fill: inks["--accent"] } }],
  }, [[], []], element);
}

async function start() {
  const get = async (url) => (await fetch(url, { headers: { accept: "application/json" } })).json();
  let data = await get(page.dataset.series);
  const rate = rateChart(document.getElementById("rate"), data);
  const outcomes = outcomeChart(document.getElementById("outcomes"), data);
  const metric = metricChart(document.getElementById("metric"), data);
  const select = document.getElementById("metric-key");

  const fill = () => {
    for (const key of data.metric_keys) {
      if (![...select.options].some((o) => o.value === key)) select.add(new Option(key, key, false, key === page.dataset.metric));
    }
  };
  const drawMetric = async () => {
    if (!select.value) return;
    const points = await get(`${page.dataset.metrics}?key=${encodeURIComponent(select.value)}`);
    metric.setData([points.map((p) => p.step), points.map((p) => p.value)]);
  };
  const redraw = async () => {
    rate.setData(rates(data));
    outcomes.setData(stacked(data));
    document.getElementById("regraded-legend").hidden = !data.held_out_regraded.length && data.regraded.every((v) => v === null);
    fill();
    await drawMetric();
    document.body.dataset.drawn = String(data.steps.length); // tests wait for this
  };
  select.addEventListener("change", drawMetric);
  await redraw();

  const tick = async () => {
    let next;
    try {
      next = await get(page.dataset.series);
    } catch {
      return; // the server is away: keep what is shown, try again
    }
    if (JSON.stringify(next) !== JSON.stringify(data)) {
      data = next;
      await redraw();
    }
  };
  setInterval(tick, 2000);
}

start();
