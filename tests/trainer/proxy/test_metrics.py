"""What Prometheus learns of a proxy: a real scrape of its own listener, which agents' keys do not open. And what is left in it of clients
and rollouts that are gone."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.trainer.proxy.conftest import until
from tests.trainer.scripted import ScriptedEngine, say
from trainer.engine.base import EngineUnavailable, Sampling
from trainer.proxy.exporter import Exporter
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy

pytestmark = pytest.mark.anyio

KEY, TOKEN = "an-agents-key", "token-of-the-operator"
SAMPLING, LIMITS = Sampling(1.0, 20, ()), Limits(50, 4000)
HELLO = {"model": "policy", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}
Samples = dict[tuple[str, ...], float]


class Scraped:
    def __init__(self, proxy: Proxy, engine: ScriptedEngine, rollout: httpx.AsyncClient, metrics: httpx.AsyncClient) -> None:
        self.proxy, self.engine, self.rollout, self.metrics = proxy, engine, rollout, metrics

    async def scrape(self) -> Samples:
        """(name, label values) → value."""
        answer = await self.metrics.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
        families = text_string_to_metric_families(answer.text)
        return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


@pytest.fixture
async def scraped(tokenizer: Tokenizer, rendering: Rendering) -> AsyncIterator[Scraped]:
    engine = ScriptedEngine(tokenizer)
    proxy = Proxy(engine, rendering, Patience(backoff=0, head=3600))
    await proxy.start()
    exporter = Exporter(proxy.families, TOKEN)
    url = await proxy.open("r1", KEY, SAMPLING, LIMITS, "mini")
    headers = {"authorization": f"Bearer {KEY}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=60) as rollout,
        httpx.AsyncClient(base_url=await exporter.start(), trust_env=False, timeout=60) as metrics,
    ):
        yield Scraped(proxy, engine, rollout, metrics)
    await exporter.stop()
    await proxy.stop()


async def test_a_scrape_says_what_came_in_what_went_out_and_what_went_wrong(scraped: Scraped) -> None:
    scraped.engine.script = [say("hi"), EngineUnavailable("no replica"), say("hello")]
    assert (await scraped.rollout.post("/v1/chat/completions", json=HELLO)).status_code == 200
    assert (await scraped.rollout.post("/v1/messages", json=HELLO)).status_code == 200
    assert (await scraped.rollout.post("/v1/messages/count_tokens", json=HELLO)).status_code == 200
    assert (await scraped.rollout.post("/v1/responses", json={"input": 3})).status_code == 400
    assert (await scraped.rollout.post("/v1/responses", json={}, headers={"authorization": "Bearer no"})).status_code == 401
    found = await scraped.scrape()
    assert {key[1:]: value for key, value in found.items() if key[0] == "lego_rl_proxy_calls_total"} == {
        ("openai_chat", "200"): 1,
        ("anthropic", "200"): 1,
        ("anthropic_count_tokens", "200"): 1,
        ("openai_responses", "400"): 1,
        ("openai_responses", "401"): 1,
    }
    asked = [call.prompt for call in scraped.engine.calls]
    assert found["lego_rl_proxy_tokens_total", "in"] == sum(map(len, asked))
    assert found["lego_rl_proxy_tokens_total", "out"] == sum(len(call.sampled) for call in scraped.engine.calls)
    assert found["lego_rl_proxy_added_seconds_count",] == found["lego_rl_proxy_added_seconds_bucket", "+Inf"] == 2
    assert found["lego_rl_proxy_added_seconds_sum",] >= 0
    assert found["lego_rl_proxy_engine_retries_total",] == 1
    assert found["lego_rl_proxy_sessions_open",] == 1
    assert found["lego_rl_proxy_admission_wait_seconds_count",] == found["lego_rl_proxy_undelivered_total",] == 0


async def test_clients_that_leave_and_rollouts_that_end_are_counted(scraped: Scraped) -> None:
    scraped.engine.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(scraped.rollout.post("/v1/chat/completions", json=HELLO))
        await until(lambda: scraped.engine.started > 0)
        leaving.cancel()
    await until(lambda: scraped.engine.cancelled == 1)
    await scraped.proxy.close("r1")
    found = await scraped.scrape()
    assert found["lego_rl_proxy_calls_total", "openai_chat", "gone"] == 1
    assert found["lego_rl_proxy_sessions_open",] == 0


async def test_agents_learn_nothing(scraped: Scraped) -> None:
    for token in (KEY, TOKEN[:-1], TOKEN + "s"):
        assert (await scraped.metrics.get("/metrics", headers={"authorization": f"Bearer {token}"})).status_code == 401
    assert (await scraped.metrics.get("/metrics")).status_code == 401
    with_token = {"authorization": f"Bearer {TOKEN}"}
    root = str(scraped.rollout.base_url).partition("/r/")[0]
    for path in ("/metrics", "/r/r1/metrics", "/r/r1/v1/metrics"):
        assert (await scraped.metrics.get(root + path, headers=with_token)).status_code == 404


async def test_a_connection_that_ended_leaves_nothing(scraped: Scraped) -> None:
    """Not even for as long as a silent client has to send its first request."""
    scraped.engine.write = lambda: say("hi")
    for _ in range(3):
        async with httpx.AsyncClient(
            base_url=scraped.rollout.base_url, headers=scraped.rollout.headers, trust_env=False, timeout=60
        ) as client:
            assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200

    def nothing_left() -> bool:
        gc.collect()
        return not any(issubclass(type(thing), HttpToolsProtocol) and thing.transport.is_closing() for thing in gc.get_objects())

    await until(nothing_left)


async def test_the_end_of_a_rollout_is_remembered_for_a_while(scraped: Scraped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.proxy.service.MAX_CLOSED", 2)
    urls = [await scraped.proxy.open(f"late-{number}", KEY, SAMPLING, LIMITS, "mini") for number in range(3)]
    for number in range(3):
        await scraped.proxy.close(f"late-{number}")
    answers = [await scraped.rollout.post(f"{url}/v1/messages", json=HELLO) for url in urls]
    assert [answer.status_code for answer in answers] == [401, 404, 404]
