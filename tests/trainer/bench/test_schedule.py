from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from trainer.bench.schedule.simulate import compare
from trainer.bench.schedule.workload import SHIPPED, Durations, curve, duration, load
from trainer.cli import main


def test_simulated_trials_have_the_quantiles_of_table_4() -> None:
    workload = load()
    shape = curve(workload.durations)
    assert [shape.at(share) for share in (0.5, 0.9, 0.99)] == pytest.approx([770.0, 1742.7, 3189.1])
    assert shape.mean == pytest.approx(920.4)
    drawn = [duration(workload, shape, prompt, member) for prompt in range(1000) for member in range(8)]
    assert sum(drawn) / len(drawn) == pytest.approx(920.4, rel=0.02)
    assert sorted(drawn)[4000] == pytest.approx(770, rel=0.03)


def test_a_mean_that_the_quantiles_cannot_have_is_refused() -> None:
    with pytest.raises(ValueError, match="a mean of 5000 s does not go with these quantiles"):
        curve(Durations(p50=1, p90=2, p99=3, longest=4, mean=5000))


def test_asynchronous_training_is_faster_and_within_its_staleness() -> None:
    found = compare(load().model_copy(update={"steps": 12}))
    assert found.sync.lags == {0: 12 * 64} and found.sync.drops == []
    assert sum(found.asynchronous.lags.values()) == 12 * 64 and set(found.asynchronous.lags) == {0, 1}
    assert all(drop.unfinished and drop.reason.startswith("stale: ") for drop in found.asynchronous.drops)
    assert found.of_trained_bound < found.of_bound, "what is dropped is the slowest"
    assert found.ratio > 1.5 and found.of_trained_bound > 0.85 and found.of_bound < 1
    assert found.bound_s < found.asynchronous.seconds < found.sync.seconds


def test_a_bar_that_is_met_with_the_slow_ones_dropped_is_not_met() -> None:
    """What was dropped is no work of the first bound's; the second, of what was trained, counts it as waste."""
    found = compare(load().model_copy(update={"steps": 3}))
    reached = replace(found, bound_s=0.95 * found.asynchronous.seconds, trained_bound_s=0.95 * found.asynchronous.seconds)
    assert reached.passed and not replace(reached, trained_bound_s=0.89 * found.asynchronous.seconds).passed
    assert not replace(reached, bound_s=0.89 * found.asynchronous.seconds).passed


@pytest.mark.slow
def test_the_shipped_workload_reaches_the_bar() -> None:
    done = CliRunner().invoke(main, ["bench", "async", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert figures["async_of_bound"] >= 0.9 and figures["async_of_trained_bound"] >= 0.9 and figures["sync_over_async"] > 1.8


def test_a_workload_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(SHIPPED.read_text().replace("slots: 128", "slots: 0"))
    done = CliRunner().invoke(main, ["bench", "async", "--workload", str(tmp_path / "w.yaml")])
    assert done.exit_code == 1 and "slots" in done.output
