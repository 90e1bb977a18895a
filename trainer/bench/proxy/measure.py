"""The measurements: a row per number of sessions, one long session, one with routes, and the slopes of CPU per turn."""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.bench.proxy import against, processes
from trainer.bench.proxy.engine import SocketEngine
from trainer.bench.proxy.load import Latencies, Target, closed_loop, connect, open_loop
from trainer.bench.proxy.traffic import KEY, Conversation, Dialect, Traffic
from trainer.engine.base import GenerationRequest, Sampling

DIRECT_PROMPT = 20_000
LONG_ANSWER = 190
"""Tokens of an answer with what renders around it, by which a long session is filled up to its size."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `rate` is in calls a second over all sessions; `against` are interpreters that may have other gateways."""

    sessions: tuple[int, ...] = (1, 16, 64)
    rate: float = 50
    seconds: float = 20
    dialect: Dialect = "openai"
    model: Path | None = None
    against: tuple[Path, ...] = ()
    long_turns: int = 100
    long_tokens: int = 128_000
    slope_turns: int = 90
    fillers: tuple[int, ...] = (0, 10, 30)

    @property
    def saturation_seconds(self) -> float:
        return self.seconds / 2


@dataclass(frozen=True, slots=True)
class Row:
    """`added` is the call through the proxy less the median direct call to the engine, made in turn with it, over all turns of all
    sessions. `rps_per_core` is answers per CPU second of the server's process when nobody waits, `cpu_ms` its CPU time per call at `rate`.
    `bytes_per_token` is what a long session holds in memory for each token of its graph, None where that is not known."""

    sessions: int
    rate: float
    added_p50_ms: float
    added_p99_ms: float
    rps_per_core: float
    bytes_per_token: float | None
    rss_mb: float
    cpu_ms: float


async def run(plan: Plan) -> dict[str, Any]:
    """Everything the plan asks for, as the JSON that `rl bench proxy --json` prints."""
    traffic, load = Traffic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="lego-bench-") as scratch:
        directory = Path(scratch)
        processes.prepare(directory, traffic, plan.model)
        async with processes.engine(directory) as ports:
            async with (
                processes.server("floor", directory, ports, "openai") as floor,
                processes.server("host", directory, ports, plan.dialect) as handle,
            ):
                result = await _ours(plan, traffic, handle, floor, ports)
            found = await asyncio.to_thread(against.installed, plan.against)
            others = [await _theirs(plan, traffic, server, python, ports, result["rows"]) for server, python in found]
    return {**result, "against": others, "machine": {"cpus": os.cpu_count(), "load_before": load, "load_after": os.getloadavg()[0]}}


async def _ours(
    plan: Plan, traffic: Traffic, handle: processes.Handle, floor: processes.Handle, ports: processes.EnginePorts
) -> dict[str, Any]:
    engine = SocketEngine(ports.tokens)
    prompt, sampling = np.arange(DIRECT_PROMPT, dtype=np.int32), Sampling(1.0, 10_000, ())
    bench = _Bench(plan, traffic, handle, KEY, plan.dialect, lambda: engine.generate(GenerationRequest("direct", prompt, sampling)))
    passing = _Bench(plan, traffic, floor, KEY, "openai", bench.direct)
    await bench.warm_up()
    await passing.warm_up()
    long = await _weigh(bench, "long", plan.long_turns, plan.long_tokens, routed=False)
    routed = await _weigh(bench, "routed", 4, 0, routed=True)
    rows, direct = [], []
    for sessions in plan.sessions:
        below, _ = await passing.added(sessions, plan.seconds / 2)
        row, latencies = await bench.row(sessions, long["bytes_per_token"])
        rows.append({**asdict(row), "floor_p50_ms": statistics.median(below), "floor_p99_ms": _p99(below)})
        direct.append({"sessions": sessions, **_direct(latencies)})
    points = [point for fillers in plan.fillers for point in await _points(bench, fillers)]
    engine.close()
    return {"rows": rows, "direct": direct, "slopes": slopes(points), "long_session": long, "routes": routed}


async def _theirs(
    plan: Plan, traffic: Traffic, server: against.Server, python: Path, ports: processes.EnginePorts, ours: list[dict[str, Any]]
) -> dict[str, Any]:
    """Their rows under the same load; `ratio` is our calls per core over theirs."""
    body = Conversation(traffic, "openai", "direct").body()
    async with server.start(python, ports.http) as target, connect(f"http://127.0.0.1:{ports.http}/v1/chat/completions", "") as straight:
        bench = _Bench(plan, traffic, target, KEY, "openai", lambda: straight.post(body))
        await bench.warm_up()
        rows = [asdict((await bench.row(sessions, None))[0]) for sessions in plan.sessions]
    ratios = [mine["rps_per_core"] / theirs["rps_per_core"] for mine, theirs in zip(ours, rows, strict=True)]
    return {"server": server.name, "rows": [{**row, "ratio": ratio} for row, ratio in zip(rows, ratios, strict=True)]}


