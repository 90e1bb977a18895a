"""What the doctor finds: planted leftovers by their names, a slow start by its trend, nothing on a clean machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

from click.testing import CliRunner

from sandbox.cli import main
from sandbox.doctor.facts import Facts, StartTrend, gather, start_trend
from sandbox.doctor.judge import judge
from sandbox.environments.namespace.host import Host
from sandbox.environments.spec import SandboxSpec
from tests.sandbox.support import needs_sandbox


def warned(facts: Facts) -> set[str]:
    found = judge(facts)
    assert all(finding.hint for finding in found if finding.state == "warn")
    return {finding.check for finding in found if finding.state == "warn"}


def test_every_kind_of_trouble_is_named_with_a_hint() -> None:
    assert warned(Facts(disk=(0.5, 500))) == set()
    assert warned(Facts(disk=(0.99, 1), shared_memory=0.9, cgroups=60_000)) == {"disk", "shared memory", "kernel"}
    assert warned(Facts(disk=(0.99, 600), percpu_mb=30_000)) == {"kernel"}
    assert warned(Facts(images=(3, 10, 0.5))) == {"images"} and warned(Facts(images=(3, 10, 0))) == set()
    left = Facts(abandoned=[Path("/x")], groups=["/g"], group_processes=2, mounts=["/m"], spawners=[7], elsewhere=["pods"])
    assert warned(left) == {"state", "cgroups", "mounts", "spawners", "containers and pods"}
    assert warned(Facts(trends=[StartTrend("slow", 100, 0.05, 3.0), StartTrend("quick", 100, 0.01, 0.05)])) == {
        "start of sandboxes in slow"
    }


def test_the_trend_comes_from_the_results_of_trials(tmp_path: Path) -> None:
    for number in range(16):
        folder = tmp_path / "run" / "trials" / f"t{number}"
        folder.mkdir(parents=True)
        minute = f"2026-01-01T00:{number:02}"
        span = {"started_at": f"{minute}:00Z", "finished_at": f"{minute}:{1 + number:02}Z"}
        (folder / "result.json").write_text(json.dumps({"environment_setup": span}))
    (tmp_path / "run" / "trials" / "t3" / "result.json").write_text("{")
    assert start_trend(tmp_path / "run") == StartTrend("run", 15, 2.0, 15.0)
    assert start_trend(tmp_path) is None


@needs_sandbox
def test_what_a_killed_spawner_leaves_is_found_and_swept(tmp_path: Path) -> None:
    base = tmp_path / "runs" / "r" / "sandboxes"

    async def killed() -> None:
        host = await Host.start(base)
        await host.create(SandboxSpec())
        assert gather(tmp_path / "runs").abandoned == []  # a living one is no leftover
        os.kill(host.pid, signal.SIGKILL)
        await host._process.wait()

    asyncio.run(killed())
    facts = gather(tmp_path / "runs")
    assert [path.parent for path in facts.abandoned] == [base]
    name = facts.abandoned[0].name
    result = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path), "--sweep", "--json"])
    rows = {row["check"]: row for row in json.loads(result.stdout)}
    assert rows["containers and pods"]["state"] == "ok"
    assert rows["state"]["state"] == "ok" and name not in rows["cgroups"]["message"]
    assert not list(base.iterdir())
