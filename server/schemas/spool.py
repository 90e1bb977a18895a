"""The producer's side of the event protocol: append to a file first, deliver in the background, again until acknowledged.

It lives beside the vocabulary because trainer and runner share it and may import nothing else of the server. Reporting never blocks
and never fails its caller: a server that is away costs disk, not training.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import httpx
from pydantic import ValidationError

from .events import Event, EventAck, EventBatch, EventBody

log = logging.getLogger(__name__)

BATCH = 200
RETRY_S = 1.0
IDLE_S = 0.2


class Reporter:
    """Writes events of one `source` to `spool_dir/<source>.jsonl` and ships them to the server in order.

    Invariant: line n of the file is the event with seq n, so the file alone says what is still to be sent: everything after the
    highest seq that the server answered. A restarted producer goes on with the next seq.
    """

    def __init__(self, url: str, run_id: str, token: str, source: str, spool_dir: Path) -> None:
        spool_dir.mkdir(parents=True, exist_ok=True)
        self.path = spool_dir / f"{source}.jsonl"
        self.source = source
        self._url = f"{url.rstrip('/')}/api/runs/{run_id}/events"
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._lock = threading.Lock()
        self._pending = read_spool(self.path)
        self._seq = self._pending[-1].seq if self._pending else 0
        self._file = self.path.open("ab", buffering=0)
        self._unwritten = b""
        """What a full disk did not take; it follows with the next event, so that the lines stay in order."""
        self._closing = threading.Event()
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._ship, name=f"reporter-{source}", daemon=True)
        self._thread.start()

    def report(self, body: EventBody) -> None:
        """Record one event. Returns as soon as it is in the spool file; where the disk is full, it is still delivered."""
        with self._lock:
            self._seq += 1
            event = Event(source=self.source, seq=self._seq, time=time.time(), body=body)
            self._pending.append(event)
            self._unwritten += event.model_dump_json().encode() + b"\n"
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            except OSError as error:
                log.warning("cannot write %s: %s", self.path, error.strerror)

    def close(self, timeout_s: float = 10) -> bool:
        """Stop shipping once everything is acknowledged; False when the server did not take all of it in time. The file keeps the rest."""
        self._closing.set()
        self._thread.join(timeout_s)
        self._given_up.set()
        with self._lock:
            self._file.close()
            return not self._pending

    def _ship(self) -> None:
        with httpx.Client(timeout=10, headers=self._headers, trust_env=False) as client:
            while not self._given_up.is_set():
                with self._lock:
                    batch = self._pending[:BATCH]
                if not batch:
                    if self._closing.wait(IDLE_S):
                        with self._lock:
                            if not self._pending:
                                return
                    continue
                try:
                    response = client.post(self._url, content=EventBatch(events=batch).model_dump_json())
                    response.raise_for_status()
                    stored = EventAck.model_validate_json(response.content).stored
                except (httpx.HTTPError, ValidationError) as error:  # the latter: somebody else answers, a portal or another server
                    log.warning("events of %s not delivered, will send them again: %s", self.source, error)
                    self._given_up.wait(RETRY_S)
                    continue
                with self._lock:
                    self._pending = [event for event in self._pending if event.seq > stored]


def read_spool(path: Path) -> list[Event]:
    """Events in a spool file; a last line cut by a crash is dropped from the file."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        path.write_bytes(whole)
    return [Event.model_validate_json(line) for line in whole.splitlines()]
