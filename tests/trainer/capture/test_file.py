"""The capture file: opens again bit for bit, or is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest

from server.schemas import capturefile
from server.schemas.capture import CaptureRecord
from server.schemas.capturefile import CaptureFileError, npy_header, opened, pack
from server.schemas.runspec import TrainRule
from tests.trainer.capture.test_record import capture
from tests.trainer.equal import assert_same_capture
from trainer.capture.capture import Capture
from trainer.capture.file import from_bytes
from trainer.capture.graph import Node, Turn
from trainer.capture.message import Message, ToolCall


@pytest.mark.parametrize("moe", [True, False])
def test_a_capture_opens_again_bit_for_bit(moe: bool) -> None:
    made = capture(moe=moe)
    made.unknown_fields.update({"é", "thinking"})
    made.violations.append("turn 0: 3 rows of routes for 4 positions")
    made.engine_error, made.cancelled, made.over_length = "EngineError: gone", 2, True
    again, trial_id = from_bytes(made.to_bytes("t-1"))
    assert trial_id == "t-1"
    assert_same_capture(made, again)
    assert again.record("t-1") == made.record("t-1")
    assert again.to_bytes("t-1") == made.to_bytes("t-1")


@pytest.mark.parametrize("rule", TrainRule)
def test_the_fate_of_every_branch_is_in_the_file(rule: TrainRule) -> None:
    made = capture(moe=False)
    with opened(io.BytesIO(made.to_bytes("t-1", rule))) as members:
        found = [(branch.reason, branch.branch_class, branch.excluded, branch.turns) for branch in members.graph.branches]
        assert members.graph.rule is rule
    assert found == [(b.reason, b.branch_class, b.excluded, [turn.index for turn in b.owned]) for b in made.branches(rule)]


def test_an_empty_capture_is_a_file_too() -> None:
    again, _ = from_bytes(Capture("mini", 400).to_bytes("t-1"))
    assert again.graph.turns == [] and again.samples() == []


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32"])
def test_routes_keep_the_type_that_the_engine_gave(dtype: str) -> None:
    made = capture(moe=True)
    for node in made.graph.nodes():
        node.routes = None if node.routes is None else node.routes.astype(dtype)
    assert_same_capture(made, from_bytes(made.to_bytes("t-1"))[0])


def test_every_field_of_the_graph_is_stored() -> None:
    """A field that is added to the graph must be added to the file (or, like children and start, follow from what is there)."""
    stored = {name for entry in (capturefile.NodeEntry, capturefile.TurnEntry, capturefile.CaptureFile) for name in entry.model_fields}
    arrays_and_links = {"ids", "log_probs", "routed", "routes", "children", "start", "message", "graph", "key", "digest", "size"}
    for kind in (Node, Turn, Message, Capture):
        assert {field.name for field in dataclasses.fields(kind)} <= stored | arrays_and_links  # type: ignore[arg-type]
    assert {field.name for field in dataclasses.fields(ToolCall)} == set(capturefile.CallEntry.model_fields)


def test_numpy_and_unzip_open_it_too() -> None:
    made = capture(moe=True)
    with np.load(io.BytesIO(made.to_bytes("t-1")), allow_pickle=False) as file:
        assert set(file.files) == {"graph.json", "ids", "log_probs", "routed", "routes"}
        assert (file["ids"].dtype, file["log_probs"].dtype, file["routes"].dtype) == (np.int32, np.float32, np.uint8)
        assert len(file["log_probs"]) == made.sampled_tokens
        assert len(file["ids"]) == sum(len(node.ids) for node in made.graph.nodes())  # once, although two branches share a prefix
        assert json.loads(file["graph.json"])["trial_id"] == "t-1"


def test_a_file_that_was_cut_or_changed_anywhere_is_refused() -> None:
    data = capture(moe=True).to_bytes("t-1")
    rng = np.random.default_rng(0)
    for size in (0, 1, 70, len(data) // 2, len(data) - 1):
        with pytest.raises(CaptureFileError, match="no whole capture file"):
            from_bytes(data[:size])
    for at in rng.integers(0, len(data), 200):
        changed = bytearray(data)
        changed[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(CaptureFileError):
            from_bytes(bytes(changed))


def test_what_never_was_a_capture_is_refused() -> None:
    for data in (b"", b"PK nonsense", bytes(500)):
        with pytest.raises(CaptureFileError, match="no whole capture file"):
            from_bytes(data)


def forged(**changes: object) -> bytes:
    """A capture whose `graph.json` or arrays were changed by somebody who made the digest anew."""
    with opened(io.BytesIO(capture(moe=True).to_bytes("t-1"))) as members:
        graph = members.graph
        arrays = {name: members._archive.read(name) for name in members._members if name.endswith(".npy")}
    arrays.update({name: value for name, value in changes.items() if name in arrays})  # type: ignore[misc]
    return pack(graph.model_copy(update={name: value for name, value in changes.items() if name not in arrays}), arrays)


def nodes(**changes: object) -> list[capturefile.NodeEntry]:
    """The nodes with some fields of the first turn's changed."""
    with opened(io.BytesIO(capture(moe=True).to_bytes("t-1"))) as members:
        entries = members.graph.nodes
    at = next(i for i, entry in enumerate(entries) if entry.turn)
    turn = entries[at].turn
    assert turn is not None
    inner = {name: value for name, value in changes.items() if name in capturefile.TurnEntry.model_fields}
    outer = {name: value for name, value in changes.items() if name in capturefile.NodeEntry.model_fields}
    entries[at] = entries[at].model_copy(update=outer | {"turn": turn.model_copy(update=inner)})
    return entries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "lego-rl capture 2"}, "none of version 1"),
        ({"nodes": nodes(parent=99)}, "before its parent"),
        ({"nodes": nodes(index=7)}, "not numbered"),
        ({"nodes": nodes(scaffold=10_000)}, "log_probs.npy|does not fit|do not fit"),
        ({"nodes": nodes(spans=[(5, 1)])}, "do not fit"),
        ({"nodes": nodes(spans=[(0, 1), (9_999, 2)])}, "do not fit"),
        ({"nodes": nodes(tokens=2**40)}, "more than a capture may hold"),
        ({"nodes": nodes(tokens=3)}, "ids.npy"),
        ({"nodes": nodes(tool_calls=[capturefile.CallEntry(id="c", name="n", arguments="{")])}, "JSON"),
        ({"ids.npy": b"\x93NUMPY\x01\x00v\x00{'descr': '|O'}" + bytes(200)}, "ids.npy"),
        ({"log_probs.npy": b""}, "log_probs.npy"),
    ],
)
def test_a_forged_file_is_refused_with_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CaptureFileError, match=message):
        from_bytes(forged(**changes))


