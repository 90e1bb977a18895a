"""Store a batch: exactly once, in order per source, in one transaction with what it means for the other tables.

Invariant: of every source the events 1 … `stored` are in the table and applied, and none beyond. A batch that begins behind a gap
therefore stores nothing, and the acknowledgement tells the producer where to go on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import sqlalchemy as sa

from ..db import Database
from ..db.models import EventRow, EventSource, Run
from ..schemas.events import Event
from .projection import Projection


class UnknownRun(LookupError):
    """No run has this id."""


class MixedSources(ValueError):
    """A batch holds events of one source, because the answer is one number."""


def ingest(db: Database, run_id: str, events: Sequence[Event]) -> int:
    """The highest seq stored for the batch's source, 0 when there is none. Raises UnknownRun, MixedSources."""
    sources = {event.source for event in events}
    if len(sources) > 1:
        raise MixedSources(f"a batch holds events of one source, this one has {', '.join(sorted(sources))}")
    with db.write() as session:
        # Batches of a run are applied one at a time: SQLite by its one writer, PostgreSQL by this row's lock.
        run = session.scalar(sa.select(Run).where(Run.run_id == run_id).with_for_update())
        if run is None:
            raise UnknownRun(run_id)
        if not events:
            return 0
        (source,) = sources
        cursor = session.get(EventSource, (run_id, source))
        stored = cursor.stored if cursor else 0
        new = _contiguous(events, stored)
        if not new:
            return stored
        problems = Projection(session, run).apply(new)
        session.execute(sa.insert(EventRow), [_row(run_id, event, problems.get(event.seq)) for event in new])
        if cursor is None:
            session.add(EventSource(run_id=run_id, source=source, stored=new[-1].seq))
        else:
            cursor.stored = new[-1].seq
        run.last_event = time.time()
        return new[-1].seq


def _contiguous(events: Sequence[Event], stored: int) -> list[Event]:
    """The events that directly follow `stored`, without a gap and each once."""
    new: list[Event] = []
    for event in sorted(events, key=lambda event: event.seq):
        if event.seq == stored + 1 + len(new):
            new.append(event)
    return new


def _row(run_id: str, event: Event, problem: str | None) -> dict[str, object]:
    return {
        "run_id": run_id,
        "source": event.source,
        "seq": event.seq,
        "time": event.time,
        "type": event.body.type,
        "body": event.body.model_dump_json(),
        "problem": problem,
    }
