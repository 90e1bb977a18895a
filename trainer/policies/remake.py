"""`python -m trainer.policies.remake --harness NAME --out DIR`: make a demo policy on this machine, from nothing but this repository.

Takes a few minutes on one core. Nothing is written when the new policy is not a useful start for RL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from trainer.proxy.rendering import Rendering
from trainer.vocabulary import SPECIALS

from .blocks import shared_blocks
from .conversations import HARNESSES, Harness
from .demonstrations import GOOD, MIX, SCAFFOLD, Encoder, Episode, Task, conversation, read_tasks
from .model import config, create
from .rehearsal import rehearse
from .sft import Recipe, train
from .tokenizer import bootstrap, build, wrap

LOW, HIGH, GREEDY = 0.15, 0.6, 0.8
"""The gate: RL needs successes to learn from and failures to remove, and a greedy policy that knows how to solve the tasks."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Solve rates on held-out tasks in a rehearsal, one try per task."""

    tasks: int
    sampled: float
    greedy: float
    malformed: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.policies.remake", description=__doc__)
    parser.add_argument("--harness", choices=sorted(HARNESSES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="directory for the weights; must not exist")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: name a directory that does not")
    torch.set_num_threads(1)
    harness = HARNESSES[options.harness]()
    with tempfile.TemporaryDirectory() as scratch:
        tasks = _tasks(Path(scratch) / "train.jsonl", 1000 + options.seed, 50_000)
        held_out = _tasks(Path(scratch) / "held_out.jsonl", 2000 + options.seed, 192, "--held-out")
    rng = random.Random(options.seed)  # noqa: S311
    tokenizer = vocabulary(harness, tasks[:400], rng)
    rendering = Rendering(tokenizer)
    wrapped = wrap(tokenizer)
    model = create(config(wrapped), options.seed)
    size = sum(weight.numel() for weight in model.parameters())
    say(f"vocabulary {len(wrapped)}, {size / 1e6:.2f} million parameters, {len(tasks)} training tasks")
    encoder = Encoder(rendering, harness.probes[0].request.tools)
    skill, habits = itertools.cycle(tasks), itertools.cycle(reversed(tasks))
    train(model, episodes(skill, harness, encoder, rng, GOOD), episodes(habits, harness, encoder, rng, MIX), Recipe(), say)
    figures = measure(model, rendering, harness, held_out, options.seed)
    say(f"held out: {figures.sampled:.3f} solved when sampled, {figures.greedy:.3f} greedy, {figures.malformed:.3f} malformed")
    if not LOW <= figures.sampled <= HIGH or figures.greedy < GREEDY:
        say(f"not written: wanted {LOW} to {HIGH} sampled and at least {GREEDY} greedy. Try another --seed.")
        return 1
    options.out.mkdir(parents=True)
    wrapped.save_pretrained(options.out)
    model.save_pretrained(options.out)
    (options.out / "figures.json").write_text(json.dumps({"seed": options.seed, **asdict(figures)}, indent=1) + "\n")
    say(f"wrote {options.out}")
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def _tasks(path: Path, seed: int, n: int, *flags: str) -> list[Task]:
    command = [sys.executable, "-m", "sandbox.tasks.export", "--seed", str(seed), "--n", str(n), "--out", str(path), *flags]
    subprocess.run(command, check=True)
    return read_tasks(path)


def vocabulary(harness: Harness, tasks: list[Task], rng: random.Random) -> Tokenizer:
    """A tokenizer whose blocks come from the harness's two probes and whose merges come from the demonstrations."""
    plain = Rendering(bootstrap())
    tools = harness.probes[0].request.tools
    first, second = (plain.decode(plain.render(probe.request.messages, tools).ids) for probe in harness.probes)
    blocks = shared_blocks(first, second, SPECIALS)
    texts = [plain.decode(plain.render(conversation(task, harness, rng, MIX)[0], tools).ids) for task in tasks]
    return build(texts, blocks, (*harness.scaffold, *SCAFFOLD))


def episodes(tasks: Iterator[Task], harness: Harness, encoder: Encoder, rng: random.Random, mix: dict[str, float]) -> Iterator[Episode]:
    for task in tasks:
        yield encoder.episode(*conversation(task, harness, rng, mix))


def measure(model: Qwen3MoeForCausalLM, rendering: Rendering, harness: Harness, tasks: list[Task], seed: int) -> Figures:
    rng = random.Random(seed)  # noqa: S311
    openings = [(task, harness.opening(task.issue, rng)) for task in tasks]
    torch.manual_seed(seed)
    sampled, greedy = (rehearse(model, rendering, harness, openings, temperature) for temperature in (1.0, 0.0))
    n = len(tasks)
    rate = [sum(attempt.solved for attempt in tries) / n for tries in (sampled, greedy)]
    return Figures(n, rate[0], rate[1], sum(attempt.malformed for attempt in sampled) / n)


if __name__ == "__main__":
    sys.exit(main())
