from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import httpx2
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from tokenizers import Tokenizer

from tests.trainer.scripted import ScriptedEngine
from trainer.capture.capture import Capture
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.vocabulary import byte_level


@dataclass
class Rollout:
    """One open rollout of a running proxy, with the official clients pointed at it."""

    proxy: Proxy
    engine: ScriptedEngine
    id: str
    url: str
    key: str
    openai: AsyncOpenAI
    anthropic: AsyncAnthropic
    http: httpx.AsyncClient

    async def close(self) -> Capture:
        return await self.proxy.close(self.id)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (what is waited for lies in the server, which has no event for it)
            await asyncio.sleep(0.005)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()


@pytest.fixture(scope="session")
def rendering(tokenizer: Tokenizer) -> Rendering:
    return Rendering(tokenizer)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def patience() -> Patience:
    return Patience(backoff=0.001, longest_backoff=0.01)


@pytest.fixture
async def proxy(engine: ScriptedEngine, rendering: Rendering, patience: Patience) -> AsyncIterator[Proxy]:
    proxy = Proxy(engine, rendering, patience)
    await proxy.start("127.0.0.1", 0)
    yield proxy
    await proxy.stop()


@pytest.fixture
def max_turns() -> int:
    return 20


@pytest.fixture
def context() -> int:
    return 20_000


@pytest.fixture
def limits(max_turns: int, context: int) -> Limits:
    return Limits(max_turns, context)


@pytest.fixture
async def rollout(proxy: Proxy, engine: ScriptedEngine, rendering: Rendering, limits: Limits) -> AsyncIterator[Rollout]:
    key = secrets.token_urlsafe(24)
    sampling = Sampling(temperature=1.0, max_tokens=500, stop_token_ids=rendering.stop_token_ids)
    url = await proxy.open("r-1", key, sampling, limits, harness="test")
    # Plain HTTP: loading certificates would cost 0.2 s a client. The SDKs want their own httpx.
    async with httpx.AsyncClient(verify=False, timeout=60) as http, httpx2.AsyncClient(verify=False, timeout=60) as sdk:  # noqa: S501
        openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, http_client=sdk)
        anthropic = AsyncAnthropic(base_url=url, api_key=key, max_retries=0, http_client=sdk)
        yield Rollout(proxy, engine, "r-1", url, key, openai, anthropic, http)