@dataclass(frozen=True, slots=True)
class _Bench[T: Target]:
    plan: Plan
    traffic: Traffic
    target: T
    key: str
    dialect: Dialect
    direct: Callable[[], Awaitable[object]]

    def converse(self, name: str, **sizes: int) -> Conversation:
        return Conversation(self.traffic, self.dialect, name, **sizes)

    async def warm_up(self) -> None:
        """One conversation that nobody times: imports, caches, connections."""
        await self.direct()
        await self.talk(await self.target.open("warm-up"), self.converse("warm-up"), 10)
        await self.target.close("warm-up")

    async def talk(self, url: str, conversation: Conversation, turns: int) -> int:
        """Bytes sent."""
        sent = 0
        async with connect(url, self.key) as connection:
            for _ in range(turns):
                body = conversation.body()
                conversation.take(await connection.post(body))
                sent += len(body)
        return sent

    async def added(self, sessions: int, seconds: float) -> tuple[list[float], Latencies]:
        """Milliseconds that each call of an open loop took more than a direct one."""
        gc.collect()
        gc.disable()  # the load's own pauses are nobody's latency
        try:
            latencies = await open_loop(self.target, self.converse, self.key, sessions, self.plan.rate, seconds, self.direct)
        finally:
            gc.enable()
        direct = statistics.median(latencies.direct)
        return [1000 * (took - direct) for took in latencies.through], latencies

    async def row(self, sessions: int, bytes_per_token: float | None) -> tuple[Row, Latencies]:
        plan, start = self.plan, await self.target.usage()
        added, latencies = await self.added(sessions, plan.seconds)
        before = await self.target.usage()
        answers = await closed_loop(self.target, self.converse, self.key, sessions, plan.saturation_seconds)
        after = await self.target.usage()
        cpu_ms = 1000 * (before.cpu_s - start.cpu_s) / len(added)
        per_core = answers / max(after.cpu_s - before.cpu_s, 1e-3)
        return Row(sessions, plan.rate, statistics.median(added), _p99(added), per_core, bytes_per_token, after.rss_mb, cpu_ms), latencies


async def _weigh(bench: _Bench[processes.Handle], name: str, turns: int, tokens: int, *, routed: bool) -> dict[str, Any]:
    """A session of `turns` turns whose prompt grows to about `tokens`, weighed at its end; never smaller than the usual traffic."""
    url = await bench.target.open(name, routed=routed)
    conversation = bench.converse(name)
    start = len(conversation.body()) / 3  # tools are JSON, which costs more tokens than prose
    observation = max(900, int(((tokens - start) / turns - LONG_ANSWER) * 4.4))
    await bench.talk(url, bench.converse(name, observation=observation), turns)
    weight = await bench.target.ask("measure", id=name)
    if weight["failed"]:
        raise RuntimeError(f"the {name} session failed: {weight['failed']}")
    weight["bytes_per_token"] = weight["bytes"] / weight["tokens"]
    weight["route_bytes_per_token"] = weight["route_bytes"] / weight["tokens"]
    return weight


async def _points(bench: _Bench[processes.Handle], fillers: int) -> list[dict[str, float]]:
    """CPU per turn along one growing conversation, in a rollout that has captured `fillers` others of 20,000 tokens before."""
    name, window, points = f"slope-{fillers}", 10, []
    url = await bench.target.open(name)
    for i in range(fillers):
        await bench.talk(url, bench.converse(f"{name}-{i}", task=88_000), 1)
    conversation = bench.converse(name)
    while conversation.turns < bench.plan.slope_turns:
        before = await bench.target.usage()
        sent = await bench.talk(url, conversation, window)
        after = await bench.target.usage()
        cpu_us = 1e6 * (after.cpu_s - before.cpu_s) / window
        points.append({"kb_sent": sent / window / 1e3, "tokens": conversation.tokens, "cpu_us": cpu_us})
    others = (await bench.target.ask("measure", id=name))["tokens"] - conversation.tokens
    # The first window holds the first prompt, which is rendered whole.
    return [{**point, "tokens": point["tokens"] + others} for point in points[1:]]


def slopes(points: list[dict[str, float]]) -> dict[str, Any]:
    """Least squares of CPU per turn against bytes sent and tokens captured."""
    kb, tokens, cpu = (np.array([point[name] for point in points]) for name in ("kb_sent", "tokens", "cpu_us"))
    (base, per_kb, per_token), *_ = np.linalg.lstsq(np.stack([np.ones_like(kb), kb, tokens], 1), cpu, rcond=None)
    return {"base_us": base, "us_per_kb_sent": per_kb, "us_per_1k_tokens_captured": 1000 * per_token, "points": points}


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def _direct(latencies: Latencies) -> dict[str, Any]:
    took = [1000 * seconds for seconds in latencies.direct]
    return {"calls": len(latencies.through), "p50_ms": statistics.median(took), "p99_ms": _p99(took)}
