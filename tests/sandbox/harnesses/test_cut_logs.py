"""A log that ends within a record, because it was too long for its way here or its harness was killed, is cut: its records are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.harnesses import logs
from sandbox.harnesses.logs import Entry, LogBook, read_log


def known(entry: Entry, book: LogBook) -> bool:
    return True


LOGS = {
    "whole": ("a.jsonl", b'{"a": 1}\n{"a": 2}\n', (False, 0)),
    "whole, without a last line end": ("a.jsonl", b'{"a": 1}\n{"a": 2}', (False, 0)),
    "cut within a line": ("a.jsonl", b'{"a": 1}\n{"a": "tw', (True, 0)),
    "a line that is no record": ("a.jsonl", b'{"a": 1}\nwords\n{"a": 2}\n', (False, 1)),
    "a last line that is no record": ("a.jsonl", b'{"a": 1}\n[2]\n', (False, 1)),
    "one record, whole": ("a.json", b'{"a": 1}\n', (False, 0)),
    "one record, cut": ("a.json", b'{"a": [1, 2', (True, 0)),
    "one that is no record": ("a.json", b'{"a": x}\n', (False, 1)),
}


@pytest.mark.parametrize(("name", "content", "told"), LOGS.values(), ids=LOGS.keys())
def test_what_was_cut_is_told_from_what_is_no_record(tmp_path: Path, name: str, content: bytes, told: tuple[bool, int]) -> None:
    (tmp_path / name).write_bytes(content)
    found = read_log(tmp_path, [f"*{Path(name).suffix}"], known)
    assert found is not None
    assert (found.truncated, found.malformed) == told


def test_what_we_do_not_read_of_a_log_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "READ_BYTES", 12)
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n{"a": 2}\n')
    found = read_log(tmp_path, ["*.jsonl"], known)
    assert found is not None
    assert (found.truncated, found.malformed) == (True, 0)
