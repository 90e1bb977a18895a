"""A body is read as if it were the first one, whatever was read before."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.fields import load
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.dialects.reader import Reader, read
from trainer.proxy.refusal import Refusal

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.text(st.characters(categories=["Cs"]))
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3))
FIELDS = st.sampled_from(["messages", "input", "tools", "system", "x", "\ud800"])
BODIES = st.dictionaries(FIELDS, VALUES | st.lists(VALUES, max_size=4), max_size=5)
DEEP = st.integers(55, 70).map(lambda depth: {"messages": [json.loads("[" * depth + "]" * depth)]})


def outcome(reader: Reader | None, raw: bytes) -> str:
    """Text, because NaN is not equal to itself."""
    try:
        return repr(reader.load(raw) if reader else load(raw))
    except Refusal as refusal:
        return refusal.message


@examples(60)
@given(st.lists(BODIES | DEEP, min_size=1, max_size=4), st.booleans())
def test_a_rollouts_bodies_read_as_each_would_alone(bodies: list[dict[str, Any]], ascii: bool) -> None:
    reader = Reader()
    for body in [*bodies, *bodies]:
        raw = json.dumps(body, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
        assert outcome(reader, raw) == outcome(None, raw)


MORE = st.lists(VALUES, min_size=1, max_size=3)
GARBAGE = st.sampled_from([b",", b", ", b",1", b"]", b",1],[", b'],"x":[', b",[", b"1", b',"', b" ,{}", b",\n2 ", b",\xff"])


@examples(60)
@given(st.lists(MORE, min_size=1, max_size=4), FIELDS, GARBAGE, st.sampled_from([(",", ":"), (", ", ": ")]), st.data())
def test_a_body_that_grows_reads_as_it_would_alone(
    steps: list[list[Any]], name: str, garbage: bytes, separators: tuple[str, str], data: st.DataObject
) -> None:
    """More items at the end of a list, which may not be the one that grows, and then something that is no JSON, or is by chance."""
    reader, items = Reader(), list[Any]()
    before, behind = data.draw(BODIES), data.draw(BODIES)
    for more in steps:
        items += more
        raw = json.dumps({**before, name: items, **behind}, separators=separators).encode()
        assert outcome(reader, raw) == outcome(None, raw)
        for at in (i for i in range(len(raw)) if raw[i : i + 1] == b"]"):
            grown = raw[:at] + garbage + raw[at:]
            assert outcome(reader, grown) == outcome(None, grown)
    assert outcome(reader, raw) == outcome(None, raw)


def test_a_body_that_grows_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, messages = Reader(), [{"role": "user", "content": f"{i}"} for i in range(6)]
    reader.load(json.dumps({"messages": messages[:2], "model": "m"}).encode())
    monkeypatch.setattr(reader, "_anew", lambda raw: pytest.fail("the whole body was read"))
    for size in (4, 5):
        body = reader.load(json.dumps({"messages": messages[:size], "model": "m"}).encode())
        assert body == {"messages": messages[:size], "model": "m"}
        assert OpenAIChat().parse(body, {}) == OpenAIChat().parse(dict(body), {})


@given(st.binary(max_size=40) | st.text(alphabet='{}[]":,\\u0dD8fmesag 1e9-.NaInity', max_size=40).map(str.encode))
def test_what_is_no_json_is_refused_in_the_same_words(raw: bytes) -> None:
    reader = Reader()
    for text in (raw, b'{"messages":[' + raw + b"]}", b'{"x":' + raw + b"}", b'{"messages":' + raw + b',"messages":[1]}'):
        assert outcome(reader, text) == outcome(reader, text) == outcome(None, text)


@pytest.mark.parametrize(
    "item",
    ["1" * 30, "NaN", "1e400", '"\\ud800"', '"\\ud83d\\ude00"', '"\\udc00\\ud800"', '{"a":1,"a":2}', "-0", '"\xff"', "[" * 62 + "]" * 62],
)
def test_values_at_the_edge_of_json_keep_their_value(item: str) -> None:
    reader, raw = Reader(), b'{"messages":[' + item.encode("latin-1") + b"]}"
    assert outcome(reader, raw) == outcome(reader, raw) == outcome(None, raw)


def test_what_was_read_before_is_the_same_object_and_made_once() -> None:
    reader, made = Reader(), list[str]()

    def make(value: Any, where: str) -> str:
        made.append(where)
        return str(value)

    first = reader.load(b'{"messages":[{"role":"user"},1],"model":"m"}')
    second = reader.load(b'{"model":"m","messages":[{"role":"user"},1,{"role":"user"}]}')
    assert second["messages"][0] is second["messages"][2] is first["messages"][0]
    for body in (first, second):
        assert [read(body, make, item, "at") for item in body["messages"][:2]] == ["{'role': 'user'}", "1"]
    assert read({"messages": []}, make, "plain", "elsewhere") == "plain"
    assert made == ["at", "at", "elsewhere"]


def test_a_reader_forgets_what_it_cannot_hold() -> None:
    reader = Reader()
    for i in range(8):
        reader.load(json.dumps({"messages": [{"role": "user", "content": f"{i}" * 600_000}]}).encode())
    assert reader.held < 4_000_000


@pytest.mark.parametrize("dialect", [OpenAIChat(), OpenAIResponses(), Anthropic()], ids=["chat", "responses", "messages"])
def test_every_dialect_understands_a_remembered_body_as_a_new_one(dialect: Any) -> None:
    tools = [{"type": "function", "name": "f", "function": {"name": "f"}, "input_schema": {"type": "object"}, "parameters": {}}]
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}]}, {"role": "assistant", "content": "two"}]
    reader, bodies = Reader(), []
    for size in (1, 2, 1):
        bodies.append({"model": "m", "system": "s", "tools": tools, "messages": messages[:size], "input": messages[:size]})
        raw = json.dumps(bodies[-1]).encode()
        assert dialect.parse(reader.load(raw), {}) == dialect.parse(load(raw), {})


def test_a_huge_body_is_read_and_let_go() -> None:
    reader, text = Reader(), "x" * 9_000_000
    body = reader.load(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    assert body["messages"][0]["content"] == text and reader.held == 0
    assert read(body, lambda value, where: value["content"], body["messages"][0], "messages[0]") == text


def test_a_body_of_blanks_is_let_go_too() -> None:
    reader = Reader()
    assert reader.load(b'{"messages":[1' + b" " * 9_000_000 + b"]}") == {"messages": [1]}
    assert len(reader._head) + len(reader._tail) == 0
