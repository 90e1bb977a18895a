"""What verl drives (`agent_loop_manager_class`): runs the trials of steps and evaluations, and hands their rows to the TransferQueue.

Proxy, runner client and trials live on one event loop in a thread of the process that holds the trainer: on one machine that costs
no process and no hop. Everything they share sits behind `TrialRoom`, so the proxy can become an actor's handle.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import transfer_queue as tq
import uvloop
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from server.schemas.events import EvaluationBody, FindingBody, GroupBody, ResumedBody, RunStateBody, StepBody
from server.schemas.rundir import CheckpointFile, RunDir
from server.schemas.runspec import RunSpec
from server.schemas.spool import Reporter, read_spool
from server.schemas.states import Phase, RunState
from server.schemas.tasks import HELD_OUT, TRAIN
from trainer.launch import FinalError

from .groups import Group, Plan, evaluation_sizes, make_groups
from .limits import gate_rule
from .rows import agent_loop_outputs, fields_and_tag, row_key, trained_samples
from .runner_client import RunnerClient
from .tasks import read_index
from .trial import Rollout, TrialRoom
from .verl_engine import VerlEngine

if TYPE_CHECKING:
    from trainer.proxy.service import Proxy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    group: Group
    rollouts: list[Rollout]
    """In the order of their samples; every member is here, failed ones too."""


class RolloutManager:
    """One per run. Its public methods are called from verl's thread, everything else happens on the loop."""

    def __init__(self, run: RunDir, llm_client: Any, model: Path, attempt: int) -> None:
        file = run.load()
        self.spec = file.spec
        self._plan = _plan(run, self.spec, attempt)
        self._run, self._attempt = run, attempt
        self.reporter = Reporter(file.server_url, file.run_id, file.event_token, "trainer", run.spool)
        self._loop = uvloop.new_event_loop()  # a fifth less CPU for each call of the proxy
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
        self._thread.start()
        self._step: Future[list[PlayedGroup]] | None = None
        self._held_out = [entry.task for entry in read_index(run.tasks / HELD_OUT / "index.jsonl")]
        run.captures.mkdir(exist_ok=True)
        self._room, self._proxy = self._call(self._open(run, file.runner_token, VerlEngine(llm_client, self.spec.rollout.routing), model))
        # A sandbox that becomes free must find a trial waiting; more open rollouts than that would only hold memory.
        self._places = asyncio.Semaphore(self.spec.sandbox.concurrency + 4)

    @classmethod
    def create(cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None) -> Self:
        """verl's contract. The rewards come with the rollouts and there is no teacher."""
        return cls(RunDir(Path(config.lego.run_dir)), llm_client, Path(config.actor_rollout_ref.model.path), int(config.lego.attempt))

    def begin(self, step: int) -> bool:
        """Say that the run is under way after `step` updates. False when the evaluation that is due after them has not been reported.

        A trainer that dies right behind a checkpoint takes the step's event with it; the checkpoint has its metrics.
        """
        gc.collect()
        gc.freeze()  # what was loaded by now stays: the collector need not stop the proxy to look at it again
        if self._attempt == 1:
            self.reporter.report(RunStateBody(state=RunState.RUNNING))
            return True
        before = [event.body for event in read_spool(self._run.spool / "trainer.jsonl")]
        title = f"The trainer died and goes on from the checkpoint after step {step} (start {self._attempt})"
        self.reporter.report(ResumedBody(step=step, attempt=self._attempt))
        self.reporter.report(FindingBody(detector="trainer_restarted", title=title, step=step))
        self.reporter.report(RunStateBody(state=RunState.RUNNING))
        if not any(isinstance(body, StepBody) and body.step == step for body in before):
            latest = CheckpointFile.model_validate_json(self._run.latest_checkpoint.read_bytes())
            self.reporter.report(StepBody(step=step, metrics=latest.metrics))
        every, steps = self.spec.trainer.evaluation.every, self.spec.trainer.steps
        due = step == steps or (every > 0 and step % every == 0)
        return not due or any(isinstance(body, EvaluationBody) and body.step == step for body in before)

    def generate_sequences(self, prompts: Any) -> None:
        """Start the groups of a step; does not wait."""
        step = int(prompts["global_steps"])
        self._loop.call_soon_threadsafe(self._proxy.set_version, step - 1)
        size = self.spec.rollout.group_size
        prompt = zip(prompts["uid"], prompts["task"], strict=True)
        groups = [make_groups(self._plan, Phase.TRAIN, step, task, size, uid) for uid, task in prompt]
        self._step = asyncio.run_coroutine_threadsafe(self._play_step(groups), self._loop)

    def finish_step(self) -> list[PlayedGroup]:
        """Wait for the step begun last. Its rows are in the TransferQueue, every prompt is marked finished."""
        assert self._step is not None, "generate_sequences comes first"  # noqa: S101
        played, self._step = self._step.result(), None
        return played

    def proxy_metrics(self) -> dict[str, float]:
        """What happened between proxy and engine since the last call."""

        async def take() -> dict[str, float]:
            return self._proxy.take_metrics()

        return self._call(take())

    def evaluate(self, step: int) -> list[PlayedGroup]:
        """Held-out rollouts with the weights after `step` updates."""
        self._loop.call_soon_threadsafe(self._proxy.set_version, step)
        sizes = evaluation_sizes(self._held_out, self.spec.trainer.evaluation.rollouts)
        groups = [group for task, size in sizes for group in make_groups(self._plan, Phase.EVAL, step, task, size)]
        return self._call(self._play_all(groups))

    def close(self) -> None:
        """Stop the proxy, deliver what is still in the spool, end the loop."""
        self._call(self._proxy.stop())
        self._call(self._room.runner.close())
        self.reporter.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self, run: RunDir, token: str, engine: VerlEngine, model: Path) -> tuple[TrialRoom, Proxy]:
        # Late: verl imports this module in processes that never render.
        from trainer.proxy.rendering import Rendering
        from trainer.proxy.service import Proxy

        rendering = Rendering.load(model, thinking=self.spec.model.thinking, history=self.spec.capture.history)
        proxy = Proxy(engine, rendering, admission=gate_rule(self.spec.rollout.admission))
        await proxy.start("127.0.0.1", 0)
        runner = RunnerClient(run.runner_file, token)
        return TrialRoom(run, self.spec, proxy, runner, self.reporter, rendering.stop_token_ids), proxy

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _play_step(self, prompts: Sequence[Sequence[Group]]) -> list[PlayedGroup]:
        """`prompts` holds the groups of each of verl's prompts."""

        async def play_and_store(groups: Sequence[Group]) -> list[PlayedGroup]:
            played = await self._play_all(groups)
            await asyncio.to_thread(_store, played)
            return played

        return [group for played in await _all(play_and_store(groups) for groups in prompts) for group in played]

    async def _play_all(self, groups: Sequence[Group]) -> list[PlayedGroup]:
        return await _all(self._play(group) for group in groups)

    async def _play(self, group: Group) -> PlayedGroup:
        async def one(sample: int) -> Rollout:
            async with self._places:
                return await self._room.play(group, sample)

        self.reporter.report(
            GroupBody(group_id=group.group_id, step=group.step, phase=group.phase, task=group.task, harness=group.harness, size=group.size)
        )
        return PlayedGroup(group, await _all(one(sample) for sample in group.samples))


