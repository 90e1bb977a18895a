"""The control plane's end of the event protocol, and nothing else of it."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.schemas.events import Event, EventAck, EventBatch, EventBody

from .served import Served


class FakeServer:
    """Stores events by sequence number; `token` is the one bearer token it accepts."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._events: dict[int, Event] = {}
        self._served = Served(Starlette(routes=[Route("/api/runs/{run_id}/events", self._store, methods=["POST"])]))
        self.url = self._served.url

    def bodies(self) -> list[EventBody]:
        return [self._events[seq].body for seq in sorted(self._events)]

    def stop(self) -> None:
        self._served.stop()

    async def _store(self, http: Request) -> Response:
        if http.headers.get("authorization") != f"Bearer {self._token}":
            return Response(status_code=401)
        for event in EventBatch.model_validate_json(await http.body()).events:
            self._events.setdefault(event.seq, event)
        return Response(EventAck(stored=max(self._events)).model_dump_json())
