"""What verl drives (`agent_loop_manager_class`): runs the trials of steps and evaluations, and hands their rows to the TransferQueue.

Proxy, runner client and trials live on one event loop in a thread of the process that holds the trainer: on one machine that costs
no process and no hop. Everything they share sits behind `TrialRoom`, so the proxy can become an actor's handle. verl's thread waits for
steps and evaluations outside of that loop, so rollouts go on while it trains or evaluates.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import threading
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import uvloop

from server.schemas.events import EvaluationBody, EventBody, FindingBody, GroupBody, ResumedBody, RunStateBody, StepBody
from server.schemas.rundir import CheckpointFile, ProxyFile, RunDir, write_atomic
from server.schemas.runspec import Kind, RunSpec
from server.schemas.spool import Reporter, read_spool
from server.schemas.states import Phase, RunState
from server.schemas.tasks import HELD_OUT, TRAIN
from trainer.checkpoints.changed import changes, learning_side
from trainer.launch import PERHAPS, FinalError

from .breaker import Breaker
from .groups import Group, Plan, evaluation_sizes, make_groups
from .limits import gate_rule
from .pool import TaskPool
from .rows import Rows, discard, prompt_rows, store
from .runner_client import RunnerClient
from .schedule import PARTS, Prompt, Schedule
from .slots import Slots
from .tasks import read_index
from .trial import Rollout, TrialRoom
from .verl_engine import VerlEngine

if TYPE_CHECKING:
    from trainer.proxy.exporter import Exporter
    from trainer.proxy.service import Proxy

T = TypeVar("T")
Member = tuple[Group, int]
"""One trial: its group and its number in the group."""


@dataclass(frozen=True, slots=True)
class PlayedGroup:
    group: Group
    rollouts: list[Rollout]
    """In the order of their samples; every member is here, failed ones too."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a step trains, or a part of it: with the names of its rows in the TransferQueue, and the groups that became too old for any
    step, as far as played. `complete`: with it the step has all that it trains."""

    played: list[PlayedGroup]
    rows: Rows
    stale: list[PlayedGroup]
    complete: bool = True


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
        train = [entry.task for entry in read_index(run.tasks / TRAIN / "index.jsonl")]
        self._pool = _pool(self.spec, train)
        self._pool_metrics: dict[str, float] = {}
        self._played: list[PlayedGroup] = []
        """What was taken of the step under way."""
        self._held_out = [entry.task for entry in read_index(run.tasks / HELD_OUT / "index.jsonl")]
        self._first, self._fed = 1, 0
        """The step of the first prompt that this start of the trainer feeds, and how many it has fed."""
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        """glibc's own."""
        self._names: tuple[int, Counter[str]] = (0, Counter())
        """How often each task was fed for the step."""
        self._rows: dict[str, Rows] = {}
        run.captures.mkdir(exist_ok=True)
        self._engine = VerlEngine(llm_client, self.spec.rollout.routing)
        self._room, self._proxy, self._exporter = self._call(self._open(run, file.runner_token, self._engine, model))
        self._slots, self._schedule = self._call(self._begin_schedule())

    @classmethod
    def create(cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None) -> Self:
        """verl's contract. The rewards come with the rollouts and there is no teacher."""
        return cls(RunDir(Path(config.lego.run_dir)), llm_client, Path(config.actor_rollout_ref.model.path), int(config.lego.attempt))

    def begin(self, step: int) -> bool:
        """Say that the run is under way after `step` updates. False when the evaluation that is due after them has not been reported.

        A trainer that dies right behind a checkpoint takes the step's event with it; the checkpoint has its metrics.
        """
        self._first = step + 1
        self.announce(step)
        self.advance(step)
        gc.collect()
        gc.freeze()  # what was loaded by now stays: the collector need not stop the proxy to look at it again
        if self._attempt == 1:
            if self.spec.kind is Kind.TRAIN and self.spec.trainer.checkpoint.every:  # one that dies in the first step begins again
                self._run.checkpoints.mkdir(exist_ok=True)
                write_atomic(self._run.latest_checkpoint, self.checkpoint(0, {}).model_dump_json())
            self.reporter.report(RunStateBody(state=RunState.RUNNING))
            return True
        before = [event.body for event in read_spool(self._run.spool / "trainer.jsonl")]
        title = f"The trainer died and goes on from the checkpoint after step {step} (start {self._attempt}): {_last_words(before)}"
        self.reporter.report(ResumedBody(step=step, attempt=self._attempt))
        self.reporter.report(FindingBody(detector="trainer_restarted", title=title, step=step))
        self.reporter.report(RunStateBody(state=RunState.RUNNING))
        latest = CheckpointFile.model_validate_json(self._run.latest_checkpoint.read_bytes())
        if changed := changes(latest.spec, self.spec):
            title = f"The run goes on with other settings than before the checkpoint: {', '.join(changed)}"
            self.reporter.report(FindingBody(detector="settings_changed", title=title, step=step))
        if self._pool is not None:
            self._pool.remember(latest.pool, latest.draws)
        if step and not any(isinstance(body, StepBody) and body.step == step for body in before):
            self.reporter.report(StepBody(step=step, metrics=latest.metrics))
        every, steps = self.spec.trainer.evaluation.every, self.spec.trainer.steps
        due = step in (0, steps) or (every > 0 and step % every == 0)
        return not due or any(isinstance(body, EvaluationBody) and body.step == step for body in before)

    def generate_sequences(self, prompts: Any) -> None:
        """verl's contract: start these prompts, or as many that the pool draws; does not wait."""
        tasks = list(prompts["task"])
        self.feed(self._pool.choose(len(tasks), self._next_step, self.unfinished) if self._pool is not None else tasks)

    def wanted(self, batches: int) -> int:
        """How many prompts to feed now, when as many batches are still to be taken in the run."""
        return self._schedule.wanted(batches)

    def feed(self, tasks: Sequence[str]) -> None:
        """Start one prompt for each task. Groups carry the step that the order of the data puts them into."""

        async def start() -> None:
            prompts = [self._members(task) for task in tasks]
            self._schedule.feed(prompts)

        self._call(start())

    def take(self) -> Batch:
        """Wait for a batch, or its next part. Its rows are in the TransferQueue."""
        taken = self._call(self._schedule.take())
        late = self._schedule.take_late()
        discard([key for prompt in late if prompt.name in self._rows for key in self._rows.pop(prompt.name).keys])
        rows = [self._rows.pop(prompt.name) for prompt in taken]
        names = Rows([key for part in rows for key in part.keys], [tag for part in rows for tag in part.tags])
        played, stale = ([group for prompt in prompts for group in played_groups(prompt)] for prompts in (taken, late))
        self._played += played
        complete = not self._schedule.missing
        if complete:
            if self._pool is not None:
                self._pool_metrics = self._pool.metrics(self._next_step, self._pool.note(_solved(self._played)))
            self._played = []
        return Batch(played, names, stale, complete)

    def announce(self, version: int) -> None:
        """The engine is about to have the weights of `version`."""
        self._loop.call_soon_threadsafe(self._proxy.set_version, version)

    def advance(self, version: int) -> None:
        """The engine has them."""

        async def note() -> None:
            self._schedule.version = version

        self._call(note())
        if self._trim is not None:  # what a step needed is not kept for the next: with a heap per thread it would add up
            self._trim(0)

    def checkpoint(self, step: int, metrics: dict[str, float]) -> CheckpointFile:
        """What a later start goes on with, beside weights and optimizer."""
        pool, draws = (self._pool.memory, self._pool.draws) if self._pool is not None else ({}, 0)
        spec = learning_side(self.spec)
        return CheckpointFile(step=step, metrics=metrics, unfinished=self.unfinished, pool=pool, draws=draws, spec=spec)

    @property
    def unfinished(self) -> list[str]:
        """Tasks that were fed and are neither trained nor dropped, in order."""
        return [prompt.members[0][0].task for prompt in self._schedule.outstanding]

    def metrics(self) -> dict[str, float]:
        """What happened between proxy and engine since the last call, and how busy the places for trials were."""

        async def take() -> dict[str, float]:
            return self._proxy.take_metrics() | {"lego/schedule/busy_share": self._slots.busy_share()} | self._pool_metrics

        return self._call(take())

    def evaluate(self, step: int) -> list[PlayedGroup]:
        """Held-out rollouts with the weights after `step` updates. They go in front of training's, which go on beside them."""
        sizes = evaluation_sizes(self._held_out, self.spec.trainer.evaluation.rollouts)
        groups = [group for task, size in sizes for group in make_groups(self._plan, Phase.EVAL, step, task, size)]
        for group in groups:
            self._say(group)
        rollouts = iter(self._call(self._schedule.evaluate([(group, sample) for group in groups for sample in group.samples])))
        return [PlayedGroup(group, [next(rollouts) for _ in group.samples]) for group in groups]

    def close(self) -> None:
        """End what is under way, stop the proxy, deliver what is still in the spool, end the loop."""
        self._call(self._schedule.close())
        self._call(self._exporter.stop())
        self._call(self._proxy.stop())
        self._call(self._room.runner.close())
        self.reporter.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _open(self, run: RunDir, token: str, engine: VerlEngine, model: Path) -> tuple[TrialRoom, Proxy, Exporter]:
        # Late: verl imports this module in processes that never render.
        from trainer.proxy.exporter import Exporter
        from trainer.proxy.rendering import Rendering
        from trainer.proxy.service import Proxy

        rendering = Rendering.load(
            model, family=self.spec.model.renderer, thinking=self.spec.model.thinking, history=self.spec.capture.history
        )
        proxy = Proxy(engine, rendering, admission=gate_rule(self.spec.rollout.admission))
        await proxy.start("127.0.0.1", 0)
        exporter = Exporter(proxy.families, token)
        write_atomic(run.proxy_file, ProxyFile(metrics=await exporter.start()).model_dump_json())
        runner = RunnerClient(run.runner_file, token)
        return TrialRoom(run, self.spec, proxy, runner, self.reporter, rendering.stop_token_ids), proxy, exporter

    async def _begin_schedule(self) -> tuple[Slots, Schedule[Member, Rollout]]:
        # A sandbox that becomes free must find a trial waiting; more open rollouts than that would only hold memory.
        slots = Slots(self.spec.sandbox.concurrency + 4)
        trainer = self.spec.trainer
        staleness = trainer.staleness if trainer.schedule == "async" else 0

        step_size = self.spec.rollout.tasks_per_step * self.spec.rollout.group_size
        breaker = Breaker(self.spec.monitors.failed_share, step_size, trainer.evaluation.rollouts)

        async def play(member: Member) -> Rollout:
            breaker.check()
            rollout = await self._room.play(*member)
            if self._engine.gone is not None:  # not a step of failed trials, which would end the run for good
                raise self._engine.gone
            breaker.note(member[0], rollout.trial_id, rollout.outcome)
            return rollout

        batch, parts = self.spec.rollout.tasks_per_step, parts_of_a_step(self.spec)
        schedule = Schedule(play, slots, batch=batch, staleness=staleness, parts=parts, finish=self._store)
        return slots, schedule

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _store(self, prompt: Prompt[Member, Rollout]) -> None:
        """Before a prompt can be taken, its rows are in the TransferQueue."""
        rows, columns = prompt_rows(prompt.name, prompt.members[0][0].step, [prompt.results[n] for n in range(len(prompt.members))])
        self._rows[prompt.name] = rows
        if columns:
            await asyncio.to_thread(store, rows, columns)

    @property
    def _next_step(self) -> int:
        """That the next prompt falls into by the order of the data."""
        return self._first + self._fed // self.spec.rollout.tasks_per_step

    def _members(self, task: str) -> tuple[str, list[Member]]:
        """The trials of one more prompt. A task that comes again within a step gets another name for its groups."""
        step = self._next_step
        self._fed += 1
        if self._names[0] != step:
            self._names = step, Counter()
        self._names[1][task] += 1
        uid = uuid.uuid4().hex
        groups = make_groups(self._plan, Phase.TRAIN, step, task, self.spec.rollout.group_size, uid, self._names[1][task])
        for group in groups:
            self._say(group)
        return uid, [(group, sample) for group in groups for sample in group.samples]

    def _say(self, group: Group) -> None:
        self.reporter.report(
            GroupBody(group_id=group.group_id, step=group.step, phase=group.phase, task=group.task, harness=group.harness, size=group.size)
        )


