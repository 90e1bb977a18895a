"""`rl demo`: the closed loop from nothing to a verdict, on this machine."""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable
from typing import Any

from server.schemas.api import CheckRequest, Point, RunStatus, SpecRequest, StepRow, TrialRow
from server.schemas.datadir import DataDir
from server.schemas.states import Phase, RunState

from . import rooms, show
from .client import Client
from .errors import ControlError
from .local import ensure_server, stop_server
from .significance import rise_p_value

ALPHA = 0.05
PEARSON = "training/rollout_actor_probs_pearson_corr"
_FIRST = "builtin:onebug-mini-swe-agent"
"""What a policy for several harnesses starts from: it knows the work, and has to learn the words."""
TOKENS = {
    "sampled_tokens": "lego/sampled_tokens",
    "trained_tokens": "lego/trained_tokens",
    "zero_advantage_tokens": "lego/excluded_tokens/zero_advantage",
}

WHAT_IT_IS = (
    "The policy: a Qwen3-MoE of half a million parameters made for this demo. Its thousand tokens or so hold whole blocks of the",
    "harness's prompt, and it was warm-started on right and wrong demonstrations. Harness, sandbox, grading and trainer are real.",
    "A rise shows that the loop learns from its own rollouts; it says nothing of larger models, real repositories or other tasks.",
)


class Demo:
    """One demo on a data directory. `say` prints a line."""

    def __init__(self, data: DataDir, preset: str, overrides: dict[str, Any], say: Callable[[str], None]) -> None:
        self._data = data
        self._request = SpecRequest(document={"extends": preset}, overrides=overrides)
        self._say = say

    def run(self, watch: Callable[[str], RunStatus], *, as_json: bool, stop_after: bool) -> int:
        """Exit code 0 only when the run succeeded and the rise is significant."""
        for room in (rooms.SANDBOX, rooms.TRAINER):
            rooms.room_command(room, [])
        for line in WHAT_IT_IS:
            self._say(line)
        up = ensure_server(self._data)
        try:
            status = self._run(up.client, watch)
            result = summarise(status, up.client.steps(status.run_id), up.client.trials(status.run_id)) if status else None
        finally:
            if stop_after and up.started:
                stop_server(self._data)
            else:
                self._say(f"The server stays up for a look: {up.client.dashboard()}  (`rl down` stops it)")
        if status is None or result is None:
            return 1
        self._say(verdict(status, result))
        if as_json:
            self._say(json.dumps(result))
        return 0 if status.state is RunState.SUCCEEDED and significant(result) else 1

    def remake_policy(self, seed: int) -> int:
        """Make the preset's policy anew below the data directory, with progress on the terminal; the shipped one stays as it is."""
        up = ensure_server(self._data)
        try:
            harnesses = self._harnesses(up.client)
        finally:
            if up.started:
                stop_server(self._data)
        mixed = len(harnesses) > 1
        out = self._data.root / "policies" / f"onebug-{'mixed' if mixed else harnesses[0]}-seed{seed}"
        options = ["--harness", *harnesses, "--out", str(out), "--seed", str(seed), *(["--start", _FIRST] if mixed else [])]
        command = rooms.room_command(rooms.TRAINER, options, module="trainer.policies.remake")
        code = subprocess.run(command, check=False).returncode
        if code == 0:
            self._say(f"a run starts from it with `rl run {self._request.document['extends']} --set model.path={out}`")
        return code

    def _run(self, client: Client, watch: Callable[[str], RunStatus]) -> RunStatus | None:
        """The ended run; None when the checks found something that would make it fail."""
        for harness in self._harnesses(client):
            self._say(f"Runtime of {harness} (fetched once, about a minute):")
            self._install(harness)
        self._say("Checking the machine, the harness and the grading ...")
        report = client.report(CheckRequest(**self._request.model_dump()))
        if not report.ok:
            for line in show.report(report):
                self._say(line)
            return None
        plan = client.plan(self._request)
        self._say(plan.summary)
        started = client.start(plan.digest)
        self._say(f"Live UI: {client.dashboard(started.run_id)}")
        return watch(started.run_id)

    def _harnesses(self, client: Client) -> list[str]:
        return [harness["name"] for harness in client.plan(self._request).spec["harnesses"]]

    def _install(self, harness: str) -> None:
        command = rooms.room_command(rooms.SANDBOX, ["harness", "install", harness, "--runtimes", str(self._data.runtimes)])
        if subprocess.run(command, check=False).returncode:
            raise ControlError(
                f"the runtime of harness {harness} could not be installed: see above, then try `rl harness install {harness}`"
            )


def summarise(status: RunStatus, steps: list[StepRow], trials: list[TrialRow]) -> dict[str, Any]:
    """The figures of a demo run; None where the run did not come that far. Times are seconds since the run was created."""
    first, last = (status.held_out[0], status.held_out[-1]) if len(status.held_out) > 1 else (None, None)
    begun = [trial.started for trial in trials if trial.started]
    evaluated = [trial.finished for trial in trials if trial.finished and trial.phase is Phase.EVAL]
    pearson = [row.metrics[PEARSON] for row in steps if not math.isnan(row.metrics.get(PEARSON, math.nan))]
    return {
        "run": status.run_id,
        "steps": status.steps_done,
        "solve_rate_first": round(first.value, 4) if first else None,
        "solve_rate_last": round(last.value, 4) if last else None,
        "p_value": rise_p_value(*_counts(first), *_counts(last)) if first and last else None,
        "trials": status.trials,
        "failed": status.failed,
        **{name: int(sum(row.metrics.get(metric, 0) for row in steps)) for name, metric in TOKENS.items()},
        "pearson": min(pearson, default=None),
        "startup_s": round(min(begun) - status.created, 2) if begun else None,
        "wall_s": round(max(evaluated) - status.created, 2) if evaluated else None,
    }


def significant(result: dict[str, Any]) -> bool:
    return result["p_value"] is not None and result["p_value"] < ALPHA


def verdict(status: RunStatus, result: dict[str, Any]) -> str:
    if status.state is not RunState.SUCCEEDED:
        return f"The run {status.state}: {status.problem or status.reason or status.summary}"
    if result["p_value"] is None:
        return "The run succeeded, but without two held-out evaluations nothing can be said about a rise."
    rates = f"{result['solve_rate_first']:.3f} → {result['solve_rate_last']:.3f} (one-sided Fisher p = {result['p_value']:.2g})"
    return f"Held-out solve rate {rates}: " + ("a significant rise." if significant(result) else f"no rise at the {ALPHA} level.")


def _counts(point: Point) -> tuple[int, int]:
    """(solved, rollouts): the rate is a count over n, so rounding gives the count back."""
    return round(point.value * point.n), point.n
