"""Every recording against a table that was derived from the recordings' own labels, not from this program.

`main` and each `sub:X` is a thread; title, memory and web-search calls are auxiliary; a rewrite is listed with its reason. A branch is
one thread, one auxiliary call, or one rewrite. `kept` answers broke off, and the harness went on with what had arrived.
`compact:answers` goes on in the conversation of the summary before it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from server.schemas.runspec import TrainRule
from trainer.replay.play import Played
from trainer.replay.recording import load
from trainer.replay.report import report

HERE = Path(__file__).parent
TABLE: dict[str, dict[str, Any]] = {}
for _name in ("expected", "more", "terminus", "pinned"):
    TABLE |= json.loads((HERE / f"{_name}.json").read_text())
SIDE = {"title", "memory", "aux"}
LONG = {"opencode/prune_all"}
"""Four sessions with megabytes of tool output."""
PLAYED = [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in TABLE]


@cache
def labels(path: Path) -> dict[int, str]:
    """Ground truth of the model calls that were answered."""
    answered = {exchange.i for exchange in load(path) if exchange.model_call and exchange.answered}
    lines = map(json.loads, filter(None, path.read_text().split("\n")))
    return {line["i"]: line["label"] for line in lines if line["i"] in answered}


def test_the_table_names_every_recording(recordings: Path) -> None:
    assert {f"{path.parent.name}/{path.stem}" for path in recordings.rglob("*.jsonl")} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_follows_from_the_labels(name: str, recordings: Path) -> None:
    row, seen = TABLE[name], list(labels(recordings / f"{name}.jsonl").values())
    subs, side = {label for label in seen if label.startswith("sub:")}, [label for label in seen if label in SIDE]
    rewrites = Counter(line.split()[0] for line in row["rewrites"])
    assert row["threads"] == 1 + len(subs)
    assert row["branches"] == row["threads"] + len(side) + rewrites.total()
    assert row["reasons"] == dict(Counter({"root": 1, "sub_agent": len(subs), "auxiliary": len(side)}) + rewrites)
    assert row["classes"].get("summary", 0) == rewrites["summary"] == seen.count("compact")
    assert sum(row["classes"].values()) == row["branches"]
    assert row["policy_turns"] == len(seen) - len(side) + row.get("kept", 0)


@pytest.mark.parametrize("rule", TrainRule)
@pytest.mark.parametrize("name", PLAYED)
def test_a_recording_becomes_what_its_labels_say(name: str, rule: TrainRule, recordings: Path, play: Callable[[Path], Played]) -> None:
    played = play(recordings / f"{name}.jsonl")
    result, row = report(played, rule), TABLE[name]
    assert result.violations == []
    wanted = {key: value for key, value in row.items() if key not in ("rewrites", "kept")}
    assert {key: getattr(result, key) for key in wanted} == wanted
    calls = {call.step.exchange.i: len(call.ids) for call in played.calls if call.completed}
    assert result.sampled_tokens == sum(calls.values())
    known = labels(played.path)  # a call that failed was played with the answer of its repetition, in the same conversation
    main = sum(tokens for i, tokens in calls.items() if known.get(i, "main") == "main")
    side = sum(tokens for i, tokens in calls.items() if known.get(i) in SIDE)
    if rule is TrainRule.PARENT_EXACT:
        rewritten = any(not line.startswith("summary") for line in row["rewrites"])
        assert 0 < result.trained_tokens < main if rewritten else result.trained_tokens == main
    elif not result.undelivered:
        assert result.trained_tokens == result.sampled_tokens - side