def parts_of_a_step(spec: RunSpec) -> int:
    """In how many parts a step may train its batch: where generation goes on meanwhile, and the gradients of the parts add up to that of
    the whole. They do not where the loss of a row follows from all rows of the step, and not in Megatron's reduced buffers."""
    trainer, algorithm = spec.trainer, spec.algorithm
    one_update = algorithm.epochs == algorithm.minibatches == 1
    by_row = algorithm.loss != "ppo" and algorithm.importance_sampling == "off" and spec.rollout.harness_by == "group"
    return PARTS if trainer.schedule == "async" and one_update and by_row and trainer.backend != "megatron" else 1


def played_groups(prompt: Prompt[Member, Rollout]) -> list[PlayedGroup]:
    """The groups of a prompt with the rollouts that ended."""
    played: dict[str, PlayedGroup] = {}
    for number, (group, _) in enumerate(prompt.members):
        entry = played.setdefault(group.group_id, PlayedGroup(group, []))
        if number in prompt.results:
            entry.rollouts.append(prompt.results[number])
    return list(played.values())


def _last_words(before: Sequence[EventBody]) -> str:
    """What the start before said of its end."""
    last = before[-1] if before else None
    return last.reason if isinstance(last, RunStateBody) and last.state is RunState.FAILED else f"it was killed. {PERHAPS}"


def _pool(spec: RunSpec, tasks: Sequence[str]) -> TaskPool | None:
    if spec.data.sampling == "static":
        return None
    return TaskPool(tasks, spec.data.relative, spec.rollout.group_size, spec.trainer.seed)


def _solved(played: Iterable[PlayedGroup]) -> Iterator[tuple[str, int, int]]:
    """Task, solved and scored rollouts of each group."""
    for group in played:
        rewards = [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        yield group.group.task, sum(rewards), len(rewards)


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
