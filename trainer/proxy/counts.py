"""What a proxy did since it started, as Prometheus metrics. Calls are counted in plain numbers, because they are on an agent's way; metrics
are made of them when somebody scrapes."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric

from trainer.engine.base import Engine, Generation, GenerationRequest

BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
"""Seconds; 2 ms is what half of the calls may take on top of the engine's time."""
GONE = "gone"
"""In place of a status: the client left before it had its answer."""


class Counts:
    """Labels are words of the proxy's own, never a client's."""

    def __init__(self) -> None:
        self.prompted = self.sampled = self.undelivered = 0
        self._calls: Counter[tuple[str, str]] = Counter()
        self._added = [0] * (len(BUCKETS) + 1)
        self._added_s = 0.0

    def call(self, dialect: str, status: str, added: float | None) -> None:
        """`added`: seconds that the proxy took beside the engine; None for a call that was not answered with a turn."""
        self._calls[dialect, status] += 1
        if added is not None:
            self._added[bisect_left(BUCKETS, added)] += 1
            self._added_s += added

    def families(self, *, retries: int, sessions: int, waited: int, waited_s: float) -> Iterator[Metric]:
        """All metrics; what others count comes as arguments."""
        calls = CounterMetricFamily("lego_rl_proxy_calls", "Calls by dialect and the answer's status.", labels=["dialect", "status"])
        for labels, number in self._calls.items():
            calls.add_metric(labels, number)
        yield calls
        tokens = CounterMetricFamily("lego_rl_proxy_tokens", "Tokens of prompts, and sampled ones.", labels=["direction"])
        tokens.add_metric(["in"], self.prompted)
        tokens.add_metric(["out"], self.sampled)
        yield tokens
        total, buckets = 0, list[tuple[str, float]]()
        for bound, number in zip((*BUCKETS, float("inf")), self._added, strict=True):
            total += number
            buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
        help = "From the head of a request to its answer, less the time of the engine and of the gate before it."
        yield HistogramMetricFamily("lego_rl_proxy_added_seconds", help, buckets=buckets, sum_value=self._added_s)
        yield CounterMetricFamily("lego_rl_proxy_engine_retries", "Engine calls that were made again.", value=retries)
        yield GaugeMetricFamily("lego_rl_proxy_sessions_open", "Rollouts that are open.", value=sessions)
        help = "Calls that waited at the gate before the engine, and for how long."
        yield SummaryMetricFamily("lego_rl_proxy_admission_wait_seconds", help, count_value=waited, sum_value=waited_s)
        yield CounterMetricFamily("lego_rl_proxy_undelivered", "Turns of closed rollouts that no client received.", value=self.undelivered)


class Counted:
    """Implements `Engine` over another one and counts its tokens."""

    def __init__(self, engine: Engine, counts: Counts) -> None:
        self._engine, self._counts = engine, counts

    async def generate(self, request: GenerationRequest) -> Generation:
        self._counts.prompted += len(request.prompt_ids)
        generation = await self._engine.generate(request)
        self._counts.sampled += len(generation.token_ids)
        return generation
