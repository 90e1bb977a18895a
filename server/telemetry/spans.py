"""A finished trial as OpenTelemetry spans: the trial, the stages that the runner timed, and in the agent's the model calls that the proxy
captured.

They are built from the record when the trial is over, so that no process on the way to a rollout waits for a collector, and a trial has
one trace however many processes and machines took part. Its trace id follows from its name: sending it twice gives the same trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, Tracer, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import Span, StatusCode, set_span_in_context

from ..schemas.api import TrialDetail
from ..schemas.capture import CaptureRecord
from ..schemas.outcome import Failed, Scored, Stage

Attributes = dict[str, str | int | float | bool]


class TrialSpans:
    """Makes the spans of one trial at a time; not for several threads."""

    def __init__(self) -> None:
        self._ids, self._ended = _Ids(), _Ended()
        provider = TracerProvider(resource=Resource({"service.name": "lego-rl"}), id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer: Tracer = provider.get_tracer("lego_rl")  # type: ignore[assignment]  # the SDK's provider gives the SDK's tracer

    def spans(self, run_id: str, trial: TrialDetail, capture: CaptureRecord | None) -> Sequence[ReadableSpan]:
        """Empty for a trial without a beginning or an end."""
        if trial.started is None or trial.finished is None:
            return []
        self._ids.begin(f"{run_id}/{trial.trial_id}")
        root = self._begin("trial", trial.started, None, _about(run_id, trial))
        if isinstance(trial.outcome, Failed):
            root.set_status(StatusCode.ERROR, f"{trial.outcome.stage}: {trial.outcome.cause}")
        inside = calling = set_span_in_context(root)
        for timing in trial.timings:
            if timing.finished is not None:
                stage = self._begin(f"stage {timing.stage}", timing.started, inside, {"lego_rl.stage": timing.stage})
                stage.end(_ns(timing.finished))
                if timing.stage == Stage.AGENT:
                    calling = set_span_in_context(stage)
        for turn in capture.turns if capture else []:
            if turn.started is not None and turn.finished is not None:
                called: Attributes = {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.usage.input_tokens": turn.prompt_tokens,
                    "gen_ai.usage.output_tokens": turn.sampled_tokens,
                    "lego_rl.turn": turn.index,
                    "lego_rl.branch": turn.branch,
                    "lego_rl.policy_version": turn.policy_version,
                    "lego_rl.delivered": turn.delivered,
                }
                self._begin("model call", turn.started, calling, called).end(_ns(turn.finished))
        root.end(_ns(trial.finished))
        return self._ended.take()

    def _begin(self, name: str, started: float, parent: Context | None, attributes: Attributes) -> Span:
        return self._tracer.start_span(name, context=parent or Context(), attributes=attributes, start_time=_ns(started))


def _about(run_id: str, trial: TrialDetail) -> Attributes:
    known = {
        "lego_rl.run": run_id,
        "lego_rl.trial": trial.trial_id,
        "lego_rl.task": trial.task,
        "lego_rl.harness": trial.harness,
        "lego_rl.phase": trial.phase,
        "lego_rl.step": trial.step,
        "lego_rl.sampled_tokens": trial.sampled_tokens,
    }
    if isinstance(trial.outcome, Scored):
        known |= {"lego_rl.reward": trial.outcome.reward, "lego_rl.termination": trial.outcome.termination}
    elif trial.outcome is not None:
        known |= {"lego_rl.cause": trial.outcome.cause}
    return {name: value for name, value in known.items() if value is not None}


class _Ids(IdGenerator):
    """Ids from the trial's name: the trace's, then those of its spans by their number."""

    def begin(self, name: str) -> None:
        self._name, self._spans = name, 0

    def generate_trace_id(self) -> int:
        return int.from_bytes(hashlib.sha256(self._name.encode()).digest()[:16])

    def generate_span_id(self) -> int:
        self._spans += 1
        return int.from_bytes(hashlib.sha256(f"{self._name}#{self._spans}".encode()).digest()[:8])


class _Ended(SpanProcessor):
    """Keeps ended spans until they are taken."""

    def __init__(self) -> None:
        self._spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self._spans.append(span)

    def take(self) -> list[ReadableSpan]:
        taken, self._spans = self._spans, []
        return taken


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
