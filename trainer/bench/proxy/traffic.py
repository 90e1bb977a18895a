"""The traffic of a coding agent, from fixed seeds: 25 tools and a system prompt that all rollouts share, a task for each, and turns that
grow the conversation by an answer and what a tool printed.

A conversation of `TURNS` turns sends bodies of 50 to 82 KB, 66 KB in the mean, which are 15k to 25k tokens.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.vocabulary import add_specials

TURNS = 20
VOCABULARY = 4_096
TOOLS, SYSTEM, TASK, OBSERVATION, ANSWER = 25, 7_000, 3_000, 900, 480
"""Number of tools; characters of system prompt, task, tool output and spoken answer."""
ANSWERS = 32
KEY = "bench"

Dialect = Literal["openai", "anthropic"]


class Traffic:
    """Makes text that costs about 3.3 bytes a token, which is what code costs a large vocabulary."""

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)  # noqa: S311  (not a secret)
        syllables = [a + b for a in "bcdfghklmnprstvw" for b in "aeiou"]
        self._words = ["".join(draw.choices(syllables, k=draw.choice((1, 2, 2, 2, 3)))) for _ in range(4_000)]
        self.system = self.text(SYSTEM, "system")
        self.tools = [(f"Tool{i}", self.text(1_100, f"tool {i}"), self._schema(i)) for i in range(TOOLS)]

    def text(self, size: int, name: str) -> str:
        """`size` characters in lines; the same name always gives the same text."""
        draw, lines, length = random.Random(name), list[str](), 0  # noqa: S311
        while length < size:
            lines.append("  " * draw.randrange(3) + " ".join(draw.choices(self._words, k=12)) + draw.choice(";:,."))
            length += len(lines[-1]) + 1
        return "\n".join(lines)[:size]

    def answers(self) -> list[str]:
        """Sampled turns: a few lines and one tool call, some 180 tokens."""
        calls = [{"name": f"Tool{i % TOOLS}", "arguments": {"command": self.text(90, f"command {i}")}} for i in range(ANSWERS)]
        return [
            f"{self.text(ANSWER, f'answer {i}')}\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>" for i, call in enumerate(calls)
        ]

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE over these words with Qwen3's special tokens."""
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator([self.text(200_000, "corpus")], trainer)
        add_specials(tokenizer)
        return tokenizer

    def _schema(self, i: int) -> dict[str, Any]:
        fields = {name: {"type": "string", "description": self.text(80, f"field {i} {name}")} for name in ("command", "path", "reason")}
        return {"type": "object", "properties": fields, "required": ["command"], "additionalProperties": False}


@cache
def tokenizer_for(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


class Conversation:
    """What one harness keeps: the parts of its next body, serialised once, so that a large body costs the load generator little."""

    def __init__(self, traffic: Traffic, dialect: Dialect, name: str, task: int = TASK, observation: int = OBSERVATION) -> None:
        self._traffic, self._dialect, self.name, self._observation = traffic, dialect, name, observation
        self.turns, self.tokens = 0, 0
        """Answers taken, and the tokens of the newest prompt with its answer."""
        self._messages: list[bytes] = []
        if dialect == "openai":
            tools = [
                {"type": "function", "function": {"name": name, "description": text, "parameters": schema}}
                for name, text, schema in traffic.tools
            ]
            self._add({"role": "system", "content": traffic.system})
            head: dict[str, Any] = {"model": "policy", "max_tokens": 4_096, "tools": tools}
        else:
            tools = [{"name": name, "description": text, "input_schema": schema} for name, text, schema in traffic.tools]
            system = [{"type": "text", "text": traffic.system, "cache_control": {"type": "ephemeral"}}]
            head = {"model": "policy", "max_tokens": 4_096, "stream": True, "system": system, "tools": tools}
        self._head = _dump(head)[:-1] + b',"messages":['
        self._add({"role": "user", "content": traffic.text(task, f"task {name}")})

    def body(self) -> bytes:
        return self._head + b",".join(self._messages) + b"]}"

    def take(self, answer: bytes) -> None:
        """Append the answer and what its tool printed. Raises ValueError for an answer without a tool call."""
        observation = self._traffic.text(self._observation, f"{self.name} {self.turns}")
        self.turns += 1
        if self._dialect == "openai":
            body = json.loads(answer)
            message, self.tokens = body["choices"][0]["message"], body["usage"]["total_tokens"]
            self._add(message)
            self._add({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": observation})
        else:
            blocks, self.tokens = _blocks(answer)
            self._add({"role": "assistant", "content": blocks})
            call = next(block["id"] for block in blocks if block["type"] == "tool_use")
            self._add({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": observation}]})

    def _add(self, message: dict[str, Any]) -> None:
        self._messages.append(_dump(message))


def _blocks(answer: bytes) -> tuple[list[dict[str, Any]], int]:
    """The content blocks of an Anthropic event stream, and the tokens that its usage adds up to."""
    blocks, usage = list[dict[str, Any]](), dict[str, int]()
    for line in answer.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        usage.update(event.get("message", {}).get("usage", {}), **event.get("usage", {}))
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "input": ""} if "input" in event["content_block"] else event["content_block"])
        elif event["type"] == "content_block_delta":
            field, text = next((key, value) for key, value in event["delta"].items() if key != "type")
            field = "input" if field == "partial_json" else field
            blocks[event["index"]][field] += text
    tokens = usage["input_tokens"] + usage["output_tokens"]
    return [{**block, "input": json.loads(block["input"])} if "input" in block else block for block in blocks], tokens


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
