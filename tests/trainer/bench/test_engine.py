from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from trainer.cli import main


@pytest.mark.slow
def test_bench_engine_reports_both_sides_and_their_ratio() -> None:
    result = CliRunner().invoke(main, ["bench", "engine", "--runs", "1", "--json"])
    assert result.exit_code == 0, result.output
    cases = json.loads(result.output)["comparisons"]
    assert [(case["sessions"], case["turns"]) for case in cases] == [(1, 1), (64, 1), (64, 3)]
    for case in cases:
        assert case["ratio"] == pytest.approx(case["engine_tokens_per_s"] / case["transformers_tokens_per_s"])
