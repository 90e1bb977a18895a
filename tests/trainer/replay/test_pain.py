"""Public reports that the recordings can show (user-pain A and C), each with the value that is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from server.schemas.capture import BranchReason
from server.schemas.runspec import History, TrainRule
from trainer.replay.play import Played, player
from trainer.replay.recording import load
from trainer.replay.report import report
from trainer.replay.tokenizer import make

Play = Callable[[str], Played]
TOKENIZER = make()


@pytest.fixture
def played(recordings: Path, play: Callable[[Path], Played]) -> Play:
    return lambda name: play(recordings / f"{name}.jsonl")


def text(ids: np.ndarray) -> str:
    return str(TOKENIZER.decode(ids.tolist(), skip_special_tokens=False))


@pytest.mark.parametrize("name", ["claude/thinking", "openhands/thinking", "openhands/thinktags", "claude/interleaved", "codex/thinking"])
def test_reasoning_that_is_dropped_or_changed_does_not_split_a_conversation(name: str, played: Play) -> None:
    """1: eight rollouts became 64 samples, because the history came back without its reasoning. One conversation is one sample."""
    samples = played(name).capture.samples()
    assert len(samples) == 1
    assert samples[0].mask.sum() == played(name).capture.sampled_tokens


def test_keep_extends_and_strip_forks_and_both_are_exact(recordings: Path, played: Play) -> None:
    """2: with `keep`, a user message leaves reasoning where it is; with `strip`, the next prompt is as the template has it, on a branch.

    3: a prefix that broke is a branch with a reason, and never stops anything.
    """
    name = "claude/interleaved"
    with player(History.STRIP) as play:
        stripped = play(recordings / f"{name}.jsonl")
    assert report(stripped, TrainRule.ALL_BRANCHES).violations == report(played(name), TrainRule.ALL_BRANCHES).violations == []
    assert [branch.reason for branch in played(name).capture.branches()] == [BranchReason.ROOT]
    assert [branch.reason for branch in stripped.capture.branches()] == [BranchReason.ROOT, BranchReason.TEMPLATE_STRIP]
    kept, fork = played(name).capture.samples()[-1], stripped.capture.samples()[-1]
    assert "think one" in text(kept.tokens)
    assert "think one" not in text(fork.tokens)


def test_sampled_ids_are_trained_and_not_those_of_their_text(played: Play) -> None:
    """4: encoding decoded text gives other ids. The engine spells byte by byte what the tokenizer would merge."""
    capture = played("claude/plain").capture
    (sample,) = capture.samples()
    sampled = [turn.sampled.tolist() for turn in capture.graph.turns]
    assert sample.tokens[sample.mask].tolist() == [id_ for ids in sampled for id_ in ids]
    assert all(TOKENIZER.encode(TOKENIZER.decode(ids), add_special_tokens=False).ids != ids for ids in sampled)


@pytest.mark.parametrize("name", ["opencode/parallel", "claude/parallel", "openhands/parallel", "qwen/parallel", "codex/parallel"])
def test_results_of_one_turn_share_a_block_as_in_the_template(name: str, played: Play) -> None:
    """7: results that are tokenised one by one get a user block each; the template puts those of one turn into one."""
    (sample,) = [sample for sample in played(name).capture.samples() if sample.branch_class == "policy"]
    whole = text(sample.tokens)
    turns = played(name).capture.graph.turns
    assert max(len(turn.message.tool_calls) for turn in turns) > 1
    assert whole.count("<tool_response>") > whole.count("<|im_start|>user\n<tool_response>")
    assert "</tool_response><|im_end|>\n<|im_start|>user\n<tool_response>" not in whole


@pytest.mark.parametrize("name", ["claude/plain", "opencode/plain", "openhands/plain", "mini/plain", "qwen/plain", "codex/plain"])
def test_turns_are_joined_as_in_the_template(name: str, played: Play) -> None:
    """11: a missing line end at the seam. Every sampled turn ends with its stop token, and what follows begins with the template's."""
    for sample in played(name).capture.samples():
        ends = np.flatnonzero(np.diff(np.append(sample.mask, False).astype(int)) == -1) + 1
        for end in ends:
            assert text(sample.tokens[end - 1 : end]) == "<|im_end|>"
            assert end == len(sample.tokens) or text(sample.tokens[end:]).startswith("\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("name", "broken"), [("claude/malformed", 2), ("opencode/malformed", 2), ("codex/malformed", 2), ("openhands/maxtokens_tool", 1)]
)
def test_a_call_that_is_no_json_is_text_and_counted(name: str, broken: int, played: Play) -> None:
    """32: a call that nobody could parse stays visible as text of its turn, and the capture counts it."""
    turns = [turn for turn in played(name).capture.graph.turns if turn.malformed]
    assert len(turns) == broken
    assert all('"arguments": ' in turn.message.content for turn in turns)


@pytest.mark.parametrize(
    "name", ["claude/unicode", "claude/numbers", "claude/bigargs", "opencode/numbers", "codex/unicode", "qwen/numbers"]
)
def test_streamed_arguments_are_the_sampled_ones(name: str, played: Play) -> None:
    """33: arguments were cut or broken on their way. Replay compares every streamed call with the recorded one, by value."""
    assert played(name).problems == []
    for call in played(name).calls:
        wanted = [json.loads(block.text) for block in call.step.blocks if block.kind == "call"]
        turn = next(turn for turn in played(name).capture.graph.turns if turn.sampled.tolist() == call.ids)
        assert [made.arguments for made in turn.message.tool_calls] == wanted


@pytest.mark.parametrize("name", ["claude/stop_mismatch", "claude/maxtokens", "opencode/plain", "openhands/plain", "qwen/plain"])
def test_the_reason_for_stopping_follows_what_was_parsed(name: str, played: Play) -> None:
    """34: a loop ends after one call when the reason is `stop`. Replay compares it with the turn, whatever the recording server said."""
    assert played(name).problems == []
    assert {call.step.by_length for call in played("claude/maxtokens").calls} == {True, False}


def test_claude_code_as_its_adapter_sets_it_keeps_prompt_and_tools(recordings: Path) -> None:
    """14, 17: no line with a nonce in front of the system prompt, and no tool is added to a conversation that has begun."""
    told: dict[tuple[str, str], set[str]] = {}
    for path in (recordings / "claude-2.1.332-adapter").glob("*.jsonl"):
        for exchange in load(path):
            if exchange.model_call:
                assert "x-anthropic-billing-header" not in json.dumps(exchange.body)
                headers = {name.lower(): value for name, value in exchange.headers.items()}
                thread = f"{path.stem} {headers.get('x-claude-code-agent-id', '')}", json.dumps(exchange.body["messages"][0])
                told.setdefault(thread, set()).add(json.dumps([exchange.body.get("system"), exchange.body["tools"]]))
    assert len(told) > 20
    assert {len(prompts) for prompts in told.values()} == {1}
