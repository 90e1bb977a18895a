"""What a renderer writes around the messages behind a turn, learned from it once for every kind of turn.

A bridge looks at few things of a turn: its generation prompt, and which special tokens were sampled in which order. What it adds depends
on these, on the roles of the new messages and on their texts, which it writes down as they are, or without the white space around them.
So it is asked about texts that are easily found again, and from then on its answer is filled with those of the messages: most of what a
call costs is a renderer's many small steps, none of which is warm when a rollout calls once a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from trainer.capture.message import Message, Role
from trainer.proxy.literal import Shield

MOST_MOULDS = 256
MOST_MARKS = 8
"""Special tokens in a turn, and messages behind it; with more, no two turns are of one kind."""
SPACE = " \t\n\x0b\x0c\r\x1c\x1d\x1e\x1f\x85\xa0\u2003\u3000"
"""Stands around the texts that a renderer is asked about, to see what it does to white space."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """New token ids behind what is already known. `ids[ends[i-1]:ends[i]]` belong to message i; what follows the last end is the
    generation prompt."""

    ids: list[int]
    ends: list[int]


@dataclass(frozen=True, slots=True)
class Drawn:
    """A rendering in which the id -n stands for the n-th of `texts`."""

    rendered: Rendered
    texts: list[str]

    def spelt_out(self, shield: Shield) -> Rendered:
        return spell_out(self.rendered, [shield.encode(text) for text in self.texts])


@dataclass(frozen=True, slots=True)
class Mould:
    """`texts` as in `Drawn`: what stands before a message's text, the message's number (-1 for none), and what stands behind."""

    rendered: Rendered
    texts: list[tuple[str, int, str]]
    strips: bool

    def filled(self, messages: Sequence[Message], shield: Shield) -> Rendered | None:
        """None when a message is empty, which a renderer may leave out."""
        said = [message.content.strip() if self.strips else message.content for message in messages]
        if not all(said):
            return None
        said = [shield.cover(text) for text in (*said, "")]
        return spell_out(self.rendered, [shield.encode(before + said[i] + behind) for before, i, behind in self.texts])


class Moulds:
    """`draw(generation_prompt, sampled, messages)` asks the renderer; None when it cannot prove that the sampled ids stay."""

    def __init__(self, draw: Callable[[list[int], list[int], Sequence[Message]], Drawn | None]) -> None:
        self._draw = draw
        self.get = lru_cache(maxsize=MOST_MOULDS)(self._learn)

    def _learn(self, generation_prompt: tuple[int, ...], marks: tuple[int, ...], roles: tuple[Role, ...]) -> Mould | None:
        """`marks` are the special tokens of the turn, the one that ends it last. None when this kind of turn has to be drawn each time."""
        if max(len(marks), len(roles)) > MOST_MARKS:
            return None
        bare = [f"The text of message number {i}, which no other text is like. " * 2 + "End." for i in range(len(roles))]
        messages = [Message(role, SPACE + text + SPACE) for role, text in zip(roles, bare, strict=True)]
        drawn = self._draw(list(generation_prompt), list(marks), messages)
        if drawn is None:
            return None
        strips = not any(SPACE in text for text in drawn.texts)
        parts = [_parted(text, bare if strips else [SPACE + text + SPACE for text in bare]) for text in drawn.texts]
        once = sorted(i for _, i, _ in parts if i >= 0) == list(range(len(roles)))
        if not once or any(SPACE in before + behind for before, _, behind in parts):
            return None
        return Mould(drawn.rendered, parts, strips)


def _parted(text: str, inner: Sequence[str]) -> tuple[str, int, str]:
    for i, said in enumerate(inner):
        if text.count(said) == 1:
            before, _, behind = text.partition(said)
            return before, i, behind
    return text, -1, ""


def spell_out(rendered: Rendered, texts: Sequence[list[int]]) -> Rendered:
    """With the ids of each text in place of what stood in for it."""
    ids, at = list[int](), [0]
    for token in rendered.ids:
        if token < 0:
            ids += texts[-1 - token]
        else:
            ids.append(token)
        at.append(len(ids))
    return Rendered(ids, [at[end] for end in rendered.ends])
