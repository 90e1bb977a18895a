"""`rl rollout show` against a real server over a run with one captured rollout, whose texts mean harm to a terminal."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plugin.client import Client
from plugin.errors import ControlError
from plugin.local import ensure_server, stop_server
from server.db import Database
from server.db.models import PlanRow, Run
from server.events import ingest
from server.schemas.capture import Drift
from server.schemas.datadir import DataDir
from server.schemas.events import Event
from server.schemas.rundir import RunDir
from server.schemas.states import RunState
from server.spec import resolve
from tests.trainer.scripted import ScriptedEngine, call, say
from trainer.capture.capture import Capture
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.rollout.keep import keep
from trainer.vocabulary import byte_level

from .test_cli import rl

STEERING = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202eevil\r"
FORGED = "turn 9, branch 0 (root), 99 tokens sampled behind 0"
TOOLS = [{"type": "function", "function": {"name": "bash", "description": "Run a command.", "parameters": {}}}]


def captured() -> Capture:
    """A tool call whose arguments come back edited, a turn that the harness dropped, an end after a weight update."""
    engine = ScriptedEngine(byte_level(), [call("bash", f"I look. {STEERING}", command="ls"), say("oops"), say("Done.\n" * 50)], version=3)

    async def run() -> Capture:
        session = Session("t-1", "key", engine, Rendering(engine.tokenizer), Sampling(1.0, 400, ()), Limits(9, 4000), harness="mini")
        start = (Message("system", "You fix code."), Message("user", f"Fix it.\n{FORGED}\n{STEERING}"))
        first = await session.answer(Request(start, TOOLS, "m"))
        messages = (*start, first.message, Message("tool", "calc.py", tool_call_id=first.message.tool_calls[0].id))
        second = await session.answer(Request(messages, TOOLS, "m"))
        engine.version = 4
        third = await session.answer(Request((*messages, Message("user", "Format error.")), TOOLS, "m"))
        first.sent = second.sent = third.sent = True
        return await session.close()

    capture = asyncio.run(run())
    capture.violations.append(f"turn 1: 3 rows of routes for 4 positions\n{FORGED}")
    return capture


@pytest.fixture(scope="module")
def capture() -> Capture:
    return captured()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, capture: Capture) -> DataDir:
    data = DataDir(tmp_path_factory.mktemp("data"))
    db = Database(f"sqlite:///{data.database}")
    db.migrate()
    spec = resolve({"extends": "local"}, {}).spec.model_dump(mode="json")
    now = time.time()
    row = {"run_id": "r1", "name": "demo", "digest": "d", "state": RunState.SUCCEEDED, "token_sha256": "", "steps_expected": 1}
    with db.write() as session:
        session.add(PlanRow(digest="d", spec=spec, provenance={}, summary="", created=0))
        session.flush()
        session.add(Run(**row, created=now, started=now, finished=now))
    run = RunDir(data.runs / "r1")
    run.captures.mkdir(parents=True)
    record = capture.record("t-1")
    record.turns[0].drift = Drift.EDITED
    kept, _ = keep(run, record, lambda: capture.to_bytes("t-1"), 1)
    bare, _ = keep(run, capture.record("t-2"), None, 1)
    group = {"type": "group", "group_id": "g", "step": 1, "phase": "train", "task": "task-1", "harness": "mini", "size": 2}
    trials = [{"type": "trial", "trial_id": t, "state": "queued", "stage": "queued", "group_id": "g", "sample": 0} for t in ("t-1", "t-2")]
    outcome = {"kind": "scored", "reward": 1, "termination": "completed", "detail": f"fine\n{FORGED}"}
    bodies: list[dict[str, Any]] = [group, *trials, {"type": "outcome", "trial_id": "t-1", "outcome": outcome}]
    bodies += [kept.model_dump(), bare.model_dump()]
    ingest(db, "r1", [Event.model_validate({"source": "trainer", "seq": n, "time": n, "body": body}) for n, body in enumerate(bodies, 1)])
    db.close()
    return data


@pytest.fixture(scope="module")
def client(data: DataDir) -> Iterator[Client]:
    up = ensure_server(data, port=0)
    yield up.client
    up.client.close()
    stop_server(data)


def test_turns_branches_and_their_fate_are_shown(client: Client, data: DataDir, capture: Capture) -> None:
    shown = rl(data, "rollout", "show", "t-1")
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("trial t-1  scored  reward 1, completed: fine ")
    assert lines[1] == "  task task-1  harness mini  train step 1"
    assert lines[2] == f"  3 turns, 2 branches, {capture.sampled_tokens} tokens sampled"
    assert lines[3] == "  echoed arguments: 1 edited"
    assert lines[4].startswith("  VIOLATION turn 1: 3 rows of routes for 4 positions")
    first, second = capture.branches()
    sizes = [sum(len(turn.sampled) for turn in branch.owned) for branch in (first, second)]
    assert lines[5] == (
        f"  branch 0  root, policy, {first.turns[-1].end} tokens, {sizes[0]} of them sampled here by policy version 3 to 4; "
        "trained, if its group has a signal"
    )
    assert lines[6].startswith(f"  branch 1  malformed_turn, policy, {second.turns[-1].end} tokens, {sizes[1]} of them")
    sampled = len(capture.graph.turns[0].sampled)
    assert (
        f"turn 0, branch 0 (root), {sampled} tokens sampled behind {capture.graph.turns[0].prompt_tokens}, policy version 3, "
        "ended by stop, echoed arguments edited:"
    ) in lines
    assert '  | bash {"command": "ls"}' in lines
    assert "tool:" in lines and "  | calc.py" in lines
    assert "  … 11 more lines (--full shows them)" in lines


def test_what_others_wrote_steers_no_terminal_and_passes_for_nothing(client: Client, data: DataDir) -> None:
    plain = rl(data, "rollout", "show", "t-1", "--full", "--tokens").stdout
    for shown in (plain, rl(data, "rollout", "show", "t-1", "--json").stdout):
        assert all(character.isprintable() or character == "\n" for character in shown)
        assert not any(line.startswith(FORGED) for line in shown.splitlines())
    assert "  | " + FORGED in plain


def test_json_is_exact_and_holds_the_record(client: Client, data: DataDir, capture: Capture) -> None:
    shown = json.loads(rl(data, "rollout", "show", "t-1", "--json", "--tokens").stdout)
    assert shown["trial"]["outcome"]["reward"] == 1
    assert shown["capture"]["turns"][0]["context"][1] == ["user", f"Fix it.\n{FORGED}\n{STEERING}"]
    assert [tokens["turn"] for tokens in shown["tokens"]] == [0, 1, 2]
    for turn, tokens in zip(capture.graph.turns, shown["tokens"], strict=True):
        sent = [id for part in tokens["context"] for id in part["ids"]] + tokens["scaffold"]
        whole = [id for node in turn.path() for id in node.ids.tolist()]
        assert whole[tokens["start"] :] == sent + tokens["sampled"] and tokens["start"] + len(sent) == turn.prompt_tokens
        assert tokens["sampled"] == turn.sampled.tolist()
        assert tokens["log_probs"] == turn.log_probs.tolist()
        assert [tuple(span) for span in tokens["policy_versions"]] == turn.spans


def test_tokens_of_one_turn_stand_with_their_log_probs(client: Client, data: DataDir, capture: Capture) -> None:
    shown = rl(data, "rollout", "show", "t-1", "--turn", "1", "--tokens").stdout
    turn = capture.graph.turns[1]
    pairs = " ".join(f"{id}:{log_prob:.4f}" for id, log_prob in zip(turn.sampled, turn.log_probs, strict=True))
    assert f"  {turn.prompt_tokens:>7}  SAMPLED            {pairs}\n" in shown
    assert "turn 0," not in shown and "Format error." not in shown


def test_a_rollout_is_exported_as_a_trajectory_of_the_common_format(client: Client, data: DataDir, capture: Capture) -> None:
    shown = json.loads(rl(data, "rollout", "export", "t-1").stdout)
    assert (shown["schema_version"], shown["session_id"], shown["agent"]["name"]) == ("ATIF-v1.8", "t-1", "mini")
    agent = [step for step in shown["steps"] if step["source"] == "agent"]
    assert sum(step["metrics"]["completion_tokens"] for step in agent) == capture.sampled_tokens
    assert shown["extra"]["outcome"]["reward"] == 1 and shown["extra"]["violations"]
    assert "has no trial t-9" in rl(data, "rollout", "export", "t-9").stderr


def test_what_is_not_there_is_said_in_one_line(client: Client, data: DataDir) -> None:
    for arguments, said in [
        (("t-9",), "Error: run r1 has no trial t-9\n"),
        (("t-1", "--turn", "3"), "Error: rollout t-1 has no turn 3: it has 3, counted from 0\n"),
        (("t-2", "--tokens"), "Error: the tokens of trial t-2 were not kept: reporting.keep_captures is off, or the disk was full\n"),
    ]:
        result = rl(data, "rollout", "show", *arguments)
        assert (result.returncode, result.stderr) == (1, said)
    for run, trial, turn, said in [
        ("r9", "t-1", 0, "nothing was captured of trial t-1 of run r9"),
        ("r1", "../t-1", 0, "'../t-1' is not an id"),
        ("r1", "t-1", 7, "has no turn 7: its turns are 0 to 2"),
    ]:
        with pytest.raises(ControlError, match=said):
            client.tokens(run, trial, turn)


def test_a_capture_file_that_was_changed_is_refused(client: Client, data: DataDir) -> None:
    path: Path = data.runs / "r1" / "captures" / "t-1.npz"
    shutil.copy(path, path.with_suffix(".kept"))
    try:
        path.write_bytes(path.read_bytes()[:-100])
        result = rl(data, "rollout", "show", "t-1", "--tokens")
        assert result.stderr == ("Error: captures/t-1.npz is not the file that the record of trial t-1 names: its SHA-256 differs\n")
        assert rl(data, "rollout", "show", "t-1").returncode == 0
    finally:
        shutil.move(path.with_suffix(".kept"), path)
