"""Demonstrations: onebug tasks worked through in a harness's own messages, in a seeded mix of good and bad ways of working.

The mix is deliberate: the policy can solve the tasks but often does not, and that gap is what RL removes. A demo that starts from it shows
that the loop works, not that a model learned to program.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.capture.message import Message
from trainer.proxy.rendering import Rendering, Tools

from .conversations import Harness

MIX = {"good": 0.40, "wrong_value": 0.22, "wrong_function": 0.14, "reads_only": 0.13, "submits_at_once": 0.11}
"""Way of working → share of the demonstrations."""
GOOD = {"good": 1.0}

CONTEXT_WEIGHT = 0.1
"""Loss weight of the harness's answers: predicting the file from the issue helps copying to form early."""

SCAFFOLD = (
    "Let me look at the file.\n",
    "Now I fix it.\n",
    "Done.\n",
    "cat ",
    "sed -i '/def ",
    "/,+1s|return .*|return ",
    "|' ",
    ".py",
    "def ",
    "):\\n    return ",
    "\\n\\n\\n",
    "\\n",
    " should return ",
    ", but it does not.",
    "` in ",
    "the ",
    " of ",
    " and ",
    " by ",
    " minus ",
    " to the power ",
    " + ",
    " - ",
    " * ",
    " // ",
    " % ",
    ", ",
)
"""Fixed text of the task family and of the demonstrations. Words beside an argument are one token with their spaces: what tells the first
argument from the second is then the token right before it, which is what the first layer of a small model finds."""


@dataclass(frozen=True, slots=True)
class Task:
    """A onebug task as `python -m sandbox.tasks.export` writes it."""

    name: str
    kind: str
    issue: str
    file: str
    source: str
    fixed: str
    check: str
    function: str
    expression: str
    wrong_expressions: list[str]
    other_function: str


def read_tasks(path: Path) -> list[Task]:
    with path.open(encoding="utf-8") as lines:
        return [Task(**json.loads(line)) for line in lines]


@dataclass(frozen=True, slots=True)
class Episode:
    """One conversation as token ids. `weight` is 1 on what the policy says, less on answers of the harness, 0 on the opening."""

    ids: list[int]
    weight: list[float]
    way: str


def sed(function: str, expression: str, file: str) -> str:
    return f"sed -i '/def {function}/,+1s|return .*|return {expression}|' {file}"


def commands(task: Task, way: str, rng: random.Random) -> Iterator[tuple[str, str | None, str]]:
    """(thought, command, output) per turn; command None ends the work."""
    if way != "submits_at_once":
        yield "Let me look at the file.", f"cat {task.file}", task.source
    if way == "good":
        yield "Now I fix it.", sed(task.function, task.expression, task.file), ""
    elif way == "wrong_value":
        yield "Now I fix it.", sed(task.function, rng.choice(task.wrong_expressions), task.file), ""
    elif way == "wrong_function":
        yield "Now I fix it.", sed(task.other_function, task.expression, task.file), ""
    yield "Done.", None, ""


def conversation(task: Task, harness: Harness, rng: random.Random, mix: dict[str, float]) -> tuple[list[Message], str]:
    """All messages, the last one a turn of the policy, and the way of working."""
    way = rng.choices(list(mix), weights=list(mix.values()))[0]
    messages = harness.opening(task.issue, rng)
    for number, (thought, command, output) in enumerate(commands(task, way, rng), start=1):
        messages.append(harness.turn(thought, command, f"call_{number}"))
        if command is not None:
            messages.append(harness.answer(command, 0, output, f"call_{number}"))
    return messages, way


class Encoder:
    """Conversations to token ids exactly as a rollout sees them: opening rendered, turns as sampled ids, answers bridged."""

    def __init__(self, rendering: Rendering, tools: Tools) -> None:
        self._rendering, self._tools = rendering, tools
        self._stub = Message("user", "-")
        opening = rendering.render([self._stub], [])
        self._generation_prompt = opening.ids[opening.ends[-1] :]

    def episode(self, messages: list[Message], way: str) -> Episode:
        start = next(i for i, message in enumerate(messages) if message.role == "assistant")
        ids = self._rendering.render(messages[:start], self._tools).ids
        weight = [0.0] * len(ids)
        for turn, answer in zip(messages[start::2], [*messages[start + 1 :: 2], None], strict=True):
            sampled = self.sampled(turn)
            answered = self._rendering.bridge(self._generation_prompt, sampled, [answer], self._tools) if answer else None
            if answer and not answered:
                raise ValueError(f"the renderer gives no bridge behind {turn.content!r}")
            new = answered.ids if answered else []
            ids += sampled + new
            weight += [1.0] * len(sampled) + [CONTEXT_WEIGHT] * len(new)
        return Episode(ids, weight, way)

    def sampled(self, turn: Message) -> list[int]:
        """The ids that a policy would have sampled to say `turn`, up to and including the end-of-turn token."""
        rendered = self._rendering.render([self._stub, turn], [])
        said = rendered.ids[rendered.ends[0] : rendered.ends[1]]
        if said[: len(self._generation_prompt)] != self._generation_prompt:
            raise ValueError("the renderer does not keep the generation prompt: is thinking off?")
        end = len(said) - said[::-1].index(self._rendering.stop_token_ids[0])
        return said[len(self._generation_prompt) : end]
