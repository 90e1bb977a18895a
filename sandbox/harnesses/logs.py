"""Reading a harness's own log: JSON from inside the sandbox, so of any size and any shape, into bounded facts."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from server.schemas.harnesslog import EVENTS, TEXT, HarnessLog, LogEvent, LogEventKind

READ_BYTES = 64 << 20
"""Of all files of one log together."""
LINE_BYTES = 8 << 20
"""Of one record, a line or a whole `.json` file: what is read becomes objects of twenty times its size."""
RECORDS = 50_000
"""Of all files of one log together; a run of two hundred turns leaves some thousand."""
FILES = 64
DROPPED = 50_000
"""Events beyond EVENTS after which no further record is read: a log of nothing else would take the runner half a minute."""


class Entry:
    """A JSON value of unknown shape. Every look into it answers with the type that was asked for: nothing is there that is not."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def at(self, *path: str) -> Entry:
        value = self.value
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return Entry(value)

    def text(self, *path: str) -> str:
        value = self.at(*path).value
        return value if isinstance(value, str) else ""

    def number(self, *path: str) -> float | None:
        value = self.at(*path).value
        good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15 and math.isfinite(value)
        return float(value) if good else None

    def count(self, *path: str) -> int | None:
        number = self.number(*path)
        return None if number is None or number < 0 else int(number)

    def items(self, *path: str) -> list[Entry]:
        value = self.at(*path).value
        return [Entry(item) for item in value] if isinstance(value, list) else []

    def time(self, *path: str) -> float | None:
        """Unix seconds of an ISO 8601 text (without a zone: UTC)."""
        try:
            found = datetime.fromisoformat(self.text(*path))
            return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return None


class LogBook:
    """Facts as an adapter finds them. Whatever it is given becomes short and printable here."""

    def __init__(self) -> None:
        self.log = HarnessLog()
        self._running: dict[str, LogEvent] = {}

    def note(
        self,
        kind: LogEventKind,
        text: str = "",
        *,
        name: str = "",
        call_id: str = "",
        turn: int | None = None,
        started: float | None = None,
        seconds: float | None = None,
        ok: bool | None = None,
    ) -> LogEvent | None:
        """The event, or None when there are EVENTS already."""
        if len(self.log.events) >= EVENTS:
            self.log.dropped += 1
            return None
        event = LogEvent(
            kind=kind, text=short(text), name=short(name), call_id=short(call_id), turn=turn, started=started, seconds=seconds, ok=ok
        )
        self.log.events.append(event)
        return event

    def began(self, call_id: str, name: str, started: float | None) -> None:
        """A tool starts; its event stands here in the order of the log."""
        event = self.note(LogEventKind.TOOL, name=name, call_id=call_id, started=started)
        if event is not None:
            self._running[call_id] = event

    def ended(self, call_id: str, ended: float | None, ok: bool | None, since: float | None = None) -> None:
        """`since`: when it really began, if that is known only now."""
        event = self._running.pop(call_id, None)
        if event is not None:
            event.ok = ok
            event.started = since or event.started
            if ended is not None and event.started is not None:
                event.seconds = round(max(0.0, ended - event.started), 4)

    def stopped(self, end: str) -> None:
        self.log.end = short(end)

    def named(self, version: str) -> None:
        self.log.version = short(version)

    def turn(self, cost_usd: float | None = None) -> None:
        """One more turn by the harness's count."""
        self.log.turns = (self.log.turns or 0) + 1
        if cost_usd is not None:
            self.log.cost_usd = (self.log.cost_usd or 0.0) + cost_usd


def short(text: str) -> str:
    """Bounded, encodable, and without what moves a terminal's cursor."""
    kept = text[: TEXT + 1].encode("utf-8", "replace").decode()
    kept = "".join(character if character.isprintable() or character in "\n\t" else "�" for character in kept)
    return kept if len(kept) <= TEXT else kept[: TEXT - 1] + "…"


def read_log(
    directory: Path, patterns: Sequence[str], note: Callable[[Entry, LogBook], bool], exit_code: int | None = None
) -> HarnessLog | None:
    """The facts of the log files that match `patterns` below a trial's agent directory; None when there is no such file.

    A `.json` file is one record, any other file has one on each line. `note` returns whether it knows the kind of record.
    """
    book, left, records, found = LogBook(), READ_BYTES, RECORDS, False
    book.log.exit_code = exit_code
    for path in sorted({path for pattern in patterns for path in directory.glob(pattern)})[:FILES]:
        if (descriptor := _regular(path, directory)) is None:
            continue
        found = True
        with open(descriptor, "rb") as file:  # noqa: PTH123 -- a descriptor
            for record in [file.read(min(LINE_BYTES, left))] if path.suffix == ".json" else islice(_lines(file, left), max(0, records)):
                left, records = left - len(record), records - 1
                _take(record, book, note, path.suffix == ".json")
                if book.log.dropped > DROPPED:
                    left = records = 0
                    break
            book.log.truncated |= bool(file.read(1))
    if exit_code and not any(event.kind is LogEventKind.ERROR for event in book.log.events) and (words := _last_words(directory)):
        book.note(LogEventKind.ERROR, words)
        found = True
    return book.log if found else None


def _last_words(directory: Path) -> str:
    """The last line that a harness wrote beside its log."""
    for name in ("stderr.log", "harness.log"):
        if (descriptor := _regular(directory / name, directory)) is not None:
            with open(descriptor, "rb") as file:  # noqa: PTH123 -- a descriptor
                file.seek(max(0, os.fstat(descriptor).st_size - TEXT * 4))
                lines = file.read(TEXT * 4).decode(errors="replace").splitlines()
            if words := next((line.strip() for line in reversed(lines) if line.strip()), ""):
                return words
    return ""


def _regular(path: Path, below: Path) -> int | None:
    """A descriptor of a regular file that really lies below a directory; a link, a pipe or a device is not read."""
    try:
        if not path.parent.resolve().is_relative_to(below.resolve()):
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def _lines(file: BinaryIO, left: int) -> Iterator[bytes]:
    """Lines of the first `left` bytes. Of one that is too long the beginning is given, which is no JSON."""
    while left > 0 and (line := file.readline(min(LINE_BYTES, left))):
        left -= len(line)
        yield line
        while left > 0 and not line.endswith(b"\n") and (line := file.readline(min(LINE_BYTES, left))):
            left -= len(line)


def _take(record: bytes, book: LogBook, note: Callable[[Entry, LogBook], bool], whole: bool) -> None:
    """`whole`: the record is a file of its own, not a line."""
    if not record.strip():
        return
    try:
        value = json.loads(record)
    except (ValueError, RecursionError):  # no JSON, a number of thousands of digits, a nest of thousands of brackets
        value = None
    if not isinstance(value, dict):
        ended = record.rstrip().endswith(b"}") if whole else record.endswith(b"\n")
        # A log that was cut on its way here, or whose harness was killed while it wrote, ends within a record, which is no flaw of it.
        book.log.truncated |= not ended
        book.log.malformed += ended or len(record) >= LINE_BYTES
    elif not note(Entry(value), book):
        book.log.unknown += 1
