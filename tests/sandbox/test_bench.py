"""`rl bench sandbox` answers in the words of its bars, with every variant in the same run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from .support import needs_sandbox


@needs_sandbox
@pytest.mark.slow
def test_one_run_has_every_figure_and_no_error() -> None:
    command = [sys.executable, "-P", "-m", "sandbox.cli", "bench", "sandbox", "--n", "4", "--concurrency", "4", "--json"]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)
    assert figures["errors"] == 0 and figures["at_once"] == 64
    for key in ("ready_p50_ms", "exec_p50_ms", "cycles_per_s", "cpu_ms_per_cycle"):
        assert figures[key] > 0
    disk = figures["variants"]["disk"]
    assert disk["errors"] == 0 if os.geteuid() == 0 else "needs root" in disk["absent"]
    assert figures["variants"]["bubblewrap"].keys() & {"absent", "cycle_p50_ms"}
    trial = figures["trial"]
    assert trial["errors"] == 0 and trial["runner_cpu_ms_per_trial"] > 0
    assert trial["share_of_60_s"] == pytest.approx(trial["overhead_p50_ms"] / 60_000, abs=1e-3)
