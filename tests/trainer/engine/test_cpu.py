from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.support.examples import examples
from tests.trainer.models import VOCAB, make_model, reference
from trainer.engine.base import EngineError, Generation, GenerationRequest, Sampling
from trainer.engine.cpu import CpuEngine
from trainer.engine.weights import Shape

pytestmark = pytest.mark.anyio

CONTEXT = 160
GREEDY = Sampling(temperature=0.0, max_tokens=8, stop_token_ids=())
WARM = Sampling(temperature=0.7, max_tokens=8, stop_token_ids=())


@pytest.fixture(scope="module", params=["dense", "moe", "untied"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(moe=request.param != "dense", tied=request.param != "untied")


@pytest.fixture(scope="module")
def moe() -> PreTrainedModel:
    return make_model(moe=True)


def make_engine(model: PreTrainedModel, *, slots: int = 128, seed: int = 0) -> CpuEngine:
    return CpuEngine(Shape.from_hf(model.config.to_dict()), model.state_dict(), context=CONTEXT, slots=slots, seed=seed)


async def steps(number: int = 6) -> None:
    """Let the engine, which lives in this loop, take a few steps. It has sampled a token behind the second one."""
    for _ in range(number):
        await asyncio.sleep(0)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=length).tolist()


def check(model: PreTrainedModel, tokens: list[int], answer: Generation, temperature: float, routes_from: int = 0) -> None:
    """The answer's log-probs and routes are those of transformers on prompt + answer."""
    log_probs, routes = reference(model, tokens + answer.token_ids, temperature)
    at = torch.arange(len(tokens) - 1, len(tokens) + len(answer.token_ids) - 1)
    expected = log_probs[at, torch.tensor(answer.token_ids)]
    assert np.abs(np.array(answer.log_probs) - expected.numpy()).max() < 1e-4
    if routes is None:
        assert answer.routes is None
    else:
        assert answer.routes is not None and answer.routes.dtype == np.uint8
        assert answer.routes.tolist() == routes[routes_from:-1].tolist()


async def test_turns_match_transformers_and_reuse_what_was_cached(model: PreTrainedModel) -> None:
    engine = make_engine(model)
    tokens = prompt(1, 20)
    for turn in range(3):
        answer = await engine.generate(GenerationRequest("a", tokens, WARM, routes_from=0))
        check(model, tokens, answer, WARM.temperature)
        assert (answer.stop_reason, answer.version) == ("length", 0)
        fresh = await make_engine(model, seed=99).generate(GenerationRequest("x", tokens, Sampling(0.0, 1, ())))
        greedy = reference(model, tokens)[0][-1].argmax()
        assert fresh.token_ids == [greedy]
        tokens = tokens + answer.token_ids + prompt(10 + turn, 7)


async def test_long_prompts_take_the_sorted_experts_and_match(moe: PreTrainedModel) -> None:
    tokens = prompt(2, 150)
    check(moe, tokens, await make_engine(moe).generate(GenerationRequest("a", tokens, WARM)), WARM.temperature)


async def test_routes_start_where_asked_and_cover_reused_positions(moe: PreTrainedModel) -> None:
    engine = make_engine(moe)
    tokens = prompt(3, 30)
    first = await engine.generate(GenerationRequest("a", tokens, WARM))
    later = tokens + first.token_ids + prompt(4, 5)
    again = await engine.generate(GenerationRequest("a", later, WARM, routes_from=10))
    check(moe, later, again, WARM.temperature, routes_from=10)


async def test_experts_one_by_one_are_the_same_model(moe: PreTrainedModel) -> None:
    named = dict(moe.state_dict())
    for name in [name for name in named if ".experts." in name]:
        prefix, tensor = name.rsplit(".", 1)[0], named.pop(name)
        for index, expert in enumerate(tensor):
            if name.endswith("gate_up_proj"):
                gate, up = expert.chunk(2)
                named |= {f"{prefix}.{index}.gate_proj.weight": gate, f"{prefix}.{index}.up_proj.weight": up}
            else:
                named[f"{prefix}.{index}.down_proj.weight"] = expert
    engine = CpuEngine(Shape.from_hf(moe.config.to_dict()), named, context=CONTEXT)
    assert (await engine.generate(GenerationRequest("a", prompt(5, 20), WARM))).token_ids == (
        await make_engine(moe).generate(GenerationRequest("a", prompt(5, 20), WARM))
    ).token_ids


async def test_sixty_four_sessions_at_once_equal_one_by_one(moe: PreTrainedModel) -> None:
    lengths = np.random.default_rng(6).integers(5, 60, size=64).tolist()
    prompts = [prompt(index, length) for index, length in enumerate(lengths)]
    alone = [await make_engine(moe).generate(GenerationRequest("a", tokens, GREEDY)) for tokens in prompts]
    engine = make_engine(moe, slots=48)  # fewer than sessions: some wait for a slot
    together = await asyncio.gather(
        *(engine.generate(GenerationRequest(f"s{index}", tokens, GREEDY)) for index, tokens in enumerate(prompts))
    )
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for one, other in zip(together, alone, strict=True):
        assert np.abs(np.array(one.log_probs) - np.array(other.log_probs)).max() < 1e-4


async def test_draws_depend_on_seed_and_session_not_on_company(moe: PreTrainedModel) -> None:
    tokens = prompt(7, 20)
    alone = await make_engine(moe).generate(GenerationRequest("a", tokens, WARM))
    crowd = make_engine(moe)
    answers = await asyncio.gather(*(crowd.generate(GenerationRequest(name, tokens, WARM)) for name in "cba"))
    assert answers[2].token_ids == alone.token_ids
    assert answers[1].token_ids != alone.token_ids
    assert (await make_engine(moe, seed=1).generate(GenerationRequest("a", tokens, WARM))).token_ids != alone.token_ids


async def test_draws_follow_the_distribution(moe: PreTrainedModel) -> None:
    tokens, number = prompt(8, 10), 4000
    engine = make_engine(moe)
    one = Sampling(0.5, 1, ())
    answers = await asyncio.gather(*(engine.generate(GenerationRequest(f"s{index}", tokens, one)) for index in range(number)))
    expected = reference(moe, tokens, 0.5)[0][-1].exp().numpy()
    counts = np.bincount([answer.token_ids[0] for answer in answers], minlength=VOCAB) / number
    assert np.abs(counts - expected).max() < 4 * np.sqrt(expected.max() / number)


async def test_stop_token_is_part_of_the_answer(moe: PreTrainedModel) -> None:
    tokens = prompt(9, 20)
    free = await make_engine(moe).generate(GenerationRequest("a", tokens, GREEDY))
    stop = free.token_ids[3]
    answer = await make_engine(moe).generate(GenerationRequest("a", tokens, Sampling(0.0, 8, (stop,))))
    assert answer.stop_reason == "stop"
    assert answer.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_cancelling_frees_the_row_and_others_go_on(moe: PreTrainedModel) -> None:
    engine = make_engine(moe, slots=1)
    running = asyncio.create_task(engine.generate(GenerationRequest("a", prompt(1, 10), Sampling(1.0, 100, ()))))
    waiting = asyncio.create_task(engine.generate(GenerationRequest("b", prompt(2, 10), GREEDY)))
    await steps()
    assert engine.load == (1, 1, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    check(moe, prompt(2, 10), await waiting, 1.0)
    assert engine.load == (0, 0, 1)
    engine.release("b")
    assert engine.load == (0, 0, 0)


async def test_what_a_cancelled_row_left_is_still_a_valid_prefix(moe: PreTrainedModel) -> None:
    engine = make_engine(moe)
    running = asyncio.create_task(engine.generate(GenerationRequest("a", prompt(1, 30), Sampling(1.0, 100, ()))))
    await steps()
    running.cancel()
    tokens = prompt(1, 30) + prompt(2, 5)
    check(moe, tokens, await engine.generate(GenerationRequest("a", tokens, WARM)), WARM.temperature)


async def test_one_session_may_ask_twice_at_once(moe: PreTrainedModel) -> None:
    engine = make_engine(moe)
    prompts = [prompt(1, 30) + prompt(index, 5) for index in (2, 3)]
    for tokens, answer in zip(
        prompts, await asyncio.gather(*(engine.generate(GenerationRequest("a", tokens, WARM)) for tokens in prompts)), strict=True
    ):
        check(moe, tokens, answer, WARM.temperature)
    engine.release("a")
    assert engine.load == (0, 0, 0)


@pytest.mark.parametrize("running", [True, False])
async def test_release_ends_requests_of_that_session_only(moe: PreTrainedModel, running: bool) -> None:
    engine = make_engine(moe)
    mine, other = (asyncio.create_task(engine.generate(GenerationRequest(name, prompt(1, 30), Sampling(0.0, 50, ())))) for name in "ab")
    await steps(6 if running else 1)
    engine.release("a")
    partial = await mine
    assert partial.stop_reason == "aborted" and bool(partial.token_ids) == running
    assert len((await other).token_ids) == 50
    assert engine.load == (0, 0, 1)


async def test_new_weights_drop_the_old_cache(moe: PreTrainedModel) -> None:
    engine, other = make_engine(moe), make_model(moe=True, seed=1)
    tokens = prompt(1, 20)
    old = await engine.generate(GenerationRequest("a", tokens, WARM))
    engine.set_weights(other.state_dict(), version=3)
    assert engine.load == (0, 0, 0)
    tokens = tokens + old.token_ids + prompt(2, 5)
    answer = await engine.generate(GenerationRequest("a", tokens, WARM))
    check(other, tokens, answer, WARM.temperature)
    assert (old.version, answer.version) == (0, 3)


async def test_new_weights_are_copied(moe: PreTrainedModel) -> None:
    source = make_model(moe=True, seed=1)
    engine = make_engine(moe)
    engine.set_weights(source.state_dict(), version=1)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()
    check(make_model(moe=True, seed=1), prompt(1, 20), await engine.generate(GenerationRequest("a", prompt(1, 20), WARM)), WARM.temperature)


async def test_new_weights_and_abort_end_requests_with_what_they_have(moe: PreTrainedModel) -> None:
    for end in ("abort", "swap"):
        engine = make_engine(moe, slots=1)
        running = asyncio.create_task(engine.generate(GenerationRequest("a", prompt(1, 20), Sampling(1.0, 120, ()), routes_from=15)))
        waiting = asyncio.create_task(engine.generate(GenerationRequest("b", prompt(2, 20), Sampling(1.0, 3, ()))))
        await steps()
        if end == "abort":
            engine.abort_all()
            nothing = await waiting
            assert (nothing.stop_reason, nothing.token_ids) == ("aborted", [])
        else:
            engine.set_weights(make_model(moe=True, seed=1).state_dict(), version=1)
            assert (await waiting).version == 1
        partial = await running
        assert partial.stop_reason == "aborted" and partial.version == 0
        assert 1 <= len(partial.token_ids) == len(partial.log_probs) < 120
        check(moe, prompt(1, 20), partial, 1.0, routes_from=15)


@pytest.mark.parametrize(
    ("tokens", "sampling", "routes_from", "message"),
    [
        (prompt(1, 150), Sampling(1.0, 11, ()), 0, "exceed the context of 160"),
        ([], WARM, 0, "token ids"),
        ([VOCAB], WARM, 0, "token ids"),
        ([1], Sampling(1.0, 0, ()), 0, "cannot sample"),
        ([1], Sampling(float("nan"), 1, ()), 0, "cannot sample"),
        ([1], WARM, 1, "routes_from 1"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    moe: PreTrainedModel, tokens: list[int], sampling: Sampling, routes_from: int, message: str
) -> None:
    engine = make_engine(moe)
    with pytest.raises(EngineError, match=message):
        await engine.generate(GenerationRequest("a", tokens, sampling, routes_from))
    assert engine.load == (0, 0, 0)


async def test_a_full_context_is_served(moe: PreTrainedModel) -> None:
    answer = await make_engine(moe).generate(GenerationRequest("a", prompt(1, 150), Sampling(1.0, 10, ())))
    assert len(answer.token_ids) == 10


async def test_diverged_weights_are_an_error_and_leave_nothing_behind(moe: PreTrainedModel) -> None:
    engine = make_engine(moe)
    engine.set_weights({name: tensor * float("nan") for name, tensor in moe.state_dict().items()}, version=1)
    answers = await asyncio.gather(
        *(engine.generate(GenerationRequest(f"s{i}", prompt(i, 40), GREEDY)) for i in range(3)), return_exceptions=True
    )
    assert all(isinstance(answer, EngineError) and "diverged" in str(answer) for answer in answers)
    engine.set_weights(moe.state_dict(), version=2)
    answers = await asyncio.gather(*(engine.generate(GenerationRequest(f"s{i}", prompt(i, 10 + 10 * i), GREEDY)) for i in range(3)))
    for index, answer in enumerate(answers):
        check(moe, prompt(index, 10 + 10 * index), answer, 1.0)


def test_unsupported_models_and_incomplete_weights_are_refused(moe: PreTrainedModel) -> None:
    config = moe.config.to_dict()
    with pytest.raises(ValueError, match="attention_bias"):
        Shape.from_hf(config | {"attention_bias": True})
    with pytest.raises(ValueError, match="model_type = 'llama'"):
        Shape.from_hf(config | {"model_type": "llama"})
    weights = dict(moe.state_dict())
    del weights["model.layers.1.self_attn.q_proj.weight"]
    with pytest.raises(ValueError, match=r"lack model\.layers\.1\.self_attn\.q_proj\.weight"):
        CpuEngine(Shape.from_hf(config), weights, context=CONTEXT)


@examples(25)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)),
        min_size=1,
        max_size=8,
    )
)
def test_any_history_of_prompts_gives_what_a_fresh_engine_gives(turns: list[tuple[str, int, list[int]]]) -> None:
    """Each turn keeps some prefix of everything its session has seen, sampled tokens too, and goes on differently."""

    async def run() -> None:
        model = make_model(moe=True)
        engine = make_engine(model, slots=2)
        seen: dict[str, list[int]] = {"a": [], "b": []}
        for session, keep, new in turns:
            tokens = seen[session][:keep] + new
            answer = await engine.generate(GenerationRequest(session, tokens, Sampling(1.0, 4, ())))
            check(model, tokens, answer, 1.0)
            seen[session] = tokens + answer.token_ids

    asyncio.run(run())
