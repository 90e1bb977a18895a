"""Recorded turns as sampled token ids in Qwen3's format, with the argument text exactly as it was recorded."""

from __future__ import annotations

import json

from trainer.replay.plan import Step
from trainer.replay.recording import Block
from trainer.replay.tokenizer import Spelling


def sampled(step: Step, spelling: Spelling) -> list[int]:
    """The ids that the engine returns: blocks in order, then the stop token unless the turn ended by length."""
    ids: list[int] = []
    before = ""
    for n, block in enumerate(step.blocks):
        if before and block.kind != "thinking":
            ids += spelling.ids("\n" if before != "thinking" else "\n\n")
        ids += _block(block, spelling, closed=not (step.by_length and n == len(step.blocks) - 1))
        before = block.kind
    return ids if step.by_length else [*ids, spelling.special["<|im_end|>"]]


def usable(block: Block) -> bool:
    """A call that can be handed to a harness: the argument text is JSON."""
    try:
        json.loads(block.text)
    except (ValueError, RecursionError):
        return False
    return bool(block.name)


def _block(block: Block, spelling: Spelling, *, closed: bool) -> list[int]:
    special = spelling.special
    if block.kind == "thinking":
        return [special["<think>"], *spelling.ids(f"\n{block.text}\n"), special["</think>"]]
    if block.kind == "text":
        return spelling.ids(block.text)
    text = '\n{"name": %s, "arguments": %s' % (json.dumps(block.name), block.text)  # noqa: UP031  (braces of JSON)
    if not closed and not usable(block):
        return [special["<tool_call>"], *spelling.ids(text)]
    return [special["<tool_call>"], *spelling.ids(text + "}\n"), special["</tool_call>"]]
