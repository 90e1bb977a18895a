"""`python -m tests.vllm.on_gpu`: the engine interface on vLLM on one GPU, against transformers on the CPU, then two training runs of three
steps through the launcher, a dense policy's and one of experts, on that GPU. At most 8 minutes.

Needs this checkout, and an environment with vLLM 0.31 and transformers; the runs need the trainer's packages too (verl, Ray, TransferQueue)
and are left out, which is said, where those are missing. Prints a line per check with what it found, and exits with 0 only if all of them
held. On vLLM's CPU build it runs the same checks, which is how it is tested.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.models import reference
from tests.trainer.support.vllm import PROMPT, SETTINGS, probe, save, save_experts, start
from trainer.engine.base import EngineError, Generation, GenerationRequest, Sampling
from trainer.engine.vllm import VllmEngine
from trainer.engine.vllm_cpu import ROUTES

TRAINER = ("verl", "ray", "transfer_queue", "renderers", "uvloop")
TOLERANCE = 1e-3
"""Nats between two programs that compute in fp32."""


class Report:
    def __init__(self) -> None:
        self.failed = self.checked = 0
        self._began = time.monotonic()

    def left(self, minutes: float) -> float:
        """Seconds."""
        return 60 * minutes - (time.monotonic() - self._began)

    def say(self, held: bool, what: str) -> None:
        self.failed, self.checked = self.failed + (not held), self.checked + 1
        print(f"{'ok  ' if held else 'FAIL'} {time.monotonic() - self._began:5.0f} s  {what}", flush=True)


def compare(path: Path, answer: Generation, temperature: float) -> tuple[float, int, int]:
    """(largest difference of a log-prob, (token, layer) pairs with the experts of transformers' router, all of them)."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    log_probs, experts = reference(model, [*PROMPT, *answer.token_ids], temperature)
    rows = torch.arange(len(PROMPT) - 1, len(PROMPT) - 1 + len(answer.token_ids))
    difference = (torch.tensor(answer.log_probs) - log_probs[rows, answer.token_ids]).abs().max()
    if answer.routes is None or experts is None:
        return float(difference), 0, 0
    same = (np.sort(answer.routes, -1) == experts[:-1].sort(-1).values.numpy()).all(-1)
    return float(difference), int(same.sum()), same.size


async def check(kind: str, old: Path, new: Path, routes: dict[str, object], report: Report) -> None:
    vllm = start(old, **routes)
    try:
        engine, streamed, begun = VllmEngine(vllm), list[int](), asyncio.Event()

        async def turn(path: Path, tokens: int, take: Callable[[list[int], list[float]], None] | None = None) -> Generation:
            answer = await engine.generate(GenerationRequest("s", PROMPT, Sampling(1.0, tokens, ()), on_tokens=take))
            difference, same, rows = compare(path, answer, 1.0)
            held = difference < TOLERANCE and (kind == "dense" or same >= 0.999 * rows > 0)
            what = f"{answer.stop_reason}, {len(answer.token_ids)} tokens of version {answer.version}, log-probs within {difference:.1e}"
            report.say(held, f"{kind}: {what}, experts of {same} of {rows} equal")
            return answer

        first = await turn(old, 32, lambda ids, _: streamed.extend(ids))
        report.say(streamed == first.token_ids, f"{kind}: {len(streamed)} tokens were streamed")
        running = asyncio.create_task(turn(old, 1900, lambda *_: begun.set()))
        await begun.wait()
        await engine.update_weights(lambda: vllm.collective_rpc("reload_weights", kwargs={"weights_path": str(new)}), 1, probe(new))
        report.say((await running).stop_reason == "aborted", f"{kind}: the update ended what ran")
        await turn(new, 32)
        try:
            await engine.update_weights(lambda: asyncio.sleep(0), 2, probe(old))
            report.say(False, f"{kind}: weights that are not the trainer's were served")
        except EngineError as error:
            report.say(True, f"{kind}: {error}")
    finally:
        vllm.shutdown()


async def engine(home: Path, on_cpu: bool, report: Report) -> None:
    routes: dict[str, object] = dict(ROUTES) if on_cpu else {"enable_return_routed_experts": True}
    await check("dense", save(home / "old", 0), save(home / "new", 1), {}, report)
    await check("experts", save_experts(home / "one", 0), save_experts(home / "other", 1), routes, report)


def training(home: Path, on_cpu: bool, minutes: float, report: Report) -> None:
    if missing := [name for name in TRAINER if find_spec(name) is None]:
        print(f"not checked: training runs, for want of {', '.join(missing)}", flush=True)
        return
    from tests.vllm.training import three_steps

    for kind in ("dense", "experts"):
        for held, what in three_steps(home / f"train-{kind}", kind, "cpu" if on_cpu else "cuda", max(1, report.left(minutes))):
            report.say(held, what)


def main(minutes: float) -> int:
    import vllm
    from vllm.platforms import current_platform

    report, on_cpu = Report(), current_platform.is_cpu()
    print(f"vLLM {vllm.__version__} on {'a CPU' if on_cpu else torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory(prefix="lego-") as folder:
        home = Path(folder)
        asyncio.run(asyncio.wait_for(engine(home, on_cpu, report), report.left(minutes)))
        training(home, on_cpu, minutes, report)
    print(f"{report.failed} of {report.checked} checks failed" if report.failed else f"all {report.checked} checks held")
    return 1 if report.failed else 0


if __name__ == "__main__":
    os.environ.update(SETTINGS)
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.on_gpu")
    parser.add_argument("--minutes", type=float, default=8, help="in all; a busy machine without a GPU may need more")
    sys.exit(main(parser.parse_args().minutes))
