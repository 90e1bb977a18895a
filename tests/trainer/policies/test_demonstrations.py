"""Demonstrations are token for token what a rollout would be."""

import random

import pytest

from trainer.policies.conversations import HARNESSES
from trainer.policies.demonstrations import GOOD, MIX, Encoder, Task, conversation
from trainer.policies.remake import vocabulary
from trainer.proxy.rendering import Rendering

CONTEXT = 256
"""`model.context` of the presets."""


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_piecewise_encoding_equals_a_full_rendering_and_one_pass_over_the_text(name: str, tasks: list[Task]) -> None:
    harness, rng = HARNESSES[name](), random.Random(1)
    tools = harness.probes[0].request.tools
    tokenizer = vocabulary([harness], tasks, rng)
    rendering = Rendering(tokenizer)
    encoder = Encoder(rendering, tools)
    for task in tasks:
        messages, way = conversation(task, harness, rng, MIX)
        episode = encoder.episode(messages, way)
        text = rendering.decode(episode.ids)
        assert tokenizer.encode(text, add_special_tokens=False).ids == episode.ids
        assert rendering.render(messages, tools).ids[: len(episode.ids)] == episode.ids
        assert len(episode.ids) <= CONTEXT


@pytest.mark.parametrize("name", sorted(HARNESSES))
def test_sampled_turns_parse_back_to_their_commands(name: str, tasks: list[Task]) -> None:
    harness, rng = HARNESSES[name](), random.Random(2)
    tools = harness.probes[0].request.tools
    rendering = Rendering(vocabulary([harness], tasks, rng))
    encoder = Encoder(rendering, tools)
    for task in tasks[:20]:
        messages, _ = conversation(task, harness, rng, GOOD)
        turns = [message for message in messages if message.role == "assistant"]
        commands = [harness.commands(rendering.parse([], encoder.sampled(turn), tools)) for turn in turns]
        assert commands[0] == [f"cat {task.file}"]
        assert commands[1] == [f"sed -i '/def {task.function}/,+1s|return .*|return {task.expression}|' {task.file}"]
        assert commands[2:] == [[]]


def test_only_the_policy_is_trained_at_full_weight(tasks: list[Task]) -> None:
    harness, rng = HARNESSES["mini-swe-agent"](), random.Random(3)
    rendering = Rendering(vocabulary([harness], tasks, rng))
    encoder = Encoder(rendering, harness.probes[0].request.tools)
    messages, way = conversation(tasks[0], harness, rng, GOOD)
    episode = encoder.episode(messages, way)
    said = rendering.decode([token for token, weight in zip(episode.ids, episode.weight, strict=True) if weight == 1])
    assert said.count("<|im_end|>") == 3
    assert said.startswith("Let me look at the file.\n<tool_call>")
    assert "returncode" not in said


def test_the_mix_is_seeded_and_close_to_its_shares(tasks: list[Task]) -> None:
    harness = HARNESSES["mini-swe-agent"]()
    ways = [[conversation(task, harness, rng, MIX)[1] for task in tasks * 10] for rng in (random.Random(4), random.Random(4))]
    assert ways[0] == ways[1]
    for way, share in MIX.items():
        assert abs(ways[0].count(way) / len(ways[0]) - share) < 0.06
