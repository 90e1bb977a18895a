"""Random conversations against a session: whatever the harness does to its history, tokens stay what the engine saw."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import numpy as np
from hypothesis import Phase, given
from hypothesis import strategies as st

from server.schemas.capture import BranchClass, BranchReason, Exclusion
from server.schemas.runspec import History, TrainRule
from tests.support.examples import examples
from tests.trainer.capture.careless import SAMPLED, STEPS, TOKENIZER, Careless, Watched
from tests.trainer.capture.witness import Witness, check
from tests.trainer.equal import assert_same_capture
from tests.trainer.scripted import ScriptedEngine
from trainer.capture.capture import Capture
from trainer.capture.file import from_bytes
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits
from trainer.proxy.refusal import Refusal
from trainer.proxy.session import Session

RENDERINGS = [Watched(TOKENIZER, thinking=thinking, history=history) for history in History for thinking in (False, True)]
SCENARIO = {
    "steps": st.lists(st.sampled_from(STEPS), max_size=12),
    "texts": st.lists(st.integers(0, len(SAMPLED) - 1), min_size=1, max_size=12),
    "seed": st.integers(0, 2**16),
    "form": st.integers(0, len(RENDERINGS) - 1),
}
QUICK = (Phase.explicit, Phase.generate)


def play(
    steps: list[str], texts: list[int], seed: int, form: int, moe: bool = False, context: int = 4000, disguise: str = ""
) -> tuple[Capture, Witness]:
    count, pauses = itertools.count(), np.random.default_rng(seed)
    engine = ScriptedEngine(TOKENIZER, routes=moe, write=lambda: SAMPLED[texts[(n := next(count)) % len(texts)]](n))
    witness = Witness(engine, lambda: int(pauses.integers(3)))
    sampling = Sampling(1.0, 150, RENDERINGS[form].stop_token_ids)

    async def run() -> Session:
        session = Session("r-1", "key", witness, RENDERINGS[form], sampling, Limits(max_turns=90, context=context), harness="test")
        harness = Careless(session, witness, RENDERINGS[form], seed, disguise)
        try:
            for name in steps:
                await harness.step(name)
                witness.new_weights()
        except Refusal as refusal:
            assert refusal.reason in ("overflow", "turn_cap")
        await session.close()
        return session

    return asyncio.run(run()).capture, witness


@examples(150, phases=QUICK)
@given(**SCENARIO, moe=st.booleans())
def test_tokens_are_what_the_engine_saw(steps: list[str], texts: list[int], seed: int, form: int, moe: bool) -> None:
    """Also reports A8 and A9 (`test_field_reports`): ids, mask, log-probs and routes are aligned, the mask holds sampled tokens only."""
    capture, witness = play(steps, texts, seed, form, moe)
    check(capture, witness)
    assert capture.proxy_error is capture.engine_error is None and capture.violations == []
    if capture.graph.turns:
        assert [branch.reason for branch in capture.branches()].count(BranchReason.ROOT) == 1
    for sample in capture.samples():
        auxiliary = sample.branch_class is BranchClass.AUXILIARY
        assert sample.excluded in ((Exclusion.AUXILIARY, Exclusion.UNDELIVERED) if auxiliary else (None, Exclusion.UNDELIVERED))
    kept = [turn for branch in capture.branches() if branch.excluded is not Exclusion.UNDELIVERED for turn in branch.owned]
    assert {turn.index for turn in capture.graph.turns if turn.returned} <= {turn.index for turn in kept}
    unproven = Counter(
        turn.call for turn in kept if not turn.returned
    )  # of answers to one request the client kept one, unless it shows more
    assert max(unproven.values(), default=1) == 1
    assert unproven.keys().isdisjoint(turn.call for turn in kept if turn.returned)


@examples(60, phases=QUICK)
@given(**SCENARIO, moe=st.booleans())
def test_writing_and_reading_a_capture_changes_nothing(steps: list[str], texts: list[int], seed: int, form: int, moe: bool) -> None:
    capture, witness = play(steps, texts, seed, form, moe)
    again, trial_id = from_bytes(capture.to_bytes("t-1"))
    assert trial_id == "t-1"
    assert_same_capture(capture, again)
    check(again, witness)
    assert again.to_bytes("t-1") == capture.to_bytes("t-1")


@examples(80, phases=QUICK)
@given(**SCENARIO, disguise=st.text("ab \n<>é", min_size=1, max_size=9).map(lambda text: f"Q{text}"))
def test_what_was_not_sampled_changes_no_mask_and_no_log_prob(
    steps: list[str], texts: list[int], seed: int, form: int, disguise: str
) -> None:
    """Every text of the harness is another one, and the arguments it sends back are edited: the same tokens are trained, as they were."""
    plain, _ = play(steps, texts, seed, form, context=10**6)
    disguised, witness = play(steps, texts, seed, form, context=10**6, disguise=disguise)
    check(disguised, witness)
    assert [turn.sampled.tolist() for turn in plain.graph.turns] == [turn.sampled.tolist() for turn in disguised.graph.turns]
    for rule in TrainRule:
        assert trained(plain, rule) == trained(disguised, rule)


def trained(capture: Capture, rule: TrainRule) -> list[tuple[object, ...]]:
    """Of every branch: its fate, and its masked ids with log-probs and versions."""
    return [
        (
            sample.excluded,
            sample.tokens[sample.mask].tolist(),
            sample.log_probs[sample.mask].tolist(),
            sample.versions[sample.mask].tolist(),
        )
        for sample in capture.samples(rule)
    ]
