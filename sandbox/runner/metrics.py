"""The runner's own Prometheus metrics: counted as trials go, read by a scrape that looks at nothing else."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from server.schemas.outcome import Cause, Failed, Scored, Stage
from server.schemas.states import TrialState

BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, float("inf"))
"""Seconds: a forked sandbox is up within the first, an agent may work for an hour."""
CONTENT_TYPE = CONTENT_TYPE_LATEST
_LIVE = (TrialState.QUEUED, TrialState.RUNNING)


class Metrics:
    """Of one runner; its labels are words of the vocabulary, never a request's. For use on one event loop."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._live = Gauge(
            "lego_rl_runner_trials_live", "Trials under way; those running hold a place for a sandbox.", ["state"], registry=self._registry
        )
        self._ended = Counter(
            "lego_rl_runner_trials", "Trials that ended, by cause of failure.", ["state", "cause"], registry=self._registry
        )
        self._retries = Counter("lego_rl_runner_retries", "Attempts at a set-up that were made again.", ["cause"], registry=self._registry)
        self._stages = Histogram(
            "lego_rl_runner_stage_seconds", "Time that trials spent in a stage.", ["stage"], buckets=BUCKETS, registry=self._registry
        )
        for state in _LIVE:
            self._live.labels(state.value)

    def accepted(self) -> None:
        self._live.labels(TrialState.QUEUED.value).inc()

    def left(self, stage: Stage, seconds: float) -> None:
        """A clock that was set back makes no stage shorter than nothing."""
        self._stages.labels(stage.value).observe(max(0.0, seconds))

    def moved(self, before: TrialState, after: TrialState) -> None:
        if before in _LIVE:
            self._live.labels(before.value).dec()
        if after in _LIVE:
            self._live.labels(after.value).inc()

    def ended(self, outcome: Scored | Failed) -> None:
        """One trial, however many attempts it took."""
        match outcome:
            case Failed():
                self._ended.labels(TrialState.FAILED.value, outcome.cause.value).inc()
            case Scored():
                self._ended.labels(TrialState.SCORED.value, "").inc()

    def retried(self, cause: Cause) -> None:
        self._retries.labels(cause.value).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)
