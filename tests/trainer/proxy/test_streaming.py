"""Random turns in random pieces: what the official clients put together from the events is the answer that is given whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.schemas.runspec import Family
from tests.support.examples import examples
from trainer.capture.graph import Graph, Turn
from trainer.capture.message import Message, ToolCall
from trainer.capture.request import Request
from trainer.engine.base import Generation
from trainer.proxy.blocks import Blocks, Call, Close, Delta, Open
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.rendering import Rendering
from trainer.proxy.streaming import TurnStream
from trainer.vocabulary import CONTROL, MARKUP, VISION, byte_level

TOKENIZER = byte_level(control=VISION)
FAMILIES = [Rendering(TOKENIZER, family=family) for family in get_args(Family)]
RENDERING = FAMILIES[0]
REQUEST = Request((Message("user", "Go."),), [], "m", stream=True)
SCAFFOLDS = ["<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"]

values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=3), lambda v: st.lists(v, max_size=2), max_leaves=4)
calls = st.builds(
    lambda name, value: f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'x': value}})}\n</tool_call>",
    st.sampled_from(["Bash", "Read", "é"]), values,
) | st.builds(
    "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>".format,
    st.sampled_from(["Bash", "é", ""]), st.text(max_size=2), values,
)  # fmt: skip
broken = st.sampled_from(
    ["<tool_call>\n{oops}\n</tool_call>", "<tool_call>", "<tool_call>" + "[" * 3000 + "</tool_call>", '<tool_call>{"name": 5}</tool_call>']
)
words = st.sampled_from(["I look.", " \n", "\n\n", "é", "🙂", "</think", ">", "<think", *MARKUP, *CONTROL[:2]]) | st.text(max_size=3)


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text.encode("utf-8", "ignore").decode(), add_special_tokens=False).ids)


IMITATION = [i for character in "</think>" for i in ids_of(character)]
OPENINGS = [
    [], ids_of("<think>\nHm, é.\n</think>\n\n"), ids_of("<think>"), ids_of("\n<think>Draft: <tool_call>{}</tool_call> no </think>"),
    ids_of("<|im_start|>assistant\n<think>Hm.</think>"), ids_of("<think>") + IMITATION + ids_of(" x</think>"),
]  # fmt: skip
pieces = st.one_of(st.just(IMITATION), words.map(ids_of), calls.map(ids_of), broken.map(ids_of), st.lists(st.integers(0, 255), max_size=3))
turns = st.builds(
    lambda parts, thought, end: [*thought, *(i for part in parts for i in part), *end],
    st.lists(pieces, max_size=8),
    st.sampled_from(OPENINGS),
    st.sampled_from([[], [TOKENIZER.token_to_id("<|im_end|>")]]),
).filter(bool)


def turn_of(sampled: list[int], scaffold: list[int], rendering: Rendering = RENDERING) -> Turn:
    """As the session makes it."""
    parsed = rendering.parse(scaffold, sampled, [])
    calls = tuple(ToolCall(f"toolu_{i}", call.name, call.arguments) for i, call in enumerate(parsed.calls))
    graph, start = Graph(), ids_of("prompt")
    place = graph.place(REQUEST, start + scaffold, [len(start)], None)
    generation = Generation(sampled, [-1.0] * len(sampled), None, "stop", 0)
    message = Message("assistant", parsed.text, calls, reasoning=parsed.reasoning)
    return graph.add_turn(place, message, generation, REQUEST, malformed=parsed.malformed)


def cut(data: st.DataObject, sampled: list[int]) -> list[list[int]]:
    chunks, rest = [], sampled
    while rest:
        size = data.draw(st.integers(1, len(rest)), label="chunk")
        chunks.append(rest[:size])
        rest = rest[size:]
    return chunks


def client(kind: Any, body: str, media_type: str) -> Any:
    """An official client whose every request is answered with `body`, which arrives in pieces that mean nothing."""
    raw = body.encode()

    def pieces() -> Iterator[bytes]:
        yield from (raw[i : i + 97] for i in range(0, len(raw), 97))

    def answer(_: Any) -> Any:
        return httpx2.Response(200, headers={"content-type": media_type}, content=pieces())

    transport = httpx2.MockTransport(answer)
    return kind(api_key="k", base_url="http://proxy/v1", http_client=httpx2.Client(transport=transport, verify=False), max_retries=0)


def messages(body: str, *, stream: bool) -> Any:
    speaker = client(anthropic.Anthropic, body, "text/event-stream" if stream else "application/json")
    fields: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    if not stream:
        return speaker.messages.create(**fields)
    with speaker.messages.stream(**fields) as events:
        return events.get_final_message()


def chat(body: str, *, stream: bool) -> Any:
    speaker = client(openai.OpenAI, body, "text/event-stream" if stream else "application/json")
    fields: Any = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    if not stream:
        return speaker.chat.completions.create(**fields)
    with speaker.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
        return events.get_final_completion()


def responses(body: str, *, stream: bool) -> Any:
    speaker = client(openai.OpenAI, body, "text/event-stream" if stream else "application/json")
    if not stream:
        return speaker.responses.create(model="m", input="x")
    with speaker.responses.stream(model="m", input="x") as events:
        return events.get_final_response()


def said(answer: Any) -> Any:
    """The turn in one form for all three clients; empty blocks say nothing."""
    if isinstance(answer, anthropic.types.Message):
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        blocks = [b for b in blocks if b.get("text") != "" and b.get("thinking") != ""]
        return blocks, answer.stop_reason, answer.usage.input_tokens, answer.usage.output_tokens
    if hasattr(answer, "choices"):
        (choice,) = answer.choices
        tools = [(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls or []]
        thought = getattr(choice.message, "reasoning_content", None) or ""
        return choice.message.content or "", thought, tools, choice.finish_reason, answer.usage
    drop = {"parsed_arguments": True, "content": {"__all__": {"parsed"}}}
    return [item.model_dump(exclude_none=True, exclude=drop) for item in answer.output], answer.status, answer.usage


DIALECTS: list[tuple[Dialect, Any]] = [(Anthropic(), messages), (OpenAIChat(), chat), (OpenAIResponses(), responses)]


@pytest.mark.parametrize(("dialect", "read"), DIALECTS)
@given(sampled=turns, prompt=st.sampled_from(SCAFFOLDS), rendering=st.sampled_from(FAMILIES), data=st.data())
@examples(30)
def test_stream_and_whole_answer_are_the_same_turn(
    dialect: Dialect, read: Any, sampled: list[int], prompt: str, rendering: Rendering, data: Any
) -> None:
    """Pain 21, 27, 32, 33, 34: blocks that open and close in order, true usage, no call lost or cut, and the right reason to stop."""
    scaffold = ids_of(prompt)
    turn = turn_of(sampled, scaffold, rendering)
    stream = TurnStream(rendering, scaffold, dialect.writer(REQUEST, turn.prompt_tokens, "1"))
    sse = stream.start()
    for chunk in cut(data, sampled):
        sse += stream.keep_alive() if data.draw(st.booleans(), label="slow") else ""
        sse += stream.feed(chunk)
    sse += stream.finish(turn)
    streamed, whole = read(sse, stream=True), read(json.dumps(dialect.encode(turn, REQUEST, "1")), stream=False)
    assert said(streamed) == said(whole)


@given(sampled=turns, prompt=st.sampled_from(SCAFFOLDS), rendering=st.sampled_from(FAMILIES), data=st.data())
@examples(150)
def test_blocks_are_well_formed_and_never_taken_back(sampled: list[int], prompt: str, rendering: Rendering, data: Any) -> None:
    """Pain 21: at most one block is open, and every delta lies inside it. What is shown early is a prefix of what the turn says."""
    scaffold = ids_of(prompt)
    turn = turn_of(sampled, scaffold, rendering)
    blocks = Blocks(rendering, scaffold)
    early = [event for chunk in cut(data, sampled) for event in blocks.feed(chunk)]
    events = early + blocks.finish(turn.message)
    kind, texts = None, {"thinking": "", "text": ""}
    for event in events:
        match event:
            case Open(opened):
                assert kind is None and not texts[opened]
                kind = opened
            case Delta(text):
                assert kind is not None and text
                texts[kind] += text
            case Close():
                assert kind is not None
                kind = None
            case Call():
                assert kind is None
    assert kind is None
    assert (texts["thinking"] or None, texts["text"]) == (turn.message.reasoning, turn.message.content)
    assert [event.call for event in events if isinstance(event, Call)] == list(turn.message.tool_calls)


def test_text_is_shown_while_it_is_sampled() -> None:
    blocks = Blocks(RENDERING, ids_of(SCAFFOLDS[1]))
    shown = [
        blocks.feed(ids_of(text)) for text in ("<think>", "\nHm", " ", "yes.\n", "</think>", "\n\n", "I ", "look.", "<tool_call>", "{")
    ]
    assert shown == [
        [], [Open("thinking"), Delta("Hm")], [], [Delta(" yes.")], [], [], [Close(), Open("text"), Delta("I")], [Delta(" look.")], [], [],
    ]  # fmt: skip


def test_half_a_character_waits_for_the_other_half() -> None:
    blocks = Blocks(RENDERING, ids_of(SCAFFOLDS[0]))
    first, *rest = ids_of("🙂")
    assert [blocks.feed([first]), blocks.feed(rest[:2]), blocks.feed(rest[2:])] == [[], [], [Open("text"), Delta("🙂")]]


def test_bytes_that_are_no_text_cost_linear_time() -> None:
    decoded = []
    rendering = Rendering(TOKENIZER)
    decode = rendering.decode
    rendering.decode = lambda ids: (decoded.append(len(ids)), decode(ids))[1]  # type: ignore[method-assign]
    blocks = Blocks(rendering, ids_of(SCAFFOLDS[0]))
    (lead,) = TOKENIZER.encode("é").ids[:1]
    for _ in range(4000):
        blocks.feed([lead])
    assert sum(decoded) < 40 * 4000


def test_where_pieces_would_decode_differently_everything_waits_for_the_end() -> None:
    rendering = Rendering(TOKENIZER)
    rendering.marks = None
    blocks = Blocks(rendering, ids_of(SCAFFOLDS[0]))
    assert blocks.feed(ids_of("One.")) == []
    assert blocks.finish(Message("assistant", "One.", reasoning="Hm.")) == [
        Open("thinking"), Delta("Hm."), Close(), Open("text"), Delta("One."), Close(),
    ]  # fmt: skip


def test_turn_that_contradicts_what_was_shown_is_refused() -> None:
    blocks = Blocks(RENDERING, ids_of(SCAFFOLDS[0]))
    blocks.feed(ids_of("One."))
    with pytest.raises(RuntimeError, match="not what the turn says"):
        blocks.finish(Message("assistant", "Two."))


@pytest.mark.parametrize(
    ("dialect", "expected"),
    [
        (Anthropic(), ["content_block_start", "content_block_delta", "content_block_delta"]),
        (OpenAIChat(), ["", ""]),
        (OpenAIResponses(), ["response.in_progress", "response.in_progress"]),
    ],
)
def test_signs_of_life_before_the_first_token(dialect: Dialect, expected: list[str]) -> None:
    """Claude Code lives on empty deltas of an open block and gives up on pings; Codex takes any event."""
    stream = TurnStream(RENDERING, ids_of(SCAFFOLDS[0]), dialect.writer(REQUEST, 5, "1"))
    stream.start()
    text = stream.keep_alive() + stream.keep_alive()
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    assert [json.loads(line[6:]).get("type", "") for line in lines] == expected
    assert "ping" not in text
