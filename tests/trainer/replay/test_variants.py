"""The same recordings as another version of their harness would have made them: what the proxy need not know does not matter."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.schemas.runspec import TrainRule
from tests.trainer.replay.test_expected import LONG, TABLE
from trainer.replay.play import Played
from trainer.replay.report import report

QUICK = {"claude/subagent", "claude/compact", "codex/compact", "opencode/cut_paced", "openhands/plain", "mini/malformed", "qwen/subagent"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in TABLE if name not in LONG]
SESSION = re.compile(r"(?i)x-claude-code-.*-id|x-.*session-.*|session-id|thread-id|x-codex-parent-thread-id")
"""Headers whose values harnesses make up."""


def call_ids(value: Any) -> Iterator[str]:
    """Ids of sampled calls that nothing else can be mistaken for."""
    if isinstance(value, dict):
        yield from (value[key] for key in ("id", "call_id") if len(str(value.get(key) or "")) > 5)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from call_ids(item)


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, list):
        return [shuffled(item, rng) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: shuffled(value[key], rng) for key in rng.sample(list(value), len(value))}


def changed(raw: str, rng: random.Random) -> str:
    """Other ids of calls and sessions, names of models, header spellings, key orders, times, fields of tomorrow, and no labels."""
    lines = [json.loads(line) for line in raw.split("\n") if line.strip()]
    made_up = {id_ for line in lines for id_ in call_ids(line["response"].get("sampled") or [])}
    made_up |= {value for line in lines for name, value in (line["headers"] or {}).items() if SESSION.fullmatch(name) and len(value) > 5}
    text = "\n".join(map(json.dumps, lines))
    for old in sorted(made_up, key=len, reverse=True):
        text = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w-])", f"call_{rng.randrange(10**20):020}", text)
    result = []
    for line in map(json.loads, text.split("\n")):
        body = line["request"]
        if isinstance(body, dict) and "model" in body:
            tools = {"tools": body["tools"]} if "tools" in body else {}  # the key order in a tool is part of the prompt
            body = {**shuffled(body, rng), **tools, "model": "another/model", "field_of_tomorrow": [{}]}
        headers = {(name.upper() if rng.random() < 0.5 else name): value for name, value in (line["headers"] or {}).items()}
        times = {"t": 3 * line["t"] + 1e9, "t_end": None if line.get("t_end") is None else 3 * line["t_end"] + 1e9}
        result.append({**line, **times, "i": 7 * line["i"] + 5, "request": body, "headers": headers, "label": None, "step": None})
    return "\n".join(map(json.dumps, result))


@pytest.mark.parametrize("name", NAMES)
def test_what_a_harness_makes_up_does_not_matter(
    name: str, recordings: Path, play: Callable[[Path], Played], tmp_path: Path
) -> None:  # fmt: skip
    path = tmp_path / f"{name}.jsonl"
    path.parent.mkdir()
    path.write_text(changed((recordings / f"{name}.jsonl").read_text(), random.Random(name)))
    played = play(path)
    for rule in TrainRule:
        result = report(played, rule)
        assert result.violations == []
        wanted = {key: value for key, value in TABLE[name].items() if key not in ("rewrites", "kept")}
        assert {key: getattr(result, key) for key in wanted} == wanted
