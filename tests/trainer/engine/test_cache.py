from __future__ import annotations

import psutil
import torch

from trainer.engine.cache import Slots
from trainer.engine.weights import Shape

SHAPE = Shape(
    vocab=8,
    hidden=64,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    eps=1e-6,
    rope_theta=1e4,
    tied=True,
    experts=4,
    top_k=2,
    normalise_top_k=True,
)


def fill(cache: Slots, slot: int, tokens: list[int], value: float) -> None:
    for tensor in (*cache.keys, *cache.values):
        tensor[slot, : len(tokens)] = value
    cache.tokens[slot].extend(tokens[len(cache.tokens[slot]) :])


def test_a_long_context_costs_what_it_holds() -> None:
    """32 slots of 200,000 tokens would be 9.8 GB; 300 tokens in each are 15 MB, whatever their sessions did before."""
    process = psutil.Process()
    before = process.memory_full_info().uss
    cache = Slots(SHAPE, 32, 200_000)
    for round_ in range(3):
        slots = [cache.acquire(f"{round_}/{number}", "", [1]) for number in range(32)]
        for slot in slots:
            assert slot is not None
            fill(cache, slot, [1] * 300, 1.0)
            cache.unpin(slot)
        cache.drop()
    assert process.memory_full_info().uss - before < 60e6


def test_a_slot_comes_back_empty_however_it_was_cut() -> None:
    """What one session wrote, also what it had cut away before, is zero for the next: a NaN there would pass the mask."""
    cache = Slots(SHAPE, 1, 64)
    assert cache.acquire("a", "", [1] * 40) == 0
    fill(cache, 0, [1] * 40, float("nan"))
    cache.unpin(0)
    assert cache.acquire("a", "", [1] * 5 + [2]) == 0 and cache.tokens[0] == [1] * 5
    cache.unpin(0)
    cache.release("a")
    assert cache.acquire("b", "", [1]) == 0
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in (*cache.keys, *cache.values))
