from __future__ import annotations

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from trainer.launch.kuberay import log
from trainer.launch.kuberay.api import Absent, ClusterError
from trainer.launch.kuberay.log import LogReader
from trainer.launch.kuberay.manifest import Job

JOB = Job(run_id="r", attempt=1, owner="o", sources="s")


class Node:
    """Answers as a kubelet does: lines since a whole second, the first bytes of them."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.cut = ""
        self.error: ClusterError | None = None

    def items(self, kind: str, labels: str) -> list[dict[str, Any]]:
        assert kind == "pods" and labels.endswith("lego-rl/role=submitter")
        return [{"metadata": {"name": "p"}}]

    def path(self, kind: str, name: str) -> str:
        return f"/{kind}/{name}"

    def text(self, method: str, path: str, query: dict[str, str]) -> str:
        assert (method, path) == ("GET", "/pods/p/log")
        if self.error:
            raise self.error
        since = query.get("sinceTime", "")
        assert "." not in since and (not since or since.endswith("Z"))
        lines = [line for line in self.lines if line[:19] >= since.rstrip("Z")]
        return ("".join(f"{line}\n" for line in lines) + self.cut)[: int(query["limitBytes"])]


def reader(node: Node, last: str = "") -> LogReader:
    return LogReader(node, JOB, last)  # type: ignore[arg-type]


def test_a_line_is_given_out_once_and_only_when_it_is_whole() -> None:
    node = Node("2026-01-01T00:00:00.5Z one", "2026-01-01T00:00:00.500000001Z two")
    node.cut = "2026-01-01T00:00:00.6Z thr"
    one = reader(node)
    assert one.new_lines() == ["one", "two"] and one.new_lines() == []
    node.lines.append("2026-01-01T00:00:00.6Z three  and more")
    assert one.new_lines() == ["three  and more"]
    assert reader(node, last=one.last).new_lines() == [], "another one goes on where this one was"


def test_nodes_write_their_own_time() -> None:
    one = reader(Node("2026-01-01T02:00:00.25+02:00 a", "2026-01-01T02:00:01+02:00 b"))
    assert one.new_lines() == ["a", "b"]
    assert log._second(one.last) == "2026-01-01T00:00:01Z"


def test_a_container_that_has_not_begun_has_no_lines() -> None:
    node = Node()
    for error in (Absent("gone", 404), ClusterError("container is waiting to start", 400)):
        node.error = error
        assert reader(node).new_lines() == []


@example([0, 1_000_000_000], 60, 28)  # the first piece ends in a line whose stamp is the very beginning of the next second
@given(st.lists(st.integers(0, 5_000_000_000), unique=True).map(sorted), st.integers(60, 200), st.integers(0, 30))
def test_pieces_of_any_size_lose_no_line_and_repeat_none(times: list[int], piece: int, width: int) -> None:
    """As long as a second's lines fit into a piece."""
    stamps = [f"2026-01-01T00:00:{n // 10**9:02d}.{n % 10**9:09d}Z" for n in times]
    lines = [f"{stamp} {'x' * width}{number}" for number, stamp in enumerate(stamps)]
    seconds = {stamp[:19] for stamp in stamps}
    largest = max((sum(len(line) + 1 for line in lines if line[:19] == second) for second in seconds), default=0)
    before, log.PIECE = log.PIECE, largest + piece
    try:
        assert reader(Node(*lines)).new_lines() == [line.partition(" ")[2] for line in lines]
    finally:
        log.PIECE = before


def test_more_in_a_second_than_fits_ends() -> None:
    before, log.PIECE = log.PIECE, 100
    try:
        node = Node(*(f"2026-01-01T00:00:00.{n:03d}Z {'y' * 20}" for n in range(100)), "2026-01-01T00:00:02Z after")
        assert reader(node).new_lines()[-1] == "after"
    finally:
        log.PIECE = before
