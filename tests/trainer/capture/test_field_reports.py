"""What other trainers were reported to get wrong, with the right value here. Numbers are those of the collected reports (A: tokens and
history, B: on the wire, D: engine and routing)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from server.schemas.capture import BranchReason, Exclusion
from tests.trainer.capture.careless import TOOLS
from tests.trainer.scripted import LAYERS, TOP_K, ScriptedEngine, calls, routes_at, say
from trainer.capture.capture import Capture
from trainer.capture.graph import Turn
from trainer.capture.message import Message
from trainer.capture.request import Request
from trainer.capture.sample import Sample
from trainer.engine.base import Generation, GenerationRequest, Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Refusal
from trainer.proxy.rendering import Rendering
from trainer.proxy.session import Session
from trainer.vocabulary import byte_level

START = [Message("system", "You fix code."), Message("user", "Fix it.")]


def play(engine: Any, tokenizer: Tokenizer, script: Callable[[Session], Awaitable[None]], thinking: bool = False) -> Capture:
    async def run() -> Capture:
        rendering = Rendering(tokenizer, thinking=thinking)
        sampling = Sampling(1.0, 200, rendering.stop_token_ids)
        session = Session("r-1", "key", engine, rendering, sampling, Limits(max_turns=60, context=9000), harness="test")
        await script(session)
        return await session.close()

    return asyncio.run(run())


async def ask(session: Session, messages: list[Message]) -> Turn:
    turn = await session.answer(Request(tuple(messages), TOOLS, "m"))
    turn.sent = True
    return turn


def results(turn: Turn, *texts: str) -> list[Message]:
    return [Message("tool", text, tool_call_id=call.id) for call, text in zip(turn.message.tool_calls, texts, strict=True)]


def test_a_conversation_is_one_sample_although_the_harness_drops_the_reasoning() -> None:
    """A1: 8 rollouts became 64 samples, because every replayed turn without its reasoning was rendered again."""
    engine = ScriptedEngine(byte_level(), write=lambda: calls(("bash", {}), text="<think>\nhm\n</think>\n\n"))

    async def script(session: Session) -> None:
        messages = list(START)
        for _ in range(8):
            turn = await ask(session, messages)
            assert turn.message.reasoning == "hm"
            messages += [dataclasses.replace(turn.message, reasoning=None), *results(turn, "ok")]

    capture = play(engine, engine.tokenizer, script, thinking=True)
    (sample,) = capture.samples()
    assert (sample.reason, sample.excluded, int(sample.mask.sum())) == (BranchReason.ROOT, None, capture.sampled_tokens)


def test_sampled_ids_are_kept_where_their_text_has_another_encoding() -> None:
    """A4: decode and encode give other ids, because BPE is not injective."""
    tokenizer = byte_level([("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")])
    he, llo, hello = (tokenizer.token_to_id(token) for token in ("he", "llo", "hello"))
    sampled = [he, llo, tokenizer.token_to_id("<|im_end|>")]
    assert tokenizer.encode("hello").ids == [hello]
    prompts: list[list[int]] = []

    class Engine:
        async def generate(self, request: GenerationRequest) -> Generation:
            prompts.append(list(request.prompt_ids))
            return Generation(list(sampled), [-0.5, -0.25, -0.125], None, "stop", 0)

    async def script(session: Session) -> None:
        first = await ask(session, START)
        assert first.message.content == "hello"
        await ask(session, [*START, first.message, Message("user", "Go on.")])

    play(Engine(), tokenizer, script)
    assert prompts[1][: len(prompts[0]) + 3] == prompts[0] + sampled


def test_the_scaffold_of_an_empty_thought_is_sent_and_never_trained() -> None:
    """A5, A6: without thinking the template puts an empty thought in front of the last turn only."""
    engine = ScriptedEngine(byte_level(), [say("One."), say("Two.")])

    async def script(session: Session) -> None:
        first = await ask(session, START)
        await ask(session, [*START, first.message, Message("user", "Go on.")])

    (sample,) = play(engine, engine.tokenizer, script).samples()
    text = engine.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2
    assert engine.tokenizer.decode(sample.tokens[sample.mask].tolist(), skip_special_tokens=False) == "One.<|im_end|>Two.<|im_end|>"


def test_parallel_tool_results_are_rendered_as_one_group() -> None:
    """A7: results tokenised one by one are not the single user turn of the template."""
    engine = ScriptedEngine(byte_level(), [calls(("bash", {}), ("read", {})), say("Done.")])
    sent: list[Message] = []

    async def script(session: Session) -> None:
        turn = await ask(session, START)
        sent.extend([*START, turn.message, *reversed(results(turn, "one", "two"))])
        await ask(session, sent)

    play(engine, engine.tokenizer, script)
    first, second = engine.calls
    added = second.prompt[len(first.prompt) + len(first.sampled) :]
    assert added == Rendering(engine.tokenizer).render(sent, TOOLS).ids[-len(added) :]
    assert engine.tokenizer.decode(engine.calls[1].prompt, skip_special_tokens=False).count("<|im_start|>user") == 2


@pytest.mark.parametrize("name", ["mask", "log_probs", "versions", "routed", "routes"])
def test_arrays_of_another_length_are_no_sample(name: str) -> None:
    """A8: a mask was longer than its tokens. Ids, mask, log-probs, versions and routes have one length or there is no sample."""
    engine = ScriptedEngine(byte_level(), [say("One.")])

    async def script(session: Session) -> None:
        await ask(session, START)

    (sample,) = play(engine, engine.tokenizer, script).samples()
    for other in (getattr(sample, name)[:-1], np.concatenate([getattr(sample, name)] * 2)):
        with pytest.raises(ValueError, match="disagree on length"):
            dataclasses.replace(sample, **{name: other})
    with pytest.raises(ValueError, match="must leave every trained token behind it"):
        dataclasses.replace(sample, prompt_len=len(sample.tokens))
    assert isinstance(sample, Sample)


def test_special_tokens_inside_an_answer_move_nothing() -> None:
    """A12: special tokens in the output were dropped by decoding, and lengths taken from text cut at the wrong place."""
    engine = ScriptedEngine(byte_level(), ["a<|endoftext|>b<|im_start|>c<think>d<|im_end|>", say("Two.")])

    async def script(session: Session) -> None:
        first = await ask(session, START)
        await ask(session, [*START, first.message, Message("user", "Go on.")])

    capture = play(engine, engine.tokenizer, script)
    first, second = engine.calls
    assert second.prompt[: len(first.prompt) + 8] == first.prompt + first.sampled and len(first.sampled) == 8
    (sample,) = capture.samples()
    assert sample.tokens[sample.mask].tolist() == first.sampled + second.sampled


def test_the_same_prompt_again_replaces_what_was_lost_and_stands_beside_what_was_read() -> None:
    """A13: a dropped turn that was asked for again became a sibling sample."""
    engine = ScriptedEngine(byte_level(), [say("One."), say("Two."), say("Three.")])

    async def script(session: Session) -> None:
        lost = await session.answer(Request(tuple(START), TOOLS, "m"))
        assert await ask(session, START) is lost  # never written out: given again
        again = await ask(session, START)
        await ask(session, [*START, again.message, Message("user", "Go on.")])

    capture = play(engine, engine.tokenizer, script)
    assert [(branch.reason, branch.excluded) for branch in capture.branches()] == [
        (BranchReason.RETRY, Exclusion.UNDELIVERED),
        (BranchReason.ROOT, None),
    ]


def test_a_turn_that_was_cut_goes_on_in_its_branch() -> None:
    """B31: at max_tokens Claude Code appends "Pick up mid-thought" and goes on."""
    engine = ScriptedEngine(byte_level(), ["x" * 300, say("Done.")])

    async def script(session: Session) -> None:
        first = await ask(session, START)
        await ask(session, [*START, first.message, Message("user", "Pick up mid-thought.")])

    capture = play(engine, engine.tokenizer, script)
    assert [turn.finish for turn in capture.record("t").turns] == ["length", "stop"]
    assert [branch.excluded for branch in capture.branches()] == [None]


class Forgetful(ScriptedEngine):
    """Loses rows of routes in the calls that `keep` names: what it returns of the rows that were asked for."""

    keep: dict[int, Callable[[np.ndarray], np.ndarray | None]]

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        lose = self.keep.get(len(self.calls), lambda rows: rows)
        return dataclasses.replace(generation, routes=lose(generation.routes))  # type: ignore[arg-type]


@pytest.mark.parametrize("lose", [lambda rows: None, lambda rows: rows[:-3], lambda rows: rows[:-1], lambda rows: rows[1:]])
def test_missing_rows_of_routes_are_marked_and_never_shifted(lose: Callable[[np.ndarray], np.ndarray | None]) -> None:
    """D40: a preempted call returned no or too few rows, silently. What is missing is asked for again with the next call."""
    engine = Forgetful(byte_level(), [calls(("bash", {})), calls(("bash", {})), say("Done.")])
    engine.keep = {2: lose}

    async def script(session: Session) -> None:
        first = await ask(session, START)
        messages = [*START, first.message, *results(first, "ok")]
        second = await ask(session, messages)
        known = np.concatenate([node.routed for node in second.path()])
        assert known.tolist() == [True] * (first.end - 1) + [False] * (second.end - first.end + 1)
        third = await ask(session, [*messages, second.message, *results(second, "ok")])
        assert np.concatenate([node.routed for node in third.path()])[:-1].all()

    capture = play(engine, engine.tokenizer, script)
    assert len(capture.violations) == (0 if lose(np.zeros((9, 1, 1))) is None else 1)
    (sample,) = capture.samples()
    where = np.flatnonzero(sample.routed)
    assert sample.routes is not None and len(where) == len(sample.tokens) - 1
    np.testing.assert_array_equal(sample.routes[where], routes_at(sample.tokens[where], where))


def test_routes_are_asked_for_once_and_stored_small() -> None:
    """D41, D42: routes of the whole prefix with every turn cost 0.87 of the rate. The last sampled token has no row until it is read."""
    engine = ScriptedEngine(byte_level(), [calls(("bash", {})), say("Done.")])

    async def script(session: Session) -> None:
        first = await ask(session, START)
        assert first.routed.tolist() == [True] * (len(first.ids) - 1) + [False]
        await ask(session, [*START, first.message, *results(first, "ok")])
        assert first.routed.all()

    capture = play(engine, engine.tokenizer, script)
    first, second = engine.calls
    assert (first.routes_from, second.routes_from) == (0, len(first.prompt) + len(first.sampled) - 1)
    rows = [node.routes for node in capture.graph.nodes() if node.routes is not None]
    assert {row.dtype for row in rows} == {np.dtype(np.uint8)}
    assert sum(row.nbytes for row in rows) == LAYERS * TOP_K * sum(len(node.ids) for node in capture.graph.nodes())
    (sample,) = capture.samples()
    assert sample.routed.tolist() == [True] * (len(sample.tokens) - 1) + [False]


def test_a_branch_that_departs_keeps_the_log_probs_that_were_sampled() -> None:
    """D44: log-probs of the prompt, asked for after a mismatch, were stale or killed the engine. None are ever asked for."""
    engine = ScriptedEngine(byte_level(), [say("One."), say("Two."), say("Three.")])

    async def script(session: Session) -> None:
        first = await ask(session, START)
        second = await ask(session, [*START, first.message, Message("user", "Go on.")])
        await ask(session, [START[0], Message("user", "Cleared."), first.message, Message("user", "Go on."), second.message, START[1]])

    capture = play(engine, engine.tokenizer, script)
    assert len(capture.branches()) == 2
    for turn, call in zip(capture.graph.turns, engine.calls, strict=True):
        assert turn.log_probs.tolist() == np.array(call.log_probs, np.float32).tolist()
    assert sum(int(sample.mask.sum()) for sample in capture.samples()) == sum(len(call.sampled) for call in engine.calls)


class Broken(ScriptedEngine):
    """Gives a log-prob that is none."""

    value: float

    async def generate(self, request: GenerationRequest) -> Generation:
        generation = await super().generate(request)
        return dataclasses.replace(generation, log_probs=[*generation.log_probs[:-1], self.value])


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_fails_the_trial_and_not_the_run(value: float) -> None:
    """D38: an engine whose numbers broke must not be trained on, nor leave a capture that nobody can write."""
    engine = Broken(byte_level(), [say("One.")])
    engine.value = value

    async def script(session: Session) -> None:
        with pytest.raises(Refusal):
            await ask(session, START)

    capture = play(engine, engine.tokenizer, script)
    assert capture.engine_error == "EngineError: a sampled token has a log-probability that is no finite number"
    assert capture.graph.turns == []
