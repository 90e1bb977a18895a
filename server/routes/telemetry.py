"""`/metrics` for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..context import READ, Ctx
from ..telemetry.record import families

router = APIRouter(include_in_schema=False)


class _Families(Collector):
    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


@router.get("/metrics", dependencies=[READ])
def metrics(context: Ctx, request: Request) -> Response:
    """The runs under way, from the record, and the requests to this process."""
    record = CollectorRegistry()
    with context.db.read() as session:
        record.register(_Families(list(families(session))))
    text = generate_latest(record) + generate_latest(request.app.state.requests)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
