"""States of a run and of a trial, with their legal transitions as data."""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    STALLED = "stalled"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


RUN_TRANSITIONS: dict[RunState, frozenset[RunState]] = {
    RunState.CREATED: frozenset({RunState.STARTING, RunState.FAILED, RunState.STOPPED}),
    RunState.STARTING: frozenset({RunState.RUNNING, RunState.STALLED, RunState.STOPPING, RunState.FAILED, RunState.STOPPED}),
    RunState.RUNNING: frozenset({RunState.STALLED, RunState.STOPPING, RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED}),
    RunState.STALLED: frozenset({RunState.RUNNING, RunState.STOPPING, RunState.SUCCEEDED, RunState.FAILED, RunState.STOPPED}),
    RunState.STOPPING: frozenset({RunState.STOPPED, RunState.SUCCEEDED, RunState.FAILED}),
    RunState.SUCCEEDED: frozenset(),
    RunState.FAILED: frozenset(),
    RunState.STOPPED: frozenset(),
}


class TrialState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SCORED = "scored"
    FAILED = "failed"


TRIAL_TRANSITIONS: dict[TrialState, frozenset[TrialState]] = {
    TrialState.QUEUED: frozenset({TrialState.RUNNING, TrialState.SCORED, TrialState.FAILED}),
    TrialState.RUNNING: frozenset({TrialState.SCORED, TrialState.FAILED}),
    TrialState.SCORED: frozenset(),
    TrialState.FAILED: frozenset(),
}

TERMINAL_RUN_STATES = frozenset(s for s, after in RUN_TRANSITIONS.items() if not after)
TERMINAL_TRIAL_STATES = frozenset(s for s, after in TRIAL_TRANSITIONS.items() if not after)


class Phase(StrEnum):
    """What a trial is for: a training rollout or a held-out evaluation. `superseded`: its step was lost with a trainer that died and was
    done again; no figure counts it."""

    TRAIN = "train"
    EVAL = "eval"
    SUPERSEDED = "superseded"
