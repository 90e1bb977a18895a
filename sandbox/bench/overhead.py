"""What a trial costs beside its agent: set-up, collecting and verification of whole trials through Harbor, one after the other."""

from __future__ import annotations

import resource
import time
from statistics import median
from typing import Any

from sandbox.runner.drive import Attempt
from sandbox.runner.outcomes import decide
from sandbox.runner.selftest import NO_PROXY, reference_room
from server.schemas.outcome import Scored, Stage
from server.schemas.runspec import RunSpec
from server.schemas.tasks import TRAIN
from server.schemas.trials import TrialRequest

TRIAL_S = 60.0
"""A short trial of a real agent; the share of the overhead is stated against it."""
_OVERHEAD = (Stage.SANDBOX_SETUP, Stage.AGENT_SETUP, Stage.COLLECT, Stage.VERIFIER)


class _Clock:
    """Seconds by stage of one trial."""

    def __init__(self) -> None:
        self.seconds: dict[Stage, float] = {}
        self._stage, self._since = Stage.QUEUED, time.perf_counter()

    def enter(self, stage: Stage) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0) + now - self._since
        self._stage, self._since = stage, now


async def run(n: int) -> dict[str, Any]:
    """`runner_cpu_ms_per_trial` is CPU of the runner's process alone, Harbor within it; sandboxes and graded code are not in it."""
    document = {"model": {"path": "builtin:none"}, "harnesses": [{"name": "mini-swe-agent", "version": "2.4.6"}]}
    spec = RunSpec.model_validate(document | {"data": {"family": "onebug", "train_tasks": 4, "held_out_tasks": 1}})
    clocks, solved = [], 0
    async with reference_room(spec, 4, {}) as (room, _):
        for number in range(-2, n):  # the first two warm up
            if number == 0:
                before = _own_cpu_s()
            task = room.index[TRAIN][number % len(room.index[TRAIN])]
            request = TrialRequest(trial_id=f"t{number + 2}", task=task, harness="oracle", proxy=NO_PROXY)
            clock = _Clock()
            outcome = decide(await Attempt(room, request, request.trial_id, clock).run())
            clock.enter(Stage.DONE)
            if number >= 0:
                clocks.append(clock)
                solved += isinstance(outcome, Scored) and outcome.reward
        cpu = _own_cpu_s() - before
    stages = {stage.value: round(median(clock.seconds.get(stage, 0) for clock in clocks) * 1e3, 1) for stage in _OVERHEAD}
    whole = median(sum(clock.seconds.get(stage, 0) for stage in _OVERHEAD) for clock in clocks)
    return {
        "trials": n,
        "errors": n - solved,
        "overhead_p50_ms": round(whole * 1e3, 1),
        "overhead_by_stage_p50_ms": stages,
        "share_of_60_s": round(whole / TRIAL_S, 4),
        "runner_cpu_ms_per_trial": round(cpu / n * 1e3, 1),
    }


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
