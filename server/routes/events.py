"""Events: reported by the processes of a run with the run's own token, or by the admin."""

from __future__ import annotations

import secrets
from typing import Annotated

import sqlalchemy as sa
from fastapi import APIRouter, Depends, HTTPException, Query, Request
from pydantic import BaseModel, ValidationError

from ..context import READ, Ctx
from ..db.models import EventRow, Run
from ..errors import no_run, one_line
from ..events import MixedSources, UnknownRun, ingest
from ..schemas.events import EventAck, EventBatch
from ..security import bearer, hash_token

router = APIRouter(prefix="/api/runs/{run_id}", tags=["events"])


class StoredEvent(BaseModel):
    """`body` is the JSON text as it arrived: a metric in it may be NaN."""

    source: str
    seq: int
    time: float
    type: str
    body: str
    problem: str | None


async def _body(request: Request) -> bytes:
    return await request.body()


@router.post("/events")
def report(context: Ctx, request: Request, run_id: str, body: Annotated[bytes, Depends(_body)]) -> EventAck:
    """Idempotent on (run, source, seq). The answer is the highest seq of the batch's source that is stored without a gap before it."""
    _check_token(context, request, run_id)
    try:
        # Parsed here and not by the framework: it reads NaN, and it leaves the event loop alone.
        batch = EventBatch.model_validate_json(body)
        stored = ingest(context.db, run_id, batch.events)
    except ValidationError as error:
        raise HTTPException(422, one_line(error)) from None
    except MixedSources as error:
        raise HTTPException(422, str(error)) from None
    except UnknownRun:
        raise no_run(run_id) from None
    context.changes.notify(run_id)
    return EventAck(stored=stored)


@router.get("/events", dependencies=[READ])
def events(
    context: Ctx,
    run_id: str,
    source: str | None = None,
    after: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    problems: bool = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
) -> list[StoredEvent]:
    """Stored events with seq > `after`, in order per source; `problems` asks only for those that could not be applied."""
    query = sa.select(EventRow).where(EventRow.run_id == run_id, EventRow.seq > after)
    if source is not None:
        query = query.where(EventRow.source == source)
    if problems:
        query = query.where(EventRow.problem.is_not(None))
    with context.db.read() as session:
        rows = session.scalars(query.order_by(EventRow.source, EventRow.seq).limit(limit))
        return [StoredEvent.model_validate(row, from_attributes=True) for row in rows]


def _check_token(context: Ctx, request: Request, run_id: str) -> None:
    token = bearer(request)
    if token is not None and not context.guard.is_token(token):
        with context.db.read() as session:
            known = session.scalar(sa.select(Run.token_sha256).where(Run.run_id == run_id))
        if known is not None and secrets.compare_digest(hash_token(token), known):
            return
    context.guard.check_write(request)
