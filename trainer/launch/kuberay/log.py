"""The log of a job, read from its submitter's pod in pieces: no connection has to last as long as a run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from .api import Absent, Cluster, ClusterError
from .manifest import ROLE, SUBMITTER, Job

PIECE = 1 << 20


class LogReader:
    """`last`: the time (RFC 3339, as the node's container runtime wrote it) of the last line that was given out."""

    def __init__(self, cluster: Cluster, job: Job, last: str) -> None:
        self._cluster = cluster
        self._selector = f"{job.selector},{ROLE}={SUBMITTER}"
        self.last = last

    def new_lines(self) -> list[str]:
        """Lines since the last call. Raises ClusterError; a container that has not begun has none."""
        found: list[str] = []
        for pod in self._cluster.items("pods", self._selector):
            try:
                found += self._of(pod["metadata"]["name"])
            except Absent:
                continue
            except ClusterError as error:
                if error.status != 400:  # "is waiting to start"
                    raise
        return found

    def _of(self, pod: str) -> list[str]:
        lines: list[str] = []
        since = _second(self.last) if self.last else ""
        while True:
            query = {"timestamps": "true", "limitBytes": str(PIECE)} | ({"sinceTime": since} if since else {})
            text = self._cluster.text("GET", self._cluster.path("pods", pod) + "/log", query)
            full = len(text.encode()) >= PIECE
            whole = text[: text.rfind("\n") + 1] or (text if full else "")  # the last line may still be written, or cut
            new = list(self._new(whole.splitlines()))
            lines += new
            if not full or not self.last:
                return lines
            # Nothing new in a full piece: it ends in the second it began with, and if that second has more, the rest of it is lost.
            since = _second(self.last) if new else _second(since, later=1)

    def _new(self, lines: list[str]) -> Iterator[str]:
        before = _key(self.last) if self.last else None
        for line in lines:
            stamp, _, words = line.partition(" ")
            try:
                late = before is None or _key(stamp) > before
            except ValueError:  # no stamp: not a line of the container
                continue
            if late:
                self.last = stamp
                yield words


def _moment(stamp: str) -> datetime:
    """Nodes write their own time zone."""
    return datetime.fromisoformat(stamp).astimezone(UTC).replace(microsecond=0)


def _second(stamp: str, later: int = 0) -> str:
    """The API server takes whole seconds; what lies between is known from the stamps."""
    return (_moment(stamp) + timedelta(seconds=later)).isoformat().replace("+00:00", "Z")


def _key(stamp: str) -> tuple[datetime, str]:
    """Nanoseconds, which a datetime does not hold, with or without trailing zeros."""
    fraction = re.search(r"\.(\d+)", stamp)
    return _moment(stamp), (fraction[1] if fraction else "").ljust(9, "0")
