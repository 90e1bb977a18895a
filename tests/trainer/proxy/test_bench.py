from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from trainer.cli import main


@pytest.mark.slow
def test_bench_measures_one_and_many_rollouts() -> None:
    result = CliRunner().invoke(main, ["bench", "proxy", "--runs", "1", "--json"])
    assert result.exit_code == 0, result.output
    one, many = json.loads(result.output)["rows"]
    assert (one["sessions"], many["sessions"], one["turns"]) == (1, 64, 4)
    assert one["added_p50_ms"] > 0 < many["calls_per_s"]