def test_nothing_is_unpacked_beyond_what_the_graph_asks_for() -> None:
    """64 MB of zeros shrink to 64 kB; the reader compares sizes before it unpacks."""
    with pytest.raises(CaptureFileError, match=r"ids\.npy would unpack to 67108864 bytes"):
        from_bytes(forged(**{"ids.npy": bytes(2**26)}))


def test_log_probs_that_are_no_numbers_are_neither_written_nor_read() -> None:
    made = capture(moe=False)
    made.graph.turns[1].log_probs[0] = np.nan
    with pytest.raises(ValueError, match="turn 1 has 5 sampled tokens and 4 finite log-probs"):
        made.to_bytes("t-1")
    with np.load(io.BytesIO(capture(moe=True).to_bytes("t-1"))) as file:
        values = file["log_probs"]
    values[3] = -np.inf
    with pytest.raises(CaptureFileError, match="no log-probabilities"):
        from_bytes(forged(**{"log_probs.npy": npy_header("<f4", values.shape) + values.tobytes()}))


def test_arguments_survive_that_no_file_can_hold_as_text() -> None:
    made = capture(moe=False)
    node = made.graph.turns[-1]
    arguments = {"half": "\ud83d", "é": [1, 1.0, -0.0, 10**40, None], "nul": "\x00"}
    node.message = Message("assistant", "", (ToolCall("toolu_1", "bash", arguments), ToolCall("toolu_2", "bash", "raw {")))
    again, _ = from_bytes(made.to_bytes("t-1"))
    assert repr(again.graph.turns[-1].message) == repr(node.message)


def test_calls_that_were_never_answered_leave_no_node() -> None:
    made = capture(moe=False)
    turn = made.graph.turns[0]
    before = set(turn.children)
    Node(Message("user", "refused: too long"), turn, np.arange(5000, dtype=np.int32))
    assert from_bytes(made.to_bytes("t-1"))[0].graph.turns[0].children.keys() == before != set(turn.children)


def test_the_size_of_a_long_rollout_without_routes() -> None:
    """Under 8 bytes a token here, where no text repeats; the bar is 40 in memory and 10 MB for 128k tokens."""
    made = capture(moe=False)
    rng = np.random.default_rng(0)
    node: Node = made.graph.turns[-1]
    for n in range(100):
        ids = rng.integers(0, 150_000, 1000).astype(np.int32)
        node = Node(Message("tool", " ".join(map(str, ids[:400])), tool_call_id=f"c{n}"), node, ids)
        sampled = rng.integers(0, 150_000, 280).astype(np.int32)
        node = Turn(
            Message("assistant", " ".join(map(str, sampled[:100]))),
            node,
            sampled,
            index=len(made.graph.turns),
            call=bytes([n]),
            sent=True,
            log_probs=-rng.random(280).astype(np.float32),
            spans=[(0, n)],
        )
        made.graph.turns.append(node)
    data = made.to_bytes("t-1")
    assert len(data) / 128_000 < 8
    assert_same_capture(made, from_bytes(data)[0])
    assert CaptureRecord.model_validate_json(made.record("t-1").model_dump_json()).sampled_tokens == made.sampled_tokens


def test_members_are_stored_in_the_order_and_form_that_the_documentation_says() -> None:
    with zipfile.ZipFile(io.BytesIO(capture(moe=True).to_bytes("t-1"))) as archive:
        forms = {member.filename: member.compress_type for member in archive.infolist()}
        assert archive.comment.startswith(b"sha256:")
    assert forms == {
        "graph.json": zipfile.ZIP_DEFLATED,
        "ids.npy": zipfile.ZIP_DEFLATED,
        "log_probs.npy": zipfile.ZIP_STORED,
        "routed.npy": zipfile.ZIP_STORED,
        "routes.npy": zipfile.ZIP_STORED,
    }
