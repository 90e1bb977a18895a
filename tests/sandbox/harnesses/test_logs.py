"""The harnesses' own logs, as the pinned programs wrote them (`logs.tar.xz`; long texts cut), become bounded facts, whatever is in them."""

from __future__ import annotations

import copy
import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harbor.models.trajectories.trajectory import Trajectory
from hypothesis import given
from hypothesis import strategies as st

from sandbox.harnesses import logs as logs_module
from sandbox.harnesses.base import HarnessAgent
from sandbox.harnesses.logs import LINE_BYTES, Entry, LogBook, read_log, short
from sandbox.harnesses.pins import PINS
from sandbox.harnesses.registry import HARNESSES
from server.runs.atif import trajectory
from server.schemas.capture import CaptureRecord
from server.schemas.harnesslog import EVENTS, TEXT, HarnessLog, LogEventKind
from tests.support.examples import examples

ARCHIVE = Path(__file__).with_name("logs.tar.xz")
PLAIN = {"tool": 5}
EXPECTED: dict[str, dict[str, int]] = {
    "claude-code-plain": PLAIN,
    "claude-code-sub": {"tool": 6, "sub_agent": 1},
    "claude-code-compact": {"tool": 7, "compaction": 3},
    "claude-code-bad": {"tool": 4, "error": 1},
    "claude-code-bare": {"tool": 2},
    "codex-plain": PLAIN,
    "codex-sub": {"tool": 6, "sub_agent": 1},
    "codex-compact": {"tool": 7, "compaction": 2},
    "codex-bad": {"tool": 4, "error": 1},
    "mini-swe-agent-plain": {"tool": 6},
    "mini-swe-agent-bad": {"tool": 3, "error": 1},
    "opencode-plain": PLAIN,
    "opencode-sub": {"tool": 5, "sub_agent": 1},
    "opencode-compact": {"tool": 7, "compaction": 1},
    "opencode-bad": {"tool": 4, "error": 3},
    "openhands-plain": {"tool": 6},
    "openhands-sub": {"tool": 6, "sub_agent": 1},
    "openhands-compact": {"tool": 8, "compaction": 3},
    "openhands-bad": {"tool": 4, "error": 2},
    "terminus-2-plain": {"tool": 2},
}
"""Trial → what its log says. `plain` has a command that fails, `bad` a tool that does not exist and a turn cap."""


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("logs")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(root, filter="data")
    return root / "logs"


def harness_of(trial: str) -> str:
    return trial.rpartition("-")[0]


def facts(logs: Path, trial: str) -> HarnessLog:
    agent = HARNESSES[harness_of(trial)]
    found = read_log(logs / trial, agent.reads, agent.note, 0)
    assert found is not None
    return found


def recorded(logs: Path, trial: str) -> CaptureRecord:
    return CaptureRecord.model_validate_json((logs / trial / "capture.json").read_bytes())


def test_every_harness_is_here(logs: Path) -> None:
    assert {path.name for path in logs.iterdir()} == set(EXPECTED)
    assert {harness_of(trial) for trial in EXPECTED} == set(HARNESSES)


@pytest.mark.parametrize("trial", EXPECTED)
def test_a_real_log_says_what_happened(logs: Path, trial: str) -> None:
    found = facts(logs, trial)
    assert Counter(event.kind.value for event in found.events) == EXPECTED[trial]
    assert (found.malformed, found.unknown, found.dropped, found.truncated, found.exit_code) == (0, 0, 0, False, 0)
    name = harness_of(trial)
    assert found.version == (PINS[name].version if name not in ("opencode",) else "")  # OpenCode's log does not name it
    calls = {call.id for turn in recorded(logs, trial).turns for call in turn.tool_calls}
    tools = [event for event in found.events if event.kind is LogEventKind.TOOL]
    if name != "terminus-2":
        assert {event.call_id for event in tools} <= calls
        assert all(event.seconds is not None and 0 <= event.seconds < 60 for event in tools)
    if trial.endswith("-plain") and name != "terminus-2":
        assert [event.ok for event in tools][:3] == [True, False, True]


