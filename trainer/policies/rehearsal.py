"""Trying a policy on tasks without harness or sandbox: the harness's messages, real shell commands, the tasks' real checks.

A rehearsal gates a new policy; it is not an evaluation. Outside a sandbox only commands of the demonstrations' own form are run, in a
scratch folder; any other command is answered as one that was not found.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.capture.message import Message
from trainer.proxy.rendering import Rendering

from .conversations import Harness
from .demonstrations import Task

MAX_TURNS, MAX_NEW = 5, 48
_WORD = r"[a-z]{1,20}"
_HARMLESS = re.compile(rf"cat {_WORD}\.py|sed -i '/def {_WORD}/,\+1s\|return \.\*\|return [a-z ,.()+*/%-]{{1,60}}\|' {_WORD}\.py")


@dataclass(slots=True)
class Rehearsal:
    """One try: `turns` holds (prompt ids, sampled ids) per model call. A malformed turn ends it: rehearsals do not correct."""

    task: Task
    turns: list[tuple[list[int], list[int]]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    malformed: int = 0
    ended: bool = False
    solved: bool = False


def rehearse(
    model: Any, rendering: Rendering, harness: Harness, openings: Sequence[tuple[Task, list[Message]]], temperature: float
) -> list[Rehearsal]:
    """Play all conversations side by side, one batched generation per turn. Temperature 0 is greedy; samples depend on torch's seed."""
    tools = harness.probes[0].request.tools
    tries = [Rehearsal(task) for task, _ in openings]
    prompts = [rendering.render(messages, tools) for _, messages in openings]
    generation_prompt = prompts[0].ids[prompts[0].ends[-1] :]
    ids = [prompt.ids for prompt in prompts]
    with tempfile.TemporaryDirectory() as scratch:
        folders = [Path(scratch) / str(number) for number in range(len(tries))]
        for folder, attempt in zip(folders, tries, strict=True):
            folder.mkdir()
            (folder / attempt.task.file).write_text(attempt.task.source, encoding="utf-8")
        live = list(range(len(tries)))
        for turn in range(MAX_TURNS):
            for i, sampled in zip(live, generate(model, [ids[i] for i in live], temperature, rendering.stop_token_ids), strict=True):
                tries[i].turns.append((ids[i], sampled))
                commands = harness.commands(rendering.parse(generation_prompt, sampled, tools))
                tries[i].malformed += commands is None
                tries[i].ended = not commands
                tries[i].commands += commands or []
                answers = [harness.answer(command, *run(command, folders[i]), f"call_{turn + 1}") for command in commands or []]
                bridged = rendering.bridge(generation_prompt, sampled, answers, tools) if answers else None
                ids[i] = [*ids[i], *sampled, *(bridged.ids if bridged else [])]
            live = [i for i in live if not tries[i].ended]
            if not live:
                break
        for folder, attempt in zip(folders, tries, strict=True):
            attempt.solved = attempt.ended and not attempt.malformed and _passes(attempt.task, folder)
    return tries


def run(command: str, folder: Path) -> tuple[int, str]:
    """(exit status, output) of a harmless command."""
    if not _HARMLESS.fullmatch(command):
        return 127, "bash: command not found\n"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=20)
    return done.returncode, done.stdout + done.stderr


def _passes(task: Task, folder: Path) -> bool:
    if (folder / task.file).read_text(encoding="utf-8") == task.source:
        return False
    return subprocess.run([sys.executable, "-I", "-S", "-c", task.check, str(folder)], capture_output=True, timeout=30).returncode == 0


@torch.no_grad()
def generate(model: Any, prompts: list[list[int]], temperature: float, stop: Sequence[int]) -> list[list[int]]:
    """Sampled ids per prompt, the stop token included."""
    width = max(map(len, prompts))
    ids = torch.tensor([[stop[-1]] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW, eos_token_id=list(stop), pad_token_id=stop[-1], **how)
    rows = out[:, width:].tolist()
    ends = [next((n + 1 for n, token in enumerate(row) if token in stop), len(row)) for row in rows]
    return [row[:end] for row, end in zip(rows, ends, strict=True)]
