"""The admission gate: its rules one by one, then in front of a real engine that is too small."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.trainer.models import make_model
from tests.trainer.scripted import ScriptedEngine
from trainer.engine.base import KV, GenerationRequest, Sampling
from trainer.engine.cpu import CpuEngine
from trainer.engine.weights import Shape
from trainer.proxy.gate import Call, Gate, Rule
from trainer.proxy.limits import Patience
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.proxy.upstream import Upstream
from trainer.proxy.waiting import Gated

RULE = Rule(watermark=0.5, resident=0.5, ownership=10, longest_wait=60)


def kv(capacity: int = 4, held: dict[str, int] | None = None, resident: dict[str, int] | None = None) -> KV:
    return KV(capacity, 100, held or {}, resident or {})


def sessions(calls: list[Call]) -> list[str]:
    return [call.session for call in calls]


def test_new_sessions_pass_up_to_the_watermark_and_then_wait_in_order() -> None:
    gate = Gate(RULE)
    for name in "abcd":
        gate.arrive(name, 90, now=0)
    running = gate.admit(0, kv())
    assert sessions(running) == ["a", "b"] and gate.queue == 2
    gate.done(running[0], now=1)
    assert gate.admit(1, kv()) == []  # a still owns its KV
    assert sessions(gate.admit(11, kv())) == ["c"]  # a's window is over, b runs
    gate.forget("a")
    assert sessions(gate.admit(12, kv())) == [] and gate.queue == 1


def test_a_session_passes_while_it_owns_its_kv() -> None:
    gate = Gate(RULE)
    first = [gate.arrive(name, 90, now=0) for name in "ab"]
    assert gate.admit(0, kv()) == first
    gate.done(first[0], now=1)
    gate.arrive("c", 90, now=2)
    again = gate.arrive("a", 90, now=3)
    assert gate.admit(3, kv()) == [again]  # past c, whose turn it is: a takes no new room


def test_a_resident_prefix_passes_and_a_small_one_does_not() -> None:
    gate = Gate(RULE)
    gate.arrive("a", 90, now=0)
    gate.arrive("b", 90, now=0)
    gate.admit(0, kv())
    gate.arrive("c", 90, now=1)
    gate.arrive("d", 90, now=1)
    assert sessions(gate.admit(1, kv(resident={"c": 44, "d": 45}))) == ["d"]


def test_a_call_needs_the_room_of_its_prompt() -> None:
    gate = Gate(RULE)
    gate.arrive("a", 90, now=0)
    gate.arrive("b", 250, now=0)
    assert sessions(gate.admit(0, kv(capacity=6))) == ["a"]  # 1 + 3 units are above 3
    assert gate.admit(0, kv(capacity=8)) != []


def test_nobody_waits_for_ever_and_nobody_waits_for_nothing() -> None:
    gate = Gate(RULE)
    gate.arrive("huge", 10_000, now=0)
    assert sessions(gate.admit(0, kv())) == ["huge"]  # nobody else is there
    gate.arrive("b", 90, now=1)
    assert gate.admit(60.9, kv()) == [] and gate.next_change(60.9) == pytest.approx(0.1)
    assert sessions(gate.admit(61, kv())) == ["b"] and gate.forced == 1
    assert gate.next_change(61) is None


def test_a_newcomer_never_overtakes_another_one() -> None:
    gate = Gate(RULE)
    gate.arrive("a", 90, now=0)
    gate.admit(0, kv())
    big, small = gate.arrive("big", 150, now=1), gate.arrive("small", 10, now=2)
    assert gate.admit(2, kv()) == []  # small would fit, big does not
    gate.give_up(big)
    assert gate.admit(3, kv()) == [small]


ARRIVALS = st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 300), st.integers(0, 20)), max_size=40)


@examples(60)
@given(ARRIVALS, st.randoms(use_true_random=False))
def test_every_call_is_admitted_once_and_within_the_longest_wait(arrivals: list[tuple[str, int, int]], random: Any) -> None:
    gate, now = Gate(RULE), 0
    running: list[Call] = []
    admitted = 0
    for name, tokens, pause in arrivals:
        gate.arrive(name, tokens, now)
        for call in gate.admit(now, kv()):
            running.append(call)
            admitted += 1
        if running and random.random() < 0.5:
            gate.done(running.pop(random.randrange(len(running))), now)
        now += pause
    while gate.queue:
        seconds = gate.next_change(now)
        assert seconds is not None and seconds <= RULE.longest_wait
        now += int(seconds)
        batch = gate.admit(now, kv())
        admitted += len(batch)
        assert all(now - call.since <= RULE.longest_wait + 20 for call in batch)
    assert admitted == len(arrivals)


@pytest.mark.anyio
async def test_a_gate_keeps_the_kv_of_those_who_own_it(tokenizer: Any) -> None:
    """Six rollouts of three turns on an engine with room for four: without the gate they evict each other, with it nobody does."""
    model = make_model(moe=False)
    counts = {}
    for gated in (False, True):
        engine = CpuEngine(Shape.from_hf(model.config.to_dict()), model.state_dict(), context=160, slots=4)
        upstream = Upstream(engine, Patience())
        gate = Gated(upstream, engine, Rule(watermark=1.0, resident=0.5, ownership=30, longest_wait=60))
        entrance = gate if gated else upstream

        async def converse(session: str) -> None:
            prompt = [hash(session) % 90 + 1] * 20
            for _ in range(3):
                answer = await entrance.generate(GenerationRequest(session, prompt, Sampling(1.0, 8, ())))  # noqa: B023
                prompt = [*prompt, *answer.token_ids, 5, 6, 7]
                await asyncio.sleep(0.01)  # the harness runs a command
            engine.release(session)  # noqa: B023
            gate.release(session)  # noqa: B023

        await asyncio.gather(*(converse(f"s{i}") for i in range(6)))
        seen = engine.kv()
        counts[gated] = (seen.evicted, round(seen.reused / seen.prompted, 2))
        waits = gate.take()
        assert (waits.admitted, waits.forced) == ((18, 0) if gated else (0, 0))
        assert (waits.waited > 0, waits.queue > 0) == (gated, gated)
    assert counts[True][0] == 0 < counts[False][0]
    assert counts[True][1] > counts[False][1]


@pytest.mark.anyio
async def test_a_waiting_call_can_be_cancelled() -> None:
    model = make_model(moe=False)
    engine = CpuEngine(Shape.from_hf(model.config.to_dict()), model.state_dict(), context=160, slots=1)
    gate = Gated(engine, engine, Rule(watermark=1.0, resident=0.5, ownership=30, longest_wait=60))
    calls = [asyncio.create_task(gate.generate(GenerationRequest(name, [1, 2, 3], Sampling(1.0, 40, ())))) for name in "abc"]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calls[1].cancel()
    await calls[0]
    gate.release("a")
    assert len((await calls[2]).token_ids) == 40
    assert calls[1].cancelled() and gate.take().admitted == 2


def test_an_engine_without_kv_facts_is_refused(engine: ScriptedEngine, rendering: Rendering) -> None:
    with pytest.raises(ValueError, match="reports its KV"):
        Proxy(engine, rendering, admission=RULE)
