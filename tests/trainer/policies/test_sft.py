"""The training loop learns a tiny language, and Muon's update is orthogonal."""

import itertools

import pytest
import torch
from transformers import Qwen3MoeConfig

from trainer.policies.demonstrations import Episode
from trainer.policies.model import create
from trainer.policies.sft import Recipe, _orthogonal, train


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (3, 6, 9)])
def test_newton_schulz_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(_orthogonal(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.3


def tiny() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=20, hidden_size=32, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True, bos_token_id=None,
    )  # fmt: skip


def test_two_phases_learn_what_they_are_shown() -> None:
    model = create(tiny(), seed=0)
    skill = itertools.cycle([Episode([1, a, 3, a, 2], [0, 0, 0.1, 1, 1], "good") for a in range(5, 15)])
    habits = itertools.cycle([Episode([1, a, 3, 4, 2], [0, 0, 0.1, 1, 1], "other") for a in range(5, 15)])
    lines: list[str] = []
    train(model, skill, habits, Recipe(batch=10, skill_loss=0.1, skill_steps=400, habit_steps=100), lines.append)
    assert lines[-1].startswith("habits")
    with torch.no_grad():
        assert model(torch.tensor([[1, 7, 3]])).logits[0, -1].argmax() == 4
