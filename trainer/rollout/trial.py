"""One rollout: open it at the proxy, let the runner execute the trial, close it, decide the outcome, keep the capture."""

from __future__ import annotations

import asyncio
import functools
import secrets
from dataclasses import dataclass
from typing import Protocol

from server.schemas import suspicion
from server.schemas.capture import CaptureRecord
from server.schemas.events import OutcomeBody, TrialBody
from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.rundir import RunDir
from server.schemas.runspec import RunSpec, TrainRule
from server.schemas.spool import Reporter
from server.schemas.states import Phase, TrialState
from server.schemas.tasks import HELD_OUT, TRAIN
from server.schemas.trials import ProxyEndpoint, TrialRequest, TrialView
from trainer.capture.sample import Sample
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits

from .admission import CaptureFacts, admit, plays_again
from .groups import Group, trial_seed
from .keep import keep
from .limits import rollout_limits
from .runner_client import RunnerClient


class Capture(CaptureFacts, Protocol):
    @property
    def malformed_turns(self) -> int: ...
    def samples(self, rule: TrainRule) -> list[Sample]: ...
    def record(self, trial_id: str, rule: TrainRule) -> CaptureRecord: ...
    def to_bytes(self, trial_id: str, rule: TrainRule) -> bytes: ...


class Proxy(Protocol):
    """The part of `trainer.proxy.Proxy` that a trial needs; it may be an actor's handle."""

    async def open(self, rollout_id: str, key: str, sampling: Sampling, limits: Limits, harness: str) -> str: ...
    async def close(self, rollout_id: str) -> Capture: ...


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a trial came to. `samples` is empty for a failed trial; `sampled` counts the engine's tokens, whatever became of them."""

    trial_id: str
    sample: int
    outcome: Scored | Failed
    samples: list[Sample]
    sampled: int
    turns: int

    @property
    def reward(self) -> int | None:
        return self.outcome.reward if isinstance(self.outcome, Scored) else None


@dataclass(frozen=True, slots=True)
class TrialRoom:
    """What all trials of a run share."""

    run: RunDir
    spec: RunSpec
    proxy: Proxy
    runner: RunnerClient
    reporter: Reporter
    stop_token_ids: tuple[int, ...]

    async def play(self, group: Group, sample: int) -> Rollout:
        """The rollout of one place in a group; a trial whose grader could not run is replaced as the admission table says."""
        attempt = 1
        while plays_again((rollout := await self._trial(group, sample, attempt)).outcome, attempt):
            attempt += 1
        return rollout

    async def _trial(self, group: Group, sample: int, attempt: int) -> Rollout:
        """One trial from its first event to its last."""
        trial_id = group.trial_id(sample, attempt)
        self.reporter.report(
            TrialBody(trial_id=trial_id, state=TrialState.QUEUED, stage=Stage.QUEUED, group_id=group.group_id, sample=sample)
        )
        try:
            return await self._rollout(group, sample, trial_id)
        except asyncio.CancelledError as given_up:
            why = str(given_up) or "the trainer gave it up"
            self.reporter.report(OutcomeBody(trial_id=trial_id, outcome=Failed(stage=Stage.AGENT, cause=Cause.CANCELLED, detail=why)))
            raise

    async def _rollout(self, group: Group, sample: int, trial_id: str) -> Rollout:
        key = secrets.token_urlsafe(32)
        url = await self.proxy.open(trial_id, key, self._sampling(group.phase), rollout_limits(self.spec), group.harness)
        try:
            view = await self.runner.run(self._request(group, trial_id, url, key))
        finally:
            capture = await self.proxy.close(trial_id)
        outcome = admit(view if isinstance(view, Failed) else _runner_outcome(view), capture)
        record = capture.record(trial_id, self.spec.capture.train)
        record.log = None if isinstance(view, Failed) else view.log
        samples = capture.samples(self.spec.capture.train)
        file = functools.partial(capture.to_bytes, trial_id, self.spec.capture.train) if self.spec.reporting.keep_captures else None
        outcome = await asyncio.to_thread(_with_signs, outcome, record)
        body, problem = await asyncio.to_thread(keep, self.run, record, file, capture.malformed_turns)
        if problem:
            outcome = outcome.model_copy(update={"detail": "; ".join(filter(None, (outcome.detail, problem)))})
        self.reporter.report(OutcomeBody(trial_id=trial_id, outcome=outcome))
        self.reporter.report(body)
        trained = samples if isinstance(outcome, Scored) else []
        return Rollout(trial_id, sample, outcome, trained, record.sampled_tokens, capture.policy_turns)

    def _sampling(self, phase: Phase) -> Sampling:
        rollout, evaluation = self.spec.rollout, self.spec.trainer.evaluation
        temperature = (evaluation.temperature if phase is Phase.EVAL else None) or rollout.temperature
        return Sampling(temperature=temperature, max_tokens=rollout.max_new_tokens, stop_token_ids=self.stop_token_ids)

    def _request(self, group: Group, trial_id: str, url: str, key: str) -> TrialRequest:
        return TrialRequest(
            trial_id=trial_id,
            task=group.task,
            split=TRAIN if group.phase is Phase.TRAIN else HELD_OUT,
            harness=group.harness,
            proxy=ProxyEndpoint.model_validate({"url": url, "key": key}),
            budgets=self.spec.sandbox.budgets,
            seed=trial_seed(self.spec.trainer.seed, trial_id),
        )


def _with_signs(outcome: Scored | Failed, record: CaptureRecord) -> Scored | Failed:
    """What the policy's commands look like goes with the outcome, for a person to see; it changes nothing."""
    found = suspicion.of_calls(call.arguments for turn in record.turns for call in turn.tool_calls)
    return outcome.model_copy(update={"evidence": [*outcome.evidence, *found]}) if found else outcome


def _runner_outcome(view: TrialView) -> Scored | Failed:
    if view.outcome is None:
        return Failed(stage=view.stage, cause=Cause.RUNNER_LOST, detail="the runner ended the trial without an outcome")
    return view.outcome
