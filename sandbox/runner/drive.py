"""One attempt at a trial, driven with Harbor's `Trial`: configuration in, facts out."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tomllib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig, VerifierConfig
from harbor.models.trial.error_policy import ErrorPolicyOverride
from harbor.models.trial.result import TrialResult
from harbor.trial.hooks import TrialEvent, TrialHookEvent
from harbor.trial.trial import Trial

from sandbox.environments.errors import ImageError, SandboxLost
from sandbox.environments.harbor_env import WORKDIR
from sandbox.harnesses.base import HarnessAgent, HarnessNotStarted, Launcher, Rollout
from sandbox.integrity.environment import AgentBrokeTree, TrialEnvironment
from sandbox.integrity.grade import CHECK_SECONDS, RUNS, VERDICT_FILE
from sandbox.integrity.verdict import Verdict
from sandbox.tasks.images import image_of
from sandbox.tasks.lean import full_task, lean_twin
from server.schemas.outcome import Stage
from server.schemas.runspec import RunSpec
from server.schemas.trials import TrialRequest

from .outcomes import Facts

_ENVIRONMENT = "sandbox.integrity.environment:TrialEnvironment"
_GRADER = "sandbox.integrity.grade:Grader"
_TIMEOUTS = {"AgentTimeoutError", "AgentSetupTimeoutError", "EnvironmentStartTimeoutError", "VerifierTimeoutError"}
# Harbor grades after errors that it does not know. We decide by facts, so after any error of ours there is nothing to grade.
# (What the agent did to its own sandbox is graded after all: see `Attempt._seal`.)
_UNGRADED = ("HarnessError", "HarnessNotStarted", "AgentBrokeTree", "SandboxError", "SandboxLost", "ImageError")
_ENDED_BY_AGENT = ("AgentTimeoutError", "HarnessError")
"""How a trial ends in which the agent took its harness, or all the time, with it."""
_ENDED_AGENT = (*_ENDED_BY_AGENT, "HarnessNotStarted")


class Observer(Protocol):
    def enter(self, stage: Stage) -> None: ...


@dataclass(frozen=True, slots=True)
class Room:
    """What all trials of a runner share."""

    spec: RunSpec
    tasks: Path
    index: dict[str, list[str]]
    """Split → names of its tasks."""
    trials: Path
    sandboxes: Path
    launchers: dict[str, Launcher]
    agents: dict[str, type[HarnessAgent]]


def trial_config(room: Room, request: TrialRequest, name: str, twin: Path) -> TrialConfig:
    """`twin` is the lean twin of the request's task."""
    launcher, agent = room.launchers[request.harness], room.agents[request.harness]
    budgets, settings = request.budgets, room.spec.sandbox
    address = urlsplit(request.proxy.url)
    kwargs = {
        "base_dir": str(room.sandboxes),
        "settings": settings.model_copy(update={"image": image_of(full_task(twin), settings)}).model_dump(mode="json"),
        "gate": f"{address.hostname}:{address.port}",
    }
    mounts = [{"type": "bind", "source": str(launcher.tree), "target": str(launcher.tree), "read_only": True}] if launcher.tree else []
    grade_timeouts = room.spec.capture.timeout == "grade"
    asked = tomllib.loads((twin / "task.toml").read_text(encoding="utf-8")).get("environment", {})
    return TrialConfig(
        task=TaskConfig(path=twin),
        trial_name=name,
        trials_dir=room.trials,
        agent=AgentConfig(
            import_path=f"{agent.__module__}:{agent.__name__}",
            override_timeout_sec=budgets.agent_s,
            override_setup_timeout_sec=budgets.agent_setup_s,
        ),
        environment=EnvironmentConfig(import_path=_ENVIRONMENT, kwargs=kwargs, mounts=mounts),
        environment_build_timeout_multiplier=budgets.sandbox_setup_s / asked.get("build_timeout_sec", 600),  # all that Harbor offers
        verifier=VerifierConfig(
            import_path=_GRADER,
            override_timeout_sec=budgets.verifier_s,
            kwargs={"seconds": max(1, min(CHECK_SECONDS, int(budgets.verifier_s / RUNS) - 1))},
        ),
        artifacts=[asked.get("workdir", WORKDIR)],
        override_error_policy={
            name: ErrorPolicyOverride(should_grade=grade_timeouts and name == "AgentTimeoutError")
            for name in (*_UNGRADED, "AgentTimeoutError")
        },
    )


