"""Messages to token ids and sampled ids to messages, through `renderers`: no pattern is matched against rendered text, and sampled
text is never tokenised again.

A turn is continued by `bridge`, which takes only what the last turn added (its generation prompt and its sampled ids), so its cost does
not grow with the conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from renderers import Qwen3RendererConfig, Qwen35RendererConfig, create_renderer
from renderers.base import RenderedTokens, ToolCallParseStatus
from renderers.reasoning import prompt_ends_in_reasoning, scan_reasoning
from tokenizers import Tokenizer, decoders

from server.schemas.runspec import Family, History
from trainer.capture.message import Message
from trainer.capture.values import deeper, encodable
from trainer.engine.base import TokenIds
from trainer.proxy.literal import Shield
from trainer.proxy.moulds import MOST_MARKS, Drawn, Mould, Moulds, Rendered
from trainer.proxy.spelling import Spelling

Tools = list[dict[str, Any]]
CONFIGS: dict[Family, Any] = {"qwen3": Qwen3RendererConfig, "qwen3.5": Qwen35RendererConfig}
CHARACTERS_PER_TOKEN = 8
"""More than any ordinary text has; what has more is counted before it is rendered."""
QUICK = 262_144
"""Characters that are rendered in a fraction of a second, whatever their tokens: a vocabulary may hold a whole prompt as one token, and
does not show that when its parts are counted one by one."""
PIECE = 16_384
"""Characters that are counted at once."""
MAX_ARGUMENTS_DEPTH = 48
"""Leaves room for the body around them, whose depth is bounded too (`dialects.fields`)."""
MAX_REMEMBERED = 400_000
"""Characters of a system prompt with its tools; a longer one is rendered every time."""
STAND_IN = Message("system", "")
BEGINNING = 16
"""Tokens; more than the header of a turn has."""
SHORT = 64
"""Characters. The template's own words are shorter."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One tool call that can be handed to a harness: a name and strict JSON arguments (usually an object)."""

    name: str
    arguments: Any


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a sampled turn says. Blocks that are no call (`malformed` of them) stay visible at the end of `text`."""

    text: str
    reasoning: str | None
    calls: tuple[ParsedCall, ...]
    malformed: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Ids of the tokens that part a sampled turn, for those who read it while it is being sampled."""

    turn: int
    think: int
    end_think: int
    call: int
    end_call: int


