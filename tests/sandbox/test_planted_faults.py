"""A planted fault of this side gives exactly its cause, and never a reward. The trainer's half: tests/trainer/rollout/test_admission.py."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import override

import pytest

from sandbox.environments.namespace import sandbox as sandboxes
from sandbox.environments.namespace.host import Host
from sandbox.harnesses.base import HarnessAgent
from sandbox.harnesses.reference import Script
from sandbox.harnesses.warm import WarmStartError
from sandbox.integrity.environment import TrialEnvironment
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import Facts, decide
from server.schemas.hints import HINTS
from server.schemas.outcome import ADMISSION, Cause, Failed, Fault, Scored, Stage
from server.schemas.tasks import TRAIN
from tests.sandbox.environments import docker_engine as docker
from tests.sandbox.environments import kubernetes_room as kubernetes
from tests.sandbox.environments.fake_kubernetes import NAMESPACE

from .support import Stages, in_room, needs_sandbox, request, script_room, spec

pytestmark = needs_sandbox


class NoWarmParent(HarnessAgent):
    @staticmethod
    def name() -> str:
        return "script"

    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        raise WarmStartError("the warm parent died")


def task_of(room: Room) -> Path:
    return room.tasks / TRAIN / room.index[TRAIN][0]


async def tree_vanished(room: Room) -> Facts:
    (task_of(room) / "environment" / "workspace").rename(room.tasks / "gone")
    return await Attempt(room, request(room, "t", "noop"), "t", Stages()).run()


async def harness_cannot_start(room: Room) -> Facts:
    room.agents["script"] = NoWarmParent
    return await Attempt(room, request(room, "t", "script"), "t", Stages()).run()


async def time_is_up(room: Room) -> Facts:
    room.launchers["script"].script = "sleep 60"
    return await Attempt(room, request(room, "t", "script", agent_s=0.5), "t", Stages()).run()


async def spawner_killed(room: Room) -> Facts:
    room.launchers["script"].script = "sleep 60"
    stages = Stages()
    running = asyncio.create_task(Attempt(room, request(room, "t", "script"), "t", stages).run())
    await stages.agent_runs.wait()
    host = Host.running(room.sandboxes)
    assert host is not None
    os.kill(host.pid, signal.SIGKILL)
    return await running


async def check_vanished(room: Room) -> Facts:
    (task_of(room) / "tests" / "check.py").unlink()
    return await Attempt(room, request(room, "t", "oracle"), "t", Stages()).run()


async def check_broken(room: Room) -> Facts:
    (task_of(room) / "tests" / "check.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    return await Attempt(room, request(room, "t", "noop"), "t", Stages()).run()


async def check_hangs(room: Room) -> Facts:
    (task_of(room) / "tests" / "check.py").write_text("import signal, time\nsignal.alarm(0)\ntime.sleep(60)\n")
    return await Attempt(room, request(room, "t", "noop", verifier_s=8), "t", Stages()).run()


async def image_missing(room: Room) -> Facts:
    config = task_of(room) / "task.toml"
    config.write_text(config.read_text().replace("[environment]", '[environment]\ndocker_image = "nowhere.invalid/none:1"'))
    return await Attempt(room, request(room, "t", "noop"), "t", Stages()).run()


FAULTS: dict[Callable[[Room], Awaitable[Facts]], tuple[Cause, str]] = {
    tree_vanished: (Cause.SANDBOX_SETUP, "workspace"),
    harness_cannot_start: (Cause.AGENT_SETUP, "the warm parent died"),
    time_is_up: (Cause.AGENT_TIMEOUT, "timed out"),
    spawner_killed: (Cause.RUNNER_LOST, "is gone"),
    check_vanished: (Cause.VERIFIER, "no test function"),
    check_hangs: (Cause.VERIFIER_TIMEOUT, "broke in the pristine tree"),
}


WITH_IMAGES: dict[Callable[[Room], Awaitable[Facts]], Cause] = {
    **{fault: cause for fault, (cause, _) in FAULTS.items() if fault is not spawner_killed},
    tree_vanished: Cause.IMAGE,  # where there are images, a task without a tree has it in its image
    image_missing: Cause.IMAGE,
}
"""The end of an engine, a pod or an API server under a trial: `docker/test_trials.py` and `kubernetes/test_faults.py`."""


def check(outcome: Scored | Failed, cause: Cause, words: str = "") -> None:
    assert isinstance(outcome, Failed), outcome
    assert (outcome.cause, words in outcome.detail, bool(outcome.detail)) == (cause, True, True), outcome
    row = ADMISSION[outcome.cause]
    assert not row.trained and row.fault is not Fault.POLICY
    assert HINTS[cause]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_of_ours_gives_exactly_its_cause(fault: Callable[[Room], Awaitable[Facts]]) -> None:
    cause, words = FAULTS[fault]

    async def body(room: Room) -> None:
        check(decide(await fault(room)), cause, words)

    in_room(body)


async def every_fault(room: Room) -> None:
    """Each with a task of its own."""
    agents = dict(room.agents)
    for fault, cause in WITH_IMAGES.items():
        check(decide(await fault(room)), cause)
        room.index[TRAIN].append(room.index[TRAIN].pop(0))
        room.agents.update(agents)


DATA = {"family": "onebug", "train_tasks": len(WITH_IMAGES), "held_out_tasks": 1}


@pytest.mark.slow
def test_and_so_it_does_in_docker(docker_engine: docker.TestEngine) -> None:
    in_room(every_fault, spec(sandbox=docker.settings_for(docker_engine).model_dump(mode="json"), data=DATA), len(WITH_IMAGES))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_and_in_kubernetes() -> None:
    async def main() -> None:
        async with kubernetes.fake_cluster() as (fake, _):
            settings = kubernetes.settings_for(fake.kubeconfig, kubernetes.IMAGE, namespace=NAMESPACE)
            async with script_room(spec(sandbox=settings.model_dump(mode="json"), data=DATA), len(WITH_IMAGES)) as room:
                await every_fault(room)

    asyncio.run(main())


class ReadTooSlowly(Script):
    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        await super().launch(instruction, environment)
        sandboxes._TRANSFER_S = 0


def test_a_machine_too_slow_to_read_what_is_left_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as a tree that the agent broke."""
    monkeypatch.setattr(sandboxes, "_TRANSFER_S", 60)

    async def body(room: Room) -> None:
        room.agents["script"] = ReadTooSlowly
        check(decide(await Attempt(room, request(room, "t", "script"), "t", Stages()).run()), Cause.RUNNER_LOST, "took longer than")

    in_room(body)


def test_a_check_that_kills_itself_in_an_untouched_tree_scores_nobody() -> None:
    async def body(room: Room) -> None:
        outcome = decide(await check_broken(room))
        assert not (isinstance(outcome, Failed) and outcome.cause is Cause.VERIFIER_TIMEOUT)
        assert not hasattr(outcome, "reward") or outcome.reward == 0

    in_room(body)


def test_memory_and_signals_are_named() -> None:
    """What the agent did to itself is graded, with the cause in words."""

    async def body(room: Room) -> None:
        room.launchers["script"].script = "python3 -c 'x = bytearray(400_000_000)'; kill -9 $$"
        facts = await Attempt(room, request(room, "t", "script"), "t", Stages()).run()
        assert "killed" in facts.fault and facts.stage is Stage.DONE

    in_room(body, spec())
