"""Whole trials in real sandboxes with an agent that plays a script: what earns a reward, and what an agent can do about it."""

import asyncio
from typing import override

import pytest

from sandbox.environments.namespace.inside import MAX_PACKET
from sandbox.harnesses.reference import Script
from sandbox.integrity.environment import TrialEnvironment
from sandbox.integrity.verdict import Grade
from sandbox.runner.drive import Attempt, Room
from sandbox.runner.outcomes import decide
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.tasks import TRAIN

from .support import Stages, in_room, needs_sandbox, play, request, solution, spec

pytestmark = needs_sandbox


def test_a_cheat_beside_the_real_fix_does_not_cost_the_reward() -> None:
    async def body(room: Room) -> None:
        script = (
            f"{solution(room)}\nln -s /etc evil; mkfifo pipe; chmod 700 .; mkdir a; chmod 555 a; printf x > .hidden; rm -rf /logs/agent/*"
        )
        facts, _ = await play(room, script)
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED)
        assert facts.verdict is not None and facts.verdict.changed >= 3

    in_room(body)


def test_killing_all_that_can_be_killed_while_being_graded_is_a_zero() -> None:
    async def body(room: Room) -> None:
        facts, _ = await play(room, f"{solution(room)}\nfor f in *.py; do printf 'import os\\nos.kill(-1, 9)\\n' >> $f; done")
        assert facts.verdict is not None and facts.verdict.grade in (Grade.FAILED, Grade.TAMPERED)

    in_room(body)


def test_stages_come_in_order_and_the_exit_code_decides_nothing() -> None:
    async def body(room: Room) -> None:
        facts, attempt = await play(room, f"{solution(room)}\nexit 3")
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED)
        assert attempt.exit_code == 3
        assert isinstance(attempt.observer, Stages)
        assert attempt.observer.seen == [Stage.SANDBOX_SETUP, Stage.AGENT_SETUP, Stage.AGENT, Stage.COLLECT, Stage.VERIFIER]

    in_room(body)


def test_nothing_secret_is_kept_with_a_trial() -> None:
    async def body(room: Room) -> None:
        await play(room, "true")
        kept = [path.read_bytes() for path in (room.trials / "t").rglob("*") if path.is_file()]
        assert kept and not any(b"secret-key-of-the-rollout" in data for data in kept)

    in_room(body)


def test_an_agent_that_runs_out_of_time() -> None:
    async def body(room: Room) -> None:
        facts, _ = await play(room, f"{solution(room)}\nsleep 60", agent_s=0.5)
        outcome = decide(facts)
        assert isinstance(outcome, Failed) and outcome.cause is Cause.AGENT_TIMEOUT

    in_room(body)


def test_a_time_out_is_graded_where_the_spec_says_so() -> None:
    async def body(room: Room) -> None:
        facts, _ = await play(room, f"{solution(room)}\nsleep 60", agent_s=1.5)
        assert decide(facts) == Scored(reward=1, termination=Termination.COMPLETED)
        # A tree that cannot be collected is graded too: it was the agent's failure by time-out, and no zero.
        broken, _ = await play(room, "for n in 1 2 3; do truncate -s 15M s$n; done; sleep 60", trial_id="broken", agent_s=4)
        outcome = decide(broken)
        assert isinstance(outcome, Scored)
        assert (outcome.reward, outcome.termination) == (0, Termination.AGENT_FAULT)

    in_room(body, spec(capture={"timeout": "grade"}))


FILLS_THE_DISK = "head -c 40000000 /dev/zero > big; true"
TREE_TOO_DEEP = """
name=$(printf 'x%.0s' $(seq 200))
for i in $(seq 60); do mkdir -p $name && cd $name; done
echo 1 > f
"""
BREAKS_ITS_LOG = r"printf '\377' > /logs/agent/trajectory.json"
"""Harbor reads that file for its own statistics, and takes an encoding for granted."""
EATS_MEMORY = "python3 -c 'x = bytearray(400_000_000)'; true"


@pytest.mark.parametrize("script", [FILLS_THE_DISK, TREE_TOO_DEEP, BREAKS_ITS_LOG, EATS_MEMORY])
def test_an_agent_that_breaks_its_sandbox_does_not_escape_its_zero(script: str) -> None:
    async def body(room: Room) -> None:
        outcome = decide((await play(room, script))[0])
        assert isinstance(outcome, Scored), outcome
        assert outcome.reward == 0

    in_room(body)


@pytest.mark.parametrize("end", ["sleep 60", "kill -9 -1"])
def test_what_it_broke_is_graded_also_where_its_time_ran_out_or_nothing_is_left_of_it(end: str) -> None:
    async def body(room: Room) -> None:
        outcome = decide((await play(room, f"{solution(room)}\n({EATS_MEMORY})\n{end}", agent_s=3))[0])
        assert isinstance(outcome, Scored), outcome
        assert (outcome.reward, outcome.termination) == (1, Termination.AGENT_FAULT)

    in_room(body)


class InOneWord(Script):
    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        await self.start_bare(environment, ["/bin/echo", "x" * MAX_PACKET], {}, b"")


def test_a_way_into_the_sandbox_that_does_not_open_is_a_failed_set_up_of_the_agent() -> None:
    async def body(room: Room) -> None:
        room.agents["script"] = InOneWord
        outcome = decide(await Attempt(room, request(room, "t", "script"), "t", Stages()).run())
        assert isinstance(outcome, Failed)
        assert (outcome.cause, outcome.stage) == (Cause.AGENT_SETUP, Stage.AGENT) and "upload large input" in outcome.detail

    in_room(body)


def test_a_full_disk_is_the_agents_fault() -> None:
    async def body(room: Room) -> None:
        outcome = decide((await play(room, f"{solution(room)}\n{FILLS_THE_DISK}; rm -f big"))[0])
        assert isinstance(outcome, Scored)
        assert (outcome.reward, outcome.termination) in {(1, Termination.COMPLETED), (1, Termination.AGENT_FAULT)}

    in_room(body)


def test_a_task_that_vanished_is_a_failed_set_up() -> None:
    async def body(room: Room) -> None:
        asked = request(room, "t", "noop")
        (room.tasks / TRAIN / asked.task / "environment" / "workspace").rename(room.tasks / "gone")
        outcome = decide(await Attempt(room, asked, "t", Stages()).run())
        assert isinstance(outcome, Failed)
        assert outcome.cause is Cause.SANDBOX_SETUP and "workspace" in outcome.detail

    in_room(body)


def test_cancelling_leaves_no_sandbox() -> None:
    async def body(room: Room) -> None:
        asked = request(room, "t", "script")
        room.launchers["script"].script = "sleep 60"
        stages = Stages()
        running = asyncio.create_task(Attempt(room, asked, "t", stages).run())
        await stages.agent_runs.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not (room.trials / "t" / "verifier" / "verdict.json").exists()

    in_room(body)
