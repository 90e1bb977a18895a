"""The weights that ship load in transformers, speak their harness's format, and are as small as promised."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sandbox.tasks.export import rows
from trainer.policies import resolve
from trainer.policies.conversations import HARNESSES
from trainer.policies.demonstrations import Task
from trainer.policies.remake import GREEDY, HIGH, LOW, measure
from trainer.proxy.rendering import Rendering
from trainer.vocabulary import SPECIALS

SHIPPED = {
    "onebug-mini-swe-agent": ("mini-swe-agent",),
    "onebug-claude-code": ("claude-code",),
    "onebug-mixed": ("mini-swe-agent", "claude-code", "codex"),
}
SPOKEN = [(policy, harness) for policy, harnesses in SHIPPED.items() for harness in harnesses]


@pytest.fixture(params=SHIPPED)
def directory(request: pytest.FixtureRequest) -> Path:
    return resolve(f"builtin:{request.param}")


def figures_of(policy: str) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((resolve(f"builtin:{policy}") / "figures.json").read_text())["harnesses"]
    return found


def test_it_is_small_and_complete(directory: Path) -> None:
    assert {path.name for path in directory.iterdir()} >= {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert (directory / "model.safetensors").stat().st_size < 3_000_000


def test_transformers_loads_it_without_missing_or_unexpected_weights(directory: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert [tokenizer.encode(special, add_special_tokens=False) for special in SPECIALS] == [
        [tokenizer.convert_tokens_to_ids(special)] for special in SPECIALS
    ]


@pytest.mark.parametrize(("policy", "harness"), SPOKEN)
def test_the_recorded_prompt_is_short_because_of_its_blocks(policy: str, harness: str) -> None:
    rendering = Rendering.load(resolve(f"builtin:{policy}"))
    for probe in HARNESSES[harness]().probes:
        tools = probe.request.tools
        assert len(rendering.render(probe.request.messages, tools).ids) < 90
        assert rendering.overlong(probe.request.messages, json.dumps(list(tools)), 90) == 0, "thousands of characters, and it fits"


@pytest.mark.parametrize("policy", SHIPPED)
def test_figures_lie_within_the_gate(policy: str) -> None:
    figures = figures_of(policy)
    assert tuple(figures) == SHIPPED[policy]
    assert all(LOW <= found["sampled"] <= HIGH and found["greedy"] >= GREEDY for found in figures.values())


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "harness"), SPOKEN)
def test_figures_are_what_a_rehearsal_gives(policy: str, harness: str) -> None:
    directory = resolve(f"builtin:{policy}")
    tasks = [Task(**row) for row in rows(seed=404, n=96, held_out=True)]
    model = AutoModelForCausalLM.from_pretrained(directory)
    figures = measure(model, Rendering.load(directory), HARNESSES[harness](), tasks, seed=1)
    shipped = figures_of(policy)[harness]
    assert abs(figures.sampled - shipped["sampled"]) < 0.17  # three standard errors of the difference
    assert abs(figures.greedy - shipped["greedy"]) < 0.1


def test_an_unknown_name_lists_what_ships() -> None:
    with pytest.raises(ValueError, match="builtin:onebug-mini-swe-agent"):
        resolve("builtin:gpt")
