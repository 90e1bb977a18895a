from __future__ import annotations

import asyncio
import json

import pytest

from trainer.bench.proxy import measure, report
from trainer.bench.proxy.traffic import TURNS, Conversation, Traffic


@pytest.mark.slow
def test_bench_measures_rows_slopes_and_the_weight_of_a_capture() -> None:
    plan = measure.Plan(sessions=(1, 2), seconds=0.2, long_turns=3, long_tokens=0, slope_turns=30, fillers=(0, 1))
    result = json.loads(json.dumps(asyncio.run(measure.run(plan))))
    columns = ["sessions", "rate", "added_p50_ms", "added_p99_ms", "rps_per_core", "bytes_per_token", "rss_mb"]
    columns += ["cpu_ms", "floor_p50_ms", "floor_p99_ms"]
    assert [(list(row), row["sessions"], row["rate"]) for row in result["rows"]] == [(columns, 1, 50), (columns, 2, 50)]
    for row in result["rows"]:
        assert row["added_p50_ms"] <= row["added_p99_ms"] and row["rps_per_core"] > 0 and row["rss_mb"] > 10
        assert row["floor_p50_ms"] <= row["floor_p99_ms"] and row["cpu_ms"] > 0
        assert row["bytes_per_token"] == result["long_session"]["bytes_per_token"] < 40
    assert result["long_session"]["turns"] == 3 and result["long_session"]["tokens"] > 15_000
    assert result["routes"]["route_bytes_per_token"] == pytest.approx(48 * 8)
    small, _, large, largest = result["slopes"]["points"]
    assert small["kb_sent"] == pytest.approx(large["kb_sent"], rel=0.01) and largest["kb_sent"] > large["kb_sent"] > 66
    assert large["tokens"] - small["tokens"] == pytest.approx(20_000, rel=0.2)
    assert "CPU per turn" in report.text(result)


def test_slopes_separate_bytes_from_tokens() -> None:
    points = [{"kb_sent": kb, "tokens": tokens, "cpu_us": 500 + 7 * kb} for kb in (50.0, 80.0) for tokens in (2e4, 8e4)]
    slopes = measure.slopes(points)
    assert (slopes["base_us"], slopes["us_per_kb_sent"], slopes["us_per_1k_tokens_captured"]) == pytest.approx((500, 7, 0), abs=1e-6)


@pytest.mark.parametrize("dialect", ["openai", "anthropic"])
def test_bodies_are_seeded_and_of_the_promised_size(dialect: str) -> None:
    bodies = [Conversation(Traffic(), dialect, "one").body() for _ in range(2)]  # type: ignore[arg-type]
    assert bodies[0] == bodies[1]
    per_turn = 900 + 480 + 300
    assert 60_000 < len(bodies[0]) + TURNS * per_turn / 2 < 75_000
