"""Whatever tokens a policy samples and whatever its harness then does to them: an answer on the wire, and no failure of the proxy's."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any, get_args

from hypothesis import Phase, example, given
from hypothesis import strategies as st

from server.schemas.runspec import Family, History, TrainRule
from tests.support.examples import examples
from tests.trainer.equal import assert_same_capture
from trainer.capture.capture import Capture
from trainer.capture.file import from_bytes
from trainer.engine.base import Generation, GenerationRequest, Sampling
from trainer.proxy.dialects import Dialect
from trainer.proxy.dialects.anthropic import Anthropic
from trainer.proxy.dialects.fields import load
from trainer.proxy.dialects.openai_chat import OpenAIChat
from trainer.proxy.dialects.openai_responses import OpenAIResponses
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.proxy.streaming import TurnStream
from trainer.vocabulary import CONTROL, MARKUP, VISION, byte_level

TOKENIZER = byte_level(control=VISION)
RENDERINGS = [
    Rendering(TOKENIZER, family=family, thinking=thinking, history=history)
    for family in get_args(Family)
    for thinking in (False, True)
    for history in History
]
DIALECTS: list[Dialect] = [Anthropic(), OpenAIChat(), OpenAIResponses()]
CALL = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
XML = "<tool_call>\n<function={}>\n{}\n</function>\n</tool_call>"
PIECES = [
    *CONTROL, *MARKUP, "a", " ", "\n\n", "é", '"', "\\", "\x00", "\u2028", "\ufdd0\ufdd1", "</", "<|im_", "assistant\n",
    CALL.format('"bash"', "{}"), CALL.format('"bash"', '{"input": "x\\u0000\\ud83d"}'), CALL.format('"bash"', '"{}"'),
    XML.format("bash", "<parameter=input>\nx\n</parameter>"), XML.format("bash", "<parameter=input>\n\x00\n"), XML.format("", ""),
    CALL.format('""', "null"), CALL.format("[]", "{}"), CALL.format('"bash"', "1e999"), CALL.format('"bash"', "[" * 60 + "]" * 60),
]  # fmt: skip
SAMPLED = st.lists(
    st.sampled_from(PIECES).map(lambda text: TOKENIZER.encode(text, add_special_tokens=False).ids)
    | st.integers(0, TOKENIZER.get_vocab_size() - 1).map(lambda token: [token]),
    min_size=1,
    max_size=8,
).map(lambda parts: [token for part in parts for token in part])


class Says:
    """An engine that says what it was given."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns = turns

    async def generate(self, request: GenerationRequest) -> Generation:
        ids = self.turns.pop(0)[: request.sampling.max_tokens]
        return Generation(ids, [-0.5] * len(ids), None, "length" if len(ids) % 7 == 0 else "stop", 0)


def tool(dialect: Dialect) -> dict[str, Any]:
    named = {"name": "bash", "description": "Run."}
    if isinstance(dialect, OpenAIChat):
        return {"type": "function", "function": named | {"parameters": {}}}
    return named | ({"input_schema": {"type": "object"}} if isinstance(dialect, Anthropic) else {"type": "custom"})


def echo(dialect: Dialect, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """What a harness adds to its history: the answer, and a result for each call or else a word."""
    word = [{"role": "user", "content": "next"}]
    if isinstance(dialect, Anthropic):
        results = [{"type": "tool_result", "tool_use_id": b["id"], "content": "ok"} for b in answer["content"] if b["type"] == "tool_use"]
        return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results} if results else word[0]]
    if isinstance(dialect, OpenAIChat):
        message = answer["choices"][0]["message"]
        return [message, *([{"role": "tool", "tool_call_id": c["id"], "content": "ok"} for c in message.get("tool_calls", [])] or word)]
    items = answer["output"]
    outputs = [{"type": i["type"] + "_output", "call_id": i["call_id"], "output": "ok"} for i in items if "call_id" in i]
    return [*items, *(outputs or word)]


@examples(150, phases=(Phase.explicit, Phase.generate))
@example(turns=[[110, 0], [110, 0], [110], [110, 0]], dialect=DIALECTS[0], rendering=RENDERINGS[0], seed=953)  # the same body again
@given(
    turns=st.lists(SAMPLED, min_size=1, max_size=6),
    dialect=st.sampled_from(DIALECTS),
    rendering=st.sampled_from(RENDERINGS),
    seed=st.integers(0, 2**16),
)
def test_any_tokens_are_an_answer(turns: list[list[int]], dialect: Dialect, rendering: Rendering, seed: int) -> None:
    rng = random.Random(seed)

    async def play() -> Capture:
        sampling = Sampling(1.0, 600, rendering.stop_token_ids)
        session = Session("r-1", "key", Says(list(turns)), rendering, sampling, Limits(max_turns=50, context=60_000), "test")
        history: list[dict[str, Any]] = []
        for _ in turns:
            said = [{"role": "user", "content": rng.choice(["go", "go", "edited"])}, *history]
            body = {"model": "m", "input" if isinstance(dialect, OpenAIResponses) else "messages": said, "tools": [tool(dialect)]}
            request = dialect.parse(load(json.dumps(body).encode()), {})
            flight = session.board(request)
            try:
                turn = await flight.landing
            finally:
                session.leave(flight)
            await asyncio.sleep(0)  # no answer reaches a client, and no request comes back, within one turn of the loop
            answer = dialect.encode(turn, request, session.next_answer_id())
            json.dumps(answer, allow_nan=False).encode()
            stream, ids = TurnStream(rendering, flight.scaffold, dialect.writer(request, flight.prompt_tokens, "a")), turn.sampled.tolist()
            events = [stream.start(), *(stream.feed(ids[at : at + 3]) for at in range(0, len(ids), 3)), stream.finish(turn)]
            "".join(events).encode()
            turn.sent = True
            history += echo(dialect, answer)
            if rng.random() < 0.2:
                del history[rng.randrange(len(history))]
            if rng.random() < 0.1:
                history = history[-2:]
        return await session.close()

    capture = asyncio.run(play())
    assert [turn.sampled.tolist() for turn in capture.graph.turns] == turns
    for rule in TrainRule:
        assert sum(int(sample.mask.sum()) for sample in capture.samples(rule)) == capture.sampled_tokens
        capture.record("t-1", rule).model_dump_json()
    assert_same_capture(capture, from_bytes(capture.to_bytes("t-1"))[0])