class Rendering:
    """One model family's chat format over one tokenizer. Stateless, so all rollouts share it."""

    def __init__(self, tokenizer: Tokenizer, *, family: Family = "qwen3", thinking: bool = False, history: History = History.KEEP) -> None:
        """`history` says whether a turn's reasoning stays in front of a later user message (`bridge`) or the whole is rendered anew."""
        self._spelling, self.history = Spelling(tokenizer), history
        retention: Literal["all"] | None = "all" if history is History.KEEP else None  # None: as the chat template has it
        config = CONFIGS[family](enable_thinking=thinking, thinking_retention=retention)
        self._shield = Shield(tokenizer)
        self._adapter = _Adapter(tokenizer, self._shield)
        self._renderer: Any = create_renderer(self._adapter, config)
        self._remembered_head = lru_cache(maxsize=32)(self._head)
        self._opens_reasoning = lru_cache(maxsize=32)(self._ends_in_reasoning)
        self._calls_in_json = family == "qwen3"
        self._moulds = Moulds(lambda prompt, sampled, messages: self._draw(prompt, sampled, messages, []))
        self.stop_token_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._stops = frozenset(self.stop_token_ids)
        self.thinking = thinking
        self.marks = _marks(tokenizer)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())

    @classmethod
    def load(cls, model_dir: Path | str, *, family: Family = "qwen3", thinking: bool = False, history: History = History.KEEP) -> Rendering:
        """From `tokenizer.json` of a transformers checkpoint.

        Raises FileNotFoundError without the file, AssertionError (from `renderers`) when a special token of the family is missing.
        """
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the policy's directory must hold a fast tokenizer")
        return cls(Tokenizer.from_file(str(path)), family=family, thinking=thinking, history=history)

    def render(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        """A whole conversation with the generation prompt. Raises ValueError when there is no message.

        The rollouts of a harness share system prompt and tools, most of a first prompt: their ids are remembered. The family's template
        writes them in front, and nothing that follows depends on them.
        """
        if len(messages) < 2 or messages[0].role != "system":
            return self._render(messages, tools)
        system, functions = messages[0].content, json.dumps(tools)
        head = (self._remembered_head if len(system) + len(functions) < MAX_REMEMBERED else self._head)(system, functions)
        rest = self._render((STAND_IN, *messages[1:]), [])
        cut = rest.ends[0]
        return Rendered(head.tolist() + rest.ids[cut:], [len(head), *(end - cut + len(head) for end in rest.ends[1:])])

    def overlong(self, messages: Sequence[Message], tools: str, limit: int) -> int:
        """Tokens of a conversation that is surely longer than `limit`, estimated from as much of it as shows that; 0 when it may fit.

        To render 30 MB would hold up every other rollout for half a minute. `tools` is JSON.
        """
        size = sum(message.size for message in messages) + len(tools)
        if size <= max(QUICK, CHARACTERS_PER_TOKEN * limit):
            return 0
        count = read = pieces = 0
        for text in (text for texts in ([tools], *(message.texts() for message in messages)) for text in texts):
            for at in range(0, len(text), PIECE):
                piece = text[at : at + PIECE]
                count, read, pieces = count + len(self._shield.encode(piece)), read + len(piece), pieces + 1
                if count > limit + 2 * pieces:  # where it was cut, a token more may have come out
                    return count * size // read
        return 0

    def _head(self, system: str, tools: str) -> np.ndarray:
        """int32 [n]: ids of the system message, with the tools (JSON) that the template writes into it."""
        rendered = self._render((Message("system", system), Message("user", "")), json.loads(tools))
        return np.array(rendered.ids[: rendered.ends[0]], np.int32)

    def _render(self, messages: Sequence[Message], tools: Tools) -> Rendered:
        said, functions = self._shield.cover([self._wire(message) for message in messages]), self._shield.cover(tools)
        with self._adapter.standing_in() as texts:
            rendered = self._renderer.render(said, tools=functions or None, add_generation_prompt=True)
        return Drawn(_split(rendered, 0, len(messages)), texts).spelt_out(self._shield)

    def _wire(self, message: Message) -> dict[str, Any]:
        """Arguments that are still text are no object, of which a template that writes them one by one writes none; its renderer would
        read them again, with escapes that spell special tokens and with nesting and numbers that no parser takes."""
        wire = message.wire()
        for call in () if self._calls_in_json else wire.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = {}
        return wire

    def bridge(self, generation_prompt: list[int], sampled: list[int], messages: Sequence[Message], tools: Tools) -> Rendered | None:
        """What `messages` add behind a sampled turn; None when the renderer cannot prove that the turn's ids stay as they are."""
        mould = self._mould(generation_prompt, sampled, messages)
        filled = mould.filled(messages, self._shield) if mould is not None else None
        if filled is not None:
            return filled
        drawn = self._draw(generation_prompt, sampled, messages, tools)
        return drawn.spelt_out(self._shield) if drawn is not None else None

    def _mould(self, generation_prompt: list[int], sampled: list[int], messages: Sequence[Message]) -> Mould | None:
        """For a turn that ends at its only end and opens its reasoning, if at all, with its first token."""
        marks = tuple([token for token in sampled if token in self._added])
        if self.marks is None or not marks or len(messages) > MOST_MARKS:
            return None
        whole = sampled[-1] in self._stops and self._stops.isdisjoint(marks[:-1])
        reasons = self.marks.think in marks and (sampled[0] != self.marks.think or marks.count(self.marks.think) > 1)
        if not whole or reasons or self.marks.turn in marks or not self._bridges_by_role(messages):
            return None
        return self._moulds.get(tuple(generation_prompt), marks, tuple([message.role for message in messages]))

    def _bridges_by_role(self, messages: Sequence[Message]) -> bool:
        """Without a policy that depends on what a user says: whether a message is a question is seen in its text."""
        return self.history is History.KEEP or all(message.role == "tool" for message in messages)

    def _draw(self, generation_prompt: list[int], sampled: list[int], messages: Sequence[Message], tools: Tools) -> Drawn | None:
        brief = self._brief(sampled)
        known = generation_prompt + brief
        said = self._shield.cover([message.wire() for message in messages])
        with self._adapter.standing_in() as texts:
            rendered = self._renderer.bridge_to_next_turn(generation_prompt, brief, said, tools=tools or None)
        if rendered is None or rendered.token_ids[: len(known)] != known:
            return None
        return Drawn(_split(rendered, len(known), len(messages)), texts)

    def _brief(self, sampled: list[int]) -> list[int]:
        """Without the ordinary tokens that cannot matter to a bridge: it asks whether the turn begins with a header or its reasoning,
        where marks are, and whether its last token ends it. Tokens behind an end all count: they could be the template's own."""
        first, rest, last = sampled[:BEGINNING], sampled[BEGINNING:-1], sampled[max(BEGINNING, len(sampled) - 1) :]
        if self.marks is None or self.marks.think in rest or not self._stops.isdisjoint(sampled[:-1]):
            return sampled
        return first + [token for token in rest if token in self._added] + last

    def splice(self, bridged: Rendered, messages: Sequence[Message], tools: Tools, position: int) -> Rendered:
        """Behind a sampled turn, messages among which are assistant messages that were not sampled there: `bridged` holds those up to
        the first of them, `messages[position:]`, and the rest comes from a render of the whole conversation."""
        rendered, at = self.render(messages, tools), position + len(bridged.ends)
        kept, known = bridged.ends[-1], rendered.ends[at - 1]
        ends = [*bridged.ends, *(end - known + kept for end in rendered.ends[at:])]
        return Rendered(bridged.ids[:kept] + rendered.ids[known:], ends)

    def parse(self, generation_prompt: list[int], sampled: list[int], tools: Tools) -> Parsed:
        return self._plain(generation_prompt, sampled) or self._parse(generation_prompt, sampled, tools)

    def _plain(self, generation_prompt: list[int], sampled: list[int]) -> Parsed | None:
        """The usual turn, a text and at most one JSON call, without the renderer's search for what is not in it; None for any other."""
        marks = [token for token in sampled if token in self._added]
        ended = bool(marks) and marks[-1] == sampled[-1] and marks[-1] in self._stops
        if self.marks is None or not ended or self._opens_reasoning(tuple(generation_prompt)):
            return None
        call, end = self.marks.call, self.marks.end_call
        if len(marks) == 1:
            return Parsed(self.decode(sampled[:-1]).strip(), None, (), 0)
        if not self._calls_in_json or marks[:-1] != [call, end]:
            return None
        start = sampled.index(call)
        said, body = sampled[:start], sampled[start + 1 : sampled.index(end, start)]
        try:
            value = json.loads(self.decode(body).strip())
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not value.get("name") or not _usable(value["name"], arguments := value.get("arguments", {})):
            return None
        return Parsed(self.decode(said).strip(), None, (ParsedCall(value["name"], encodable(arguments)),), 0)

    def _parse(self, generation_prompt: list[int], sampled: list[int], tools: Tools) -> Parsed:
        broken: list[str] = []
        try:
            parsed = self._renderer.parse_response(sampled, tools=tools or None, prompt_ids=generation_prompt)
        except (ValueError, RecursionError):  # a number of thousands of digits, or nesting deeper than the stack: no JSON for anybody
            start = self._calls_start(generation_prompt, sampled)
            parsed = self._renderer.parse_response(sampled[:start], prompt_ids=generation_prompt)
            broken.append(self.decode(sampled[start:]))
        calls = []
        for call in parsed.tool_calls:
            if call.status == ToolCallParseStatus.OK and _usable(call.name, call.arguments):
                calls.append(ParsedCall(call.name, encodable(call.arguments)))
            else:
                broken.append(self.decode(sampled[slice(*call.token_span)]) if call.token_span else call.raw)
        text = "\n".join(part for part in (parsed.content, *broken) if part)
        return Parsed(text, (parsed.reasoning_content or "").strip() or None, tuple(calls), len(broken))

    def opens_reasoning(self, generation_prompt: TokenIds) -> bool:
        """Whether a turn behind this prompt begins inside its reasoning."""
        return self._opens_reasoning(tuple([int(i) for i in generation_prompt]))

    def _ends_in_reasoning(self, prompt: tuple[int, ...]) -> bool:
        return bool(prompt_ends_in_reasoning(self._adapter, list(prompt), stop_ids=set(self.stop_token_ids)))

    def _calls_start(self, generation_prompt: list[int], sampled: list[int]) -> int:
        """Where the first tool call of a turn begins; a closed reasoning may hold drafts that are none."""
        if self.marks is None:
            return 0
        stops = set(self.stop_token_ids)
        reasoning = scan_reasoning(
            self._adapter, sampled, prompt_ids=generation_prompt, stop_ids=stops,
            tool_start_id=self.marks.call, tool_start_closes_reasoning=True,
        )  # fmt: skip
        closed = reasoning.text is not None and not reasoning.closed_by_tool
        return sampled.index(self.marks.call, sampled.index(self.marks.end_think) if closed else 0)

    def decode(self, ids: Sequence[int]) -> str:
        return self._spelling.decode(ids)


def _marks(tokenizer: Tokenizer) -> Marks | None:
    """None when text cannot be shown piece by piece: a mark is missing, or pieces decode differently from the whole."""
    ids = [tokenizer.token_to_id(mark) for mark in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>")]
    if None in ids or not isinstance(tokenizer.decoder, decoders.ByteLevel):
        return None
    return Marks(*ids)


def _usable(name: Any, arguments: Any) -> bool:
    """The parser's `ok` means JSON with a name; a name that is no text or a NaN would break the client's own parser, and what is nested
    too deep could not come back."""
    if not isinstance(name, str) or deeper(arguments, MAX_ARGUMENTS_DEPTH):
        return False
    try:
        name.encode()
        json.dumps(arguments, allow_nan=False)
    except ValueError:
        return False
    return True


def _split(rendered: RenderedTokens, known: int, count: int) -> Rendered:
    """Cut the new ids at message ends. Scaffold between messages (index -1) goes to the message that follows it."""
    ends, last = [0] * count, 0
    for position, index in enumerate(rendered.message_indices[known:], start=1):
        if index >= 0:
            ends[index] = position
    for i, end in enumerate(ends):
        ends[i] = last = max(last, end)
    return Rendered(rendered.token_ids[known:], ends)


class _Adapter:
    """The tokenizer surface that `renderers` asks for, without the import of transformers."""

    def __init__(self, tokenizer: Tokenizer, shield: Shield) -> None:
        self._tokenizer, self._shield = tokenizer, shield
        self.name_or_path = "local"
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = tokenizer.token_to_id("<|im_end|>")
        self._short = lru_cache(maxsize=512)(lambda text: tuple(shield.encode(text)))
        self._texts: list[str] | None = None

    @contextmanager
    def standing_in(self) -> Iterator[list[str]]:
        """In here, one number below zero stands for a whole text, the n-th text as -n: `renderers` keeps four lists of all tokens, and
        only ever compares those of the template."""
        self._texts = texts = list[str]()
        try:
            yield texts
        finally:
            self._texts = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The template's own words are encoded a dozen times for each turn, and are short."""
        if len(text) < SHORT:
            return list(self._short(text))
        if self._texts is None:
            return self._shield.encode(text)
        self._texts.append(text)
        return [-len(self._texts)]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id
