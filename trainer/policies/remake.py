"""`python -m trainer.policies.remake --harness NAME… --out DIR`: make a demo policy on this machine, from nothing but this repository.

Several harnesses make one policy that works in each of them. Takes a few minutes on one core. Nothing is written when the new policy is
not a useful start for RL.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from trainer.proxy.rendering import Rendering
from trainer.vocabulary import SPECIALS

from . import resolve
from .blocks import shared_blocks
from .conversations import HARNESSES, Harness
from .demonstrations import GOOD, MIX, SCAFFOLD, Encoder, Episode, Task, conversation, read_tasks
from .model import config, create, inherit
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

    @property
    def good(self) -> bool:
        return LOW <= self.sampled <= HIGH and self.greedy >= GREEDY


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.policies.remake", description=__doc__)
    parser.add_argument("--harness", choices=sorted(HARNESSES), required=True, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="directory for the weights; must not exist")
    parser.add_argument("--start", metavar="builtin:NAME", help="a shipped policy to start from, instead of from nothing")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists: name a directory that does not")
    torch.set_num_threads(1)
    harnesses = {name: HARNESSES[name]() for name in options.harness}
    with tempfile.TemporaryDirectory() as scratch:
        tasks = _tasks(Path(scratch) / "train.jsonl", 1000 + options.seed, 50_000)
        held_out = _tasks(Path(scratch) / "held_out.jsonl", 2000 + options.seed, 192, "--held-out")
    rng = random.Random(options.seed)  # noqa: S311
    tokenizer = vocabulary(list(harnesses.values()), tasks[:400], rng)
    rendering = Rendering(tokenizer)
    wrapped = wrap(tokenizer)
    model = create(config(wrapped), options.seed)
    size = sum(weight.numel() for weight in model.parameters())
    if options.start:
        shared = inherit(model, tokenizer.get_vocab(), resolve(options.start))
        say(f"starts from {options.start}, with {shared} tokens in common")
    say(f"vocabulary {len(wrapped)}, {size / 1e6:.2f} million parameters, {len(tasks)} training tasks")
    speakers = [(harness, Encoder(rendering, harness.probes[0].request.tools)) for harness in harnesses.values()]
    skill, habits = itertools.cycle(tasks), itertools.cycle(reversed(tasks))
    recipe = Recipe(skill_steps=1500 * len(speakers))
    train(model, episodes(skill, speakers, rng, GOOD), episodes(habits, speakers, rng, MIX), recipe, say)
    figures = {name: measure(model, rendering, harness, held_out, options.seed) for name, harness in harnesses.items()}
    for name, found in figures.items():
        say(f"held out, {name}: {found.sampled:.3f} solved when sampled, {found.greedy:.3f} greedy, {found.malformed:.3f} malformed")
    if not all(found.good for found in figures.values()):
        say(f"not written: wanted {LOW} to {HIGH} sampled and at least {GREEDY} greedy. Try another --seed.")
        return 1
    options.out.mkdir(parents=True)
    wrapped.save_pretrained(options.out)
    model.save_pretrained(options.out)
    document = {"seed": options.seed, "harnesses": {name: asdict(found) for name, found in figures.items()}}
    (options.out / "figures.json").write_text(json.dumps(document, indent=1) + "\n")
    say(f"wrote {options.out}")
    return 0


def say(line: str) -> None:
    print(line, flush=True)


def _tasks(path: Path, seed: int, n: int, *flags: str) -> list[Task]:
    command = [sys.executable, "-m", "sandbox.tasks.export", "--seed", str(seed), "--n", str(n), "--out", str(path), *flags]
    subprocess.run(command, check=True)
    return read_tasks(path)


def vocabulary(harnesses: Sequence[Harness], tasks: list[Task], rng: random.Random) -> Tokenizer:
    """A tokenizer whose blocks come from each harness's two probes and whose merges come from the demonstrations."""
    plain = Rendering(bootstrap())
    texts, fixed = list[str](), [*SCAFFOLD]
    for harness in harnesses:
        tools = harness.probes[0].request.tools
        first, second = (plain.decode(plain.render(probe.request.messages, tools).ids) for probe in harness.probes)
        fixed += [*shared_blocks(first, second, SPECIALS), *harness.scaffold]
        texts += [plain.decode(plain.render(conversation(task, harness, rng, MIX)[0], tools).ids) for task in tasks]
    return build(texts, fixed)


def episodes(
    tasks: Iterator[Task], speakers: Sequence[tuple[Harness, Encoder]], rng: random.Random, mix: dict[str, float]
) -> Iterator[Episode]:
    """The harnesses take turns."""
    for task, (harness, encoder) in zip(tasks, itertools.cycle(speakers), strict=False):
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
