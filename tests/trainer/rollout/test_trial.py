"""One rollout through the real proxy: scripted engine on one side, a runner that plays the harness on the other."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from server.schemas.capture import CaptureRecord
from server.schemas.events import CaptureBody, Event, EventBody, OutcomeBody, TrialBody
from server.schemas.outcome import Cause, Failed, Scored, Stage, Termination
from server.schemas.rundir import RunDir
from server.schemas.runspec import Data, Model, RunSpec
from server.schemas.runspec import Harness as HarnessSpec
from server.schemas.runspec import Rollout as RolloutSpec
from server.schemas.spool import Reporter
from server.schemas.states import Phase, TrialState
from server.schemas.trials import TrialRequest
from tests.trainer.scripted import ScriptedEngine, say
from tests.trainer.support.fake_runner import FakeRunner, Harness, scored
from trainer.capture.file import from_bytes
from trainer.engine.base import EngineError
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.rollout.groups import Group
from trainer.rollout.rows import agent_loop_outputs, fields_and_tag, trained_samples
from trainer.rollout.runner_client import RunnerClient
from trainer.rollout.trial import TrialRoom
from trainer.vocabulary import byte_level

pytestmark = pytest.mark.anyio

GROUP = Group("s001-t", 1, Phase.TRAIN, "t", "mini", 4, "uid")


@dataclass
class World:
    room: TrialRoom
    engine: ScriptedEngine
    runner: FakeRunner
    run: RunDir

    def events(self) -> list[EventBody]:
        lines = (self.run.spool / "trainer.jsonl").read_text().splitlines()
        return [Event.model_validate_json(line).body for line in lines]


async def two_turns(harness: Harness, request: TrialRequest) -> Scored:
    messages = [{"role": "user", "content": "repair it"}]
    for _ in range(2):
        reply = await harness.chat(messages)
        if reply is None:
            break
        messages += [reply, {"role": "user", "content": "go on"}]
    return scored(1)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    run = RunDir(tmp_path)
    run.captures.mkdir()
    tokenizer = byte_level()
    engine = ScriptedEngine(tokenizer, write=lambda: say("hm"))
    rendering = Rendering(tokenizer)
    proxy = Proxy(engine, rendering)
    await proxy.start()
    runner = FakeRunner(run.runner_file, "token", two_turns)
    runner.start()
    spec = RunSpec(
        model=Model(path="m", context=400),
        harnesses=[HarnessSpec(name="mini", version="1")],
        data=Data(family="onebug"),
        rollout=RolloutSpec(max_turns=2, max_new_tokens=16),
    )
    reporter = Reporter("http://127.0.0.1:1", "run-1", "events", "trainer", run.spool)
    client = RunnerClient(run.runner_file, "token")
    yield World(TrialRoom(run, spec, proxy, client, reporter, rendering.stop_token_ids), engine, runner, run)
    await client.close()
    await proxy.stop()
    runner.stop()
    reporter.close(0)


async def test_a_trial_becomes_a_rollout_with_a_capture_and_events(world: World) -> None:
    rollout = await world.room.play(GROUP, 3)
    assert rollout.trial_id == "s001-t-3" and rollout.outcome == scored(1) and rollout.reward == 1
    assert rollout.turns == 2
    assert rollout.sampled == sum(len(call.sampled) for call in world.engine.calls) == sum(int(s.mask.sum()) for s in rollout.samples)

    request = world.runner.requests[0]
    assert (request.task, request.split, request.harness) == ("t", "train", "mini")
    assert len(request.proxy.key.get_secret_value()) >= 32
    queued, outcome, capture = world.events()
    assert queued == TrialBody(trial_id="s001-t-3", state=TrialState.QUEUED, stage=Stage.QUEUED, group_id="s001-t", sample=3)
    assert outcome == OutcomeBody(trial_id="s001-t-3", outcome=scored(1))
    assert isinstance(capture, CaptureBody) and capture.sampled_tokens == rollout.sampled and capture.turns == 2

    record = CaptureRecord.model_validate_json((world.run.root / capture.path).read_bytes())
    assert record.sampled_tokens == rollout.sampled
    assert record.file is not None and record.file.path == "captures/s001-t-3.npz"
    data = (world.run.root / record.file.path).read_bytes()
    assert (record.file.size, record.file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    (stored,) = from_bytes(data)[0].samples()
    assert (stored.tokens == rollout.samples[0].tokens).all() and stored.mask.sum() == rollout.sampled


async def test_every_malformed_turn_is_counted_the_one_that_nothing_follows_too(world: World) -> None:
    async def dropping(harness: Harness, request: TrialRequest) -> Scored:
        messages = [{"role": "user", "content": "repair it"}]
        for number in range(2):
            await harness.chat(messages)
            messages.append({"role": "user", "content": f"format error {number}"})
        return scored(0)

    world.runner.play = dropping
    world.engine.script = ["<tool_call>\nno json\n</tool_call><|im_end|>"] * 2
    rollout = await world.room.play(GROUP, 0)
    (capture,) = (event for event in world.events() if isinstance(event, CaptureBody))
    assert (rollout.turns, capture.branches, capture.malformed_turns) == (2, 2, 2)


async def test_rows_hold_exactly_what_was_sampled(world: World) -> None:
    rollout = await world.room.play(GROUP, 0)
    (sample,) = trained_samples(rollout)
    (output,) = agent_loop_outputs(rollout, [sample])
    fields, tag = fields_and_tag(output, "uid", 1)
    last = world.engine.calls[-1]
    assert fields["input_ids"].tolist() == last.prompt + last.sampled
    mask = fields["response_mask"].bool()
    assert fields["responses"][mask].tolist() == [token for call in world.engine.calls for token in call.sampled]
    logged = [value for call in world.engine.calls for value in call.log_probs]
    assert fields["rollout_log_probs"][mask].tolist() == pytest.approx(logged)
    assert fields["rm_scores"].sum() == 1
    assert fields["routed_experts"].shape[0] == tag["seq_len"] == len(fields["input_ids"])
    assert not fields["routed_experts"][-1].any()  # the last token was never an input: routed natively


async def test_the_turn_cap_is_a_termination_with_a_grade(world: World) -> None:
    async def three_turns(harness: Harness, request: TrialRequest) -> Scored:
        messages = [{"role": "user", "content": "repair it"}]
        while (reply := await harness.chat(messages)) is not None:
            messages += [reply, {"role": "user", "content": "go on"}]
        return scored(1)

    world.runner.play = three_turns
    rollout = await world.room.play(GROUP, 0)
    assert rollout.outcome == Scored(reward=1, termination=Termination.MAX_TURNS)


async def test_an_engine_error_is_no_reward_and_no_sample(world: World) -> None:
    world.engine.script = [say("hm"), EngineError("the logits are not finite")]
    rollout = await world.room.play(GROUP, 0)
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.cause is Cause.ENGINE
    assert rollout.samples == [] and rollout.reward is None
    assert (world.run.captures / "s001-t-0.npz").exists()


async def test_a_harness_that_never_calls_says_nothing_about_the_policy(world: World) -> None:
    async def silent(harness: Harness, request: TrialRequest) -> Scored:
        return scored(0)

    world.runner.play = silent
    rollout = await world.room.play(GROUP, 0)
    assert isinstance(rollout.outcome, Failed) and rollout.outcome.cause is Cause.HARNESS_NEVER_CALLED


async def test_a_trial_whose_grader_could_not_run_is_replaced_once(world: World) -> None:
    async def no_grader(harness: Harness, request: TrialRequest) -> Failed:
        await two_turns(harness, request)
        return Failed(stage=Stage.VERIFIER, cause=Cause.VERIFIER, detail="no space left on device")

    world.runner.play = no_grader
    rollout = await world.room.play(GROUP, 1)
    assert rollout.trial_id == "s001-t-1.2" and isinstance(rollout.outcome, Failed)
    assert [request.trial_id for request in world.runner.requests] == ["s001-t-1", "s001-t-1.2"]
    assert [event.trial_id for event in world.events() if isinstance(event, OutcomeBody)] == ["s001-t-1", "s001-t-1.2"]


async def test_a_capture_that_cannot_be_kept_costs_no_rollout(world: World) -> None:
    world.run.captures.rmdir()
    rollout = await world.room.play(GROUP, 0)
    assert rollout.reward == 1 and rollout.samples
    (outcome,) = (event.outcome for event in world.events() if isinstance(event, OutcomeBody))
    assert outcome.detail == "its capture was not kept: No such file or directory"