@pytest.mark.parametrize("trial", EXPECTED)
def test_capture_and_log_are_one_trajectory_for_every_harness(logs: Path, trial: str) -> None:
    record, found = recorded(logs, trial), facts(logs, trial)
    made = trajectory(record.model_copy(update={"log": found}), "1", {"task": "onebug"})
    Trajectory.model_validate(made)
    every = [made, *made.get("subagent_trajectories", [])]
    steps = [step for whole in every for step in whole["steps"]]
    placed = [event for step in steps for event in step.get("extra", {}).get("harness", [])]
    ran = [call["extra"] for step in steps for call in step.get("tool_calls", []) if "extra" in call]
    assert made["extra"]["harness"]["events"] == [], "everything has its place"
    assert len(placed) + len(ran) == sum(EXPECTED[trial].values())
    references = [
        reference["trajectory_id"]
        for step in steps
        for result in step.get("observation", {"results": []})["results"]
        for reference in result.get("subagent_trajectory_ref", [])
    ]
    assert len(references) == EXPECTED[trial].get("sub_agent", 0)
    assert set(references) <= {whole["trajectory_id"] for whole in every[1:]}
    tokens = [step["metrics"] for step in steps if "metrics" in step]
    without = trajectory(record, "1", {})
    plain = [
        step["metrics"] for whole in [without, *without.get("subagent_trajectories", [])] for step in whole["steps"] if "metrics" in step
    ]
    assert tokens == plain, "no token comes from the log"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["tool_use", "system", "\ud800", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


def records(logs: Path, trial: str) -> list[Any]:
    paths = sorted(path for pattern in HARNESSES[harness_of(trial)].reads for path in (logs / trial).glob(pattern))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@examples(60)
@given(data=st.data(), junk=JSON)
def test_no_record_of_whatever_shape_breaks_an_adapter(logs: Path, data: st.DataObject, junk: Any) -> None:
    trial = data.draw(st.sampled_from(sorted(EXPECTED)))
    agent, book = HARNESSES[harness_of(trial)], LogBook()
    for record in data.draw(st.lists(st.sampled_from(records(logs, trial)), max_size=6)):
        changed = copy.deepcopy(record)
        container, key = data.draw(st.sampled_from(list(_places(changed))))
        container[key] = junk
        agent.note(Entry(changed), book)
    agent.note(Entry({"type": junk, "kind": junk, "payload": junk, "messages": junk, "steps": junk}), book)
    text = book.log.model_dump_json()
    assert HarnessLog.model_validate_json(text) == book.log
    assert not any(character in text for character in "\x1b\x00")


def _write(directory: Path, data: bytes, name: str = "stream.jsonl") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(data)
    return directory


def claude(directory: Path, exit_code: int | None = 0) -> HarnessLog | None:
    agent: type[HarnessAgent] = HARNESSES["claude-code"]
    return read_log(directory, agent.reads, agent.note, exit_code)


END = b'{"type":"result","subtype":"success","num_turns":3}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\x00\xfe",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 9_999 + b"}",
        b"[1]",
        b"{",
        b'"text"',
        b'{"type":"result"' + b" " * LINE_BYTES + b"}",
    ],
)
def test_what_is_no_record_is_counted_and_the_rest_is_read(tmp_path: Path, line: bytes) -> None:
    found = claude(_write(tmp_path / "agent", line + b"\n\n" + END))
    assert found is not None
    assert (found.malformed, found.turns, found.end) == (1, 3, "success")


def test_links_pipes_and_what_lies_elsewhere_are_not_read(tmp_path: Path) -> None:
    secret = _write(tmp_path / "elsewhere", END)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "stream.jsonl").symlink_to(secret / "stream.jsonl")
    assert claude(tmp_path / "agent") is None
    (tmp_path / "agent" / "stream.jsonl").unlink()
    os.mkfifo(tmp_path / "agent" / "stream.jsonl")
    assert claude(tmp_path / "agent") is None
    agent = HARNESSES["codex"]
    (tmp_path / "agent" / "sessions").symlink_to(secret)
    (tmp_path / "agent" / "stream.jsonl").unlink()
    assert read_log(tmp_path / "agent", ("sessions/*.jsonl",), agent.note) is None


def test_a_log_without_end_is_bounded(tmp_path: Path) -> None:
    call = b'{"type":"assistant","message":{"content":[{"type":"tool_use","id":"c%d","name":"%s"}]}}\n'
    found = claude(_write(tmp_path / "agent", b"".join(call % (number, b"n" * 5_000) for number in range(EVENTS + 7)) + END))
    assert found is not None and found.turns == 3
    assert (len(found.events), found.dropped) == (EVENTS, 7)
    assert all(len(event.name) == TEXT for event in found.events)


def test_a_log_of_nothing_but_events_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "DROPPED", 100)
    call = b'{"type":"assistant","message":{"content":[' + b",".join([b'{"type":"tool_use","id":"a"}'] * 300) + b"]}}\n"
    found = claude(_write(tmp_path / "agent", call * 9 + END))
    assert found is not None and found.truncated
    assert (len(found.events), found.dropped, found.turns) == (EVENTS, 200, None)


def test_a_log_of_too_many_records_or_one_too_large_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read becomes objects of twenty times its size, in the process that all trials share."""
    monkeypatch.setattr(logs_module, "RECORDS", 10)
    monkeypatch.setattr(logs_module, "LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text("{}\n" * 25)
    (tmp_path / "b.json").write_text(json.dumps({"x": "y" * 2000}))
    read = read_log(tmp_path, ["*.json*"], lambda entry, book: False)
    assert read is not None and read.truncated
    assert (read.unknown, read.malformed) == (10, 1)


def test_the_last_words_of_a_harness_that_failed_without_a_reason(tmp_path: Path) -> None:
    directory = _write(tmp_path / "agent", b"")
    _write(directory, b"warning\nError: cannot find \x1b[31mmodule\n\n", "stderr.log")
    found = claude(directory, exit_code=1)
    assert found is not None
    assert [(event.kind, event.text) for event in found.events] == [(LogEventKind.ERROR, "Error: cannot find �[31mmodule")]
    quiet = claude(directory, exit_code=0)
    assert quiet is not None and not quiet.events


def test_refused_calls_are_facts_too(tmp_path: Path) -> None:
    """By the shapes of the harness's own types: with every permission given, as here, none is refused in a run."""
    end = b'{"type":"result","permission_denials":[{"tool_name":"Bash","tool_use_id":"c1","tool_input":{}}]}\n'
    found = claude(_write(tmp_path / "agent", end))
    assert found is not None
    assert [(event.kind, event.name, event.call_id) for event in found.events] == [(LogEventKind.DENIED, "Bash", "c1")]


def test_texts_are_short_and_printable() -> None:
    assert short("a\x1b[31m\x00b\u202e\n") == "a�[31m�b�\n"
    assert short("\ud800") == "?" and len(short("x" * 9_999)) == TEXT
