"""What happened between proxy and engine since the last step, as step metrics."""

from __future__ import annotations

from trainer.engine.base import KV, Engine, ReportsKV
from trainer.proxy.upstream import Upstream
from trainer.proxy.waiting import Gated


class Metrics:
    def __init__(self, engine: Engine, upstream: Upstream, gated: Gated | None) -> None:
        self._engine, self._upstream, self._gated = engine, upstream, gated
        self._resumed = 0
        self._kv = KV(0, 1, {}, {})

    def take(self) -> dict[str, float]:
        """Counts and seconds since the last call. `lego/kv/*` needs an engine that reports its KV, `lego/gate/*` a gate."""
        resumed, self._resumed = self._upstream.resumed - self._resumed, self._upstream.resumed
        return {"lego/engine/resumed": float(resumed), **self._of_kv(), **self._of_gate()}

    def _of_kv(self) -> dict[str, float]:
        kv = self._engine.kv() if isinstance(self._engine, ReportsKV) else None
        if kv is None:
            return {}
        before, self._kv = self._kv, kv
        prompted = kv.prompted - before.prompted
        share = (kv.reused - before.reused) / prompted if prompted else 0.0
        evicted = {} if kv.evicted is None else {"lego/kv/evicted": float(kv.evicted - (before.evicted or 0))}
        return {"lego/kv/reused_share": share} | evicted

    def _of_gate(self) -> dict[str, float]:
        if self._gated is None:
            return {}
        waits = self._gated.take()
        return {
            "lego/gate/admitted": float(waits.admitted),
            "lego/gate/waited": float(waits.waited),
            "lego/gate/forced": float(waits.forced),
            "lego/gate/queue_max": float(waits.queue),
            "lego/gate/wait_s/mean": waits.seconds / waits.waited if waits.waited else 0.0,
            "lego/gate/wait_s/max": waits.longest,
        }