async def _all(coroutines: Any) -> list[Any]:
    """Results in order; the first error cancels the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in started]


def _plan(run: RunDir, spec: RunSpec, attempt: int) -> Plan:
    """Raises FinalError when the index names a harness that the run does not have."""
    names = {harness.name for harness in spec.harnesses}
    entries = [entry for split in (TRAIN, HELD_OUT) for entry in read_index(run.tasks / split / "index.jsonl")]
    fixed = {entry.task: entry.harness for entry in entries if entry.harness}
    for task, harness in fixed.items():
        if harness not in names:
            raise FinalError(
                f"task {task} is to be played in {harness}, which is not among the run's harnesses ({', '.join(sorted(names))})"
            )
    return Plan(spec.harnesses, spec.trainer.seed, attempt, spec.rollout.harness_by, spec.trainer.evaluation.harness, fixed)


def _store(prompt: Sequence[PlayedGroup]) -> None:
    """Write the rows of a prompt's groups and its status. A failed trial leaves no row: statistics and loss never see it."""
    uid, step = prompt[0].group.uid, prompt[0].group.step
    keys, fields, tags = [], [], []
    for rollout in (rollout for played in prompt for rollout in played.rollouts):
        for branch, output in enumerate(agent_loop_outputs(rollout, trained_samples(rollout))):
            row, tag = fields_and_tag(output, uid, step)
            keys.append(row_key(uid, rollout.sample, branch))
            fields.append(row)
            tags.append(tag)
    if keys:
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
    tq.kv_put(key=uid, partition_id="train", tag={"is_prompt": True, "status": "finished", "global_steps": step})
