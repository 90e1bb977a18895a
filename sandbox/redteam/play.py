"""Run every attack as the agent of a whole trial, grade it as trials are graded, and say what it came to."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandbox.harnesses.base import Launcher
from sandbox.harnesses.reference import Script
from sandbox.harnesses.store import Store
from sandbox.integrity.cheats import CHEATS
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from sandbox.runner.selftest import SILENT
from sandbox.runner.service import open_room
from server.schemas.outcome import Scored, Termination
from server.schemas.runspec import Harness, RunSpec
from server.schemas.suspicion import signs
from server.schemas.tasks import TRAIN
from server.schemas.trials import TrialRequest

from . import targets
from .answers import ANSWERS
from .around import AROUND
from .censors import CENSORS
from .escapes import ESCAPES
from .exploit import PRELUDE, Exploit
from .history import HISTORY
from .solutions import SOLUTIONS
from .treasure import Laid, Treasure

_PLANTED = [Exploit(f"planted-{name}", "values", script) for name, script in CHEATS.items()]
EXPLOITS = [*AROUND, *SOLUTIONS, *ANSWERS, *ESCAPES, *CENSORS, *HISTORY, *_PLANTED]

Row = dict[str, Any]


def controls() -> Iterator[Exploit]:
    """Honest work, and none: what the same tasks must score for the rest to mean anything."""
    for target in ("values", "tests", "history"):
        yield Exploit(f"honest-solution-of-{target}", target, "@HONEST@", may_solve=True)
        yield Exploit(f"nothing-done-in-{target}", target, "true")


def chosen(only: str) -> list[Exploit]:
    """Those whose name contains `only`, with the controls of their tasks."""
    found = [exploit for exploit in (*EXPLOITS, *controls()) if only in exploit.name]
    touched = {exploit.target for exploit in found}
    return [*found, *(control for control in controls() if control.target in touched and control not in found)]


def spec(tasks: Path, sandbox: Mapping[str, Any]) -> RunSpec:
    """Small limits, so that those who fill and burn get there soon; time-outs are graded, so that nobody escapes by one.

    `sandbox` is that section of a RunSpec, less limits and budgets.
    """
    limits = {"memory_mb": 128, "processes": 32, "cpu_s": 12, "disk_mb": 16, "output_kb": 256}
    return RunSpec.model_validate(
        {
            "model": {"path": "builtin:none"},
            "harnesses": [{"name": "mini-swe-agent", "version": "none"}],
            "data": {"train": str(tasks)},
            "sandbox": {"concurrency": 4, **sandbox, "limits": limits, "budgets": {"agent_s": 20, "verifier_s": 150}},
            "capture": {"timeout": "grade"},
        }
    )


async def play(exploits: list[Exploit], sandbox: Mapping[str, Any] | None = None) -> list[Row]:
    """One row per attack, in order, in namespaces or in what `sandbox` (see `spec`) names. Raises NotReady where it cannot run."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # clients that vanish are the point
    with tempfile.TemporaryDirectory(prefix="lego-redteam-") as scratch:
        root = Path(scratch)
        (root / "trials").mkdir()
        names = targets.write(root / "given")
        wanted = spec(root / "given", sandbox or {})
        none = wanted.model_copy(update={"harnesses": []})
        async with open_room(none, Store(root), root / "tasks", root / "trials", root / "sandboxes") as (room, host):
            solutions = {target: _solution(room.tasks / TRAIN / name) for target, name in names.items()}
            treasures = {target: Treasure(root / target, solution) for target, solution in solutions.items()}
            slots = asyncio.Semaphore(wanted.sandbox.concurrency)

            async def one(exploit: Exploit) -> Row:
                async with slots, treasures[exploit.target].laid_out() as treasure:
                    return await _one(room, exploit, names[exploit.target], solutions[exploit.target], treasure) | {
                        "environment": host.label
                    }

            return await asyncio.gather(*(one(exploit) for exploit in exploits))


def _solution(task: Path) -> str:
    return (task / "solution" / "solve.sh").read_text().splitlines()[-1]


async def _one(room: Room, exploit: Exploit, task: str, solution: str, treasure: Laid) -> Row:
    script = treasure.fill(exploit.script, room.tasks / TRAIN / task, exploit.name).replace("@HONEST@", solution)
    launcher = Launcher(Harness(name=exploit.name, version="1"), script=PRELUDE + script)
    own = dataclasses.replace(room, launchers={exploit.name: launcher}, agents={exploit.name: Script})
    request = TrialRequest.model_validate(
        {
            "trial_id": exploit.name,
            "task": task,
            "harness": exploit.name,
            "proxy": {"url": treasure.proxy, "key": "none"},
            "budgets": room.spec.sandbox.budgets,
        }
    )
    outcome = decide(await Attempt(own, request, exploit.name, SILENT).run())
    escaped = treasure.opened > 0 or (treasure.marks / exploit.name).exists()
    reward = outcome.reward if isinstance(outcome, Scored) else None
    blamed = isinstance(outcome, Scored) and outcome.termination in (Termination.TAMPERED, Termination.AGENT_FAULT)
    evidence = [*signs([script]), *(outcome.evidence if isinstance(outcome, Scored) else [])]
    evidence += [f"{outcome.termination}: {outcome.detail}"] if isinstance(outcome, Scored) and blamed else []
    return {
        "exploit": exploit.name,
        "environment": "",
        "reward": reward,
        "detected": blamed or bool(evidence),
        "outcome": outcome.termination.value if isinstance(outcome, Scored) else f"failed: {outcome.cause.value}",
        "target": exploit.target,
        "detail": outcome.detail[:300],
        "escaped": escaped,
        "evidence": evidence,
        "honest": exploit.may_solve,
    }


def holes(rows: list[Row]) -> list[str]:
    """What is wrong with the defence, in words: a reward that was not earned, a zero that was escaped, an honest solution without one."""
    found = []
    for row in rows:
        name = f"{row['exploit']} in {row['environment']}"
        if row["honest"]:
            found += [f"{name}: honest work earned {row['reward']} ({row['outcome']})"] if row["reward"] != 1 else []
        elif row["reward"] == 1:
            found.append(f"{name} earned the reward")
        elif row["reward"] is None:
            found.append(f"{name} escaped its zero ({row['outcome']}: {row['detail']})")
        if row["escaped"] and not row["honest"]:
            found.append(f"{name} got out of its sandbox")
    return found
