"""What verl's client is asked, and what becomes of its answers and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from server.schemas.runspec import Admission, Model, RunSpec
from server.schemas.runspec import Rollout as RolloutSpec
from trainer.engine.base import KV, EngineError, EngineUnavailable, GenerationRequest, Sampling
from trainer.proxy.gate import Rule
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.metrics import Metrics
from trainer.proxy.upstream import Upstream
from trainer.rollout.limits import gate_rule, rollout_limits
from trainer.rollout.verl_engine import VerlEngine

pytestmark = pytest.mark.anyio

SAMPLING = Sampling(0.7, 9, (5,))
HELD = KV(4, 100, {"a": 1}, {"a": 30})


class Client:
    """The surface of verl's LLMServerClient."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None
        self.kv = HELD
        """Of the replica that answers."""

    async def generate(self, request_id: str, **asked: Any) -> Any:
        self.calls.append((request_id, asked))
        if self.error is not None:
            raise self.error
        extra = {"global_steps": 3, "kv": self.kv}
        return SimpleNamespace(token_ids=[1, 5], log_probs=[-0.1, -0.2], routed_experts=None, stop_reason="stop", extra_fields=extra)


async def test_a_call_carries_session_salt_and_the_sessions_that_are_over() -> None:
    client = Client()
    engine = VerlEngine(client, "sticky")
    assert engine.kv() is None
    engine.release("old")
    answer = await engine.generate(GenerationRequest("a", np.array([1, 2], np.int32), SAMPLING, 1, salt="a/3"))
    await engine.generate(GenerationRequest("a", [1, 2], SAMPLING))
    (name, asked), (_, later) = client.calls
    assert (name, asked["session"], asked["salt"], asked["routes_from"], asked["released"]) == ("a", "a", "a/3", 1, ["old"])
    assert asked["prompt_ids"] == [1, 2] and later["released"] == []
    assert asked["sampling_params"] == {"temperature": 0.7, "max_tokens": 9, "stop_token_ids": [5], "logprobs": True}
    assert (answer.token_ids, answer.version, engine.kv()) == ([1, 5], 3, HELD)


async def test_the_cache_is_that_of_all_replicas_whichever_answered_last() -> None:
    client = Client()
    engine = VerlEngine(client, "spread")
    metrics = Metrics(engine, Upstream(engine, Patience()), None)

    async def answered(kv: KV) -> dict[str, float]:
        client.kv = kv
        await engine.generate(GenerationRequest("a", [1], SAMPLING))
        return metrics.take()

    assert (await answered(KV(4, 100, {"a": 1}, {"a": 30}, 5, 1000, 400, "one")))["lego/kv/reused_share"] == 0.4
    step = await answered(KV(4, 100, {"a": 1, "b": 2}, {"a": 50, "b": 9}, 2, 100, 90, "other"))
    assert (step["lego/kv/reused_share"], step["lego/kv/evicted"]) == (0.9, 2)
    step = await answered(KV(4, 100, {"a": 2}, {"a": 40}, 6, 1100, 420, "one"))
    assert (step["lego/kv/reused_share"], step["lego/kv/evicted"]) == (0.2, 1)
    assert engine.kv() == KV(8, 100, {"a": 3, "b": 2}, {"a": 50, "b": 9}, 8, 1200, 510)


@pytest.mark.parametrize(("routing", "names"), [("sticky", 1), ("spread", 3)])
async def test_routing_gives_the_balancer_one_name_or_many(routing: Literal["sticky", "spread"], names: int) -> None:
    client = Client()
    engine = VerlEngine(client, routing)
    for _ in range(3):
        await engine.generate(GenerationRequest("a", [1], SAMPLING))
    assert len({name for name, _ in client.calls}) == names
    assert {asked["session"] for _, asked in client.calls} == {"a"}


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ActorUnavailableError("no answer", b"0" * 16), True),
        (RayTaskError("generate", "trace", EngineUnavailable("busy")).as_instanceof_cause(), True),
        (RayTaskError("generate", "trace", EngineError("too long")).as_instanceof_cause(), False),
        (ActorDiedError(), False),
    ],
)
async def test_only_trouble_that_passes_is_tried_again(error: Exception, passes: bool) -> None:
    client = Client()
    client.error = error
    engine = VerlEngine(client, "sticky")
    with pytest.raises(EngineError, match="generation failed") as caught:
        await engine.generate(GenerationRequest("a", [1], SAMPLING))
    assert isinstance(caught.value, EngineUnavailable) == passes
    assert engine.gone is (caught.value if isinstance(error, ActorDiedError) else None)


def test_a_runspec_says_what_a_rollout_may_use() -> None:
    spec = RunSpec.model_validate(
        {
            "model": Model(path="p", context=500),
            "harnesses": [{"name": "h", "version": "1"}],
            "data": {"family": "onebug"},
            "rollout": RolloutSpec(max_turns=3, prompt_budget=200, token_budget=900, no_tool_call_cap=2),
        }
    )
    assert rollout_limits(spec) == Limits(3, 500, prompt=200, response=170_000, budget=900, idle_turns=2)
    usual = spec.model_copy(update={"model": Model(path="p"), "rollout": RolloutSpec()})
    assert rollout_limits(usual) == Limits(200, 200_000, prompt=30_000, response=170_000)
    assert gate_rule(spec.rollout.admission) is None
    assert gate_rule(Admission(enabled=True)) == Rule(watermark=0.85, resident=0.8, ownership=60, longest_wait=120)