@dataclass(slots=True)
class Attempt:
    """One run of Harbor's `Trial`. `run` never raises but for cancellation."""

    room: Room
    request: TrialRequest
    name: str
    observer: Observer
    stage: Stage = Stage.QUEUED
    started: bool = False
    exit_code: int | None = None
    cpu_s: float = 0
    """What the agent's sandbox used."""
    archived: Path | None = None
    """The diff that it was graded from."""
    tree_broken: str = ""
    """Why the agent's tree could not be collected, by its own doing."""

    @property
    def task(self) -> Path:
        return self.room.tasks / self.request.split / self.request.task

    async def run(self) -> Facts:
        self._enter(Stage.SANDBOX_SETUP)
        try:
            # What an earlier runner left under this name says nothing about this attempt.
            await asyncio.to_thread(shutil.rmtree, self.room.trials / self.name, ignore_errors=True)
            twin = await asyncio.to_thread(lean_twin, self.task)
            trial = await Trial.create(trial_config(self.room, self.request, self.name, twin))
            agent, environment = trial.agent, trial.agent_environment
            assert isinstance(agent, HarnessAgent)  # noqa: S101 -- by the import paths above
            assert isinstance(environment, TrialEnvironment)  # noqa: S101
            agent.bind(self._rollout())
            trial.add_hook(TrialEvent.AGENT_START, self._hook(lambda: self._enter(Stage.AGENT)))
            trial.add_hook(TrialEvent.VERIFICATION_START, self._hook(lambda: self._enter(Stage.VERIFIER)))

            trial.add_hook(TrialEvent.AGENT_END, self._hook(lambda: self._enter(Stage.COLLECT), lambda: self._seal(trial, environment)))
            result = await trial.run()
        except Exception as error:  # noqa: BLE001 -- Harbor raises anything; whatever it is, this trial failed and the others go on
            stage = Stage.IMAGE if isinstance(error, ImageError) and self.stage is Stage.SANDBOX_SETUP else self.stage
            return Facts(stage=stage, error=f"{type(error).__name__}: {error}", harness_started=self.started)
        finally:
            _forget_loggers(self.name)
        self.exit_code = agent.exit_code
        self.archived = environment.archived
        if environment.usage is not None:
            self.cpu_s = environment.usage.cpu_s
        return self._facts(result, environment.fault or _killed(self.exit_code))

    def _rollout(self) -> Rollout:
        return Rollout(
            launcher=self.room.launchers[self.request.harness],
            task=self.task,
            proxy=self.request.proxy,
            on_setup=lambda: self._enter(Stage.AGENT_SETUP),
            on_start=self._start,
            context=self.room.spec.model.context,
            max_output_tokens=self.room.spec.rollout.max_new_tokens,
        )

    async def _seal(self, trial: Trial, environment: TrialEnvironment) -> None:
        """An agent that broke its own sandbox is graded on what can be collected, also where its harness or its time ended so."""
        try:
            await environment.seal()
        except AgentBrokeTree as error:
            self.tree_broken = f"{AgentBrokeTree.__name__}: {error}"
            raise
        if environment.fault and self.started:
            graded = ErrorPolicyOverride(should_grade=True)
            policy = trial.config.override_error_policy or {}
            trial.config.override_error_policy = policy | dict.fromkeys(_ENDED_BY_AGENT, graded)

    def _facts(self, result: TrialResult, fault: str) -> Facts:
        error = result.exception_info
        kind = error.exception_type if error else ""
        words = f"{kind}: {error.exception_message}" if error else ""
        broken = bool(fault) and self.started and kind in _ENDED_BY_AGENT  # by the agent itself
        timed_out = kind in _TIMEOUTS and not broken
        stage = Stage.AGENT if kind in _ENDED_AGENT and not broken else self.stage if error else Stage.DONE
        if kind == ImageError.__name__ and stage is Stage.SANDBOX_SETUP:
            stage = Stage.IMAGE
        graded = stage in (Stage.DONE, Stage.VERIFIER) or (kind == "AgentTimeoutError" and self.room.spec.capture.timeout == "grade")
        return Facts(
            stage=stage,
            error=words,
            timed_out=timed_out,
            harness_started=self.started and kind != HarnessNotStarted.__name__,
            lost=kind == SandboxLost.__name__,
            fault=fault,
            tree_broken=self.tree_broken if graded or kind == AgentBrokeTree.__name__ else "",  # else its time ran out first
            verdict=self._verdict() if graded else None,
            evidence=self._log_tail() if error else [],
        )

    def _log_tail(self) -> list[str]:
        """The end of Harbor's log of this trial."""
        path = self.room.trials / self.name / "trial.log"
        return path.read_text(errors="replace").splitlines()[-5:] if path.exists() else []

    def _verdict(self) -> Verdict | None:
        path = self.room.trials / self.name / "verifier" / VERDICT_FILE
        return Verdict.model_validate_json(path.read_bytes()) if path.exists() else None

    def _enter(self, stage: Stage) -> None:
        self.stage = stage
        self.observer.enter(stage)

    def _start(self) -> None:
        self.started = True

    def _hook(
        self, note: Callable[[], None], then: Callable[[], Awaitable[None]] | None = None
    ) -> Callable[[TrialHookEvent], Awaitable[None]]:
        async def hook(event: TrialHookEvent) -> None:
            note()
            if then is not None:
                await then()

        return hook


def _killed(exit_code: int | None) -> str:
    """By its own doing or from outside: nothing but a signal ends a process with such a code."""
    return f"the harness was killed by signal {-exit_code}" if exit_code is not None and exit_code < 0 else ""


def _forget_loggers(trial_name: str) -> None:
    """Harbor makes eight loggers per trial, and the logging module keeps every logger for ever."""
    known = logging.root.manager.loggerDict
    for name in [name for name in known if f".{trial_name}" in name]:
        del known[name]
