"""Recordings through rollouts of a real proxy, over HTTP."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from server.schemas.runspec import History
from trainer.capture.capture import Capture
from trainer.engine.base import Sampling
from trainer.proxy.limits import Limits, Patience
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy
from trainer.replay.answers import Answer, BadAnswer, read
from trainer.replay.engine import Call, RecordedEngine, Script
from trainer.replay.ids import Ids
from trainer.replay.plan import Step, plan
from trainer.replay.recording import load
from trainer.replay.tokenizer import Spelling, make
from trainer.replay.turns import usable

CONTEXT = 100_000_000
"""No recording comes near it: refusals of the recording server are not played again."""
PATIENCE = Patience(attempts=1000, backoff=0)
"""As often as it was recorded, and at once: waiting is not played."""
DROPPED_HEADERS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding", "authorization", "x-api-key"}


@dataclass(frozen=True, eq=False, repr=False)
class Played:
    """`skipped` exchanges would not have happened behind this proxy. `problems` are what went wrong on the wire, a line each."""

    path: Path
    exchanges: int
    skipped: int
    capture: Capture
    calls: list[Call]
    problems: list[str]


@dataclass
class _Rollout:
    client: httpx.AsyncClient
    script: Script
    url: str
    key: str
    ids: Ids = field(default_factory=Ids)
    problems: list[str] = field(default_factory=list)


def files(paths: Sequence[Path]) -> list[Path]:
    """Recordings among files and folders. Raises FileNotFoundError when a path holds none."""
    found = []
    for path in paths:
        here = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
        if not here:
            raise FileNotFoundError(f"{path} is no recording and holds none: expected .jsonl files")
        found += here
    return found


@contextmanager
def player(history: History) -> Iterator[Callable[[Path], Played]]:
    """A running proxy; what it yields plays one recording, and raises BadRecording."""
    tokenizer = make()
    rendering, engine = Rendering(tokenizer, thinking=True, history=history), RecordedEngine(Spelling(tokenizer))
    proxy = Proxy(engine, rendering, PATIENCE)
    with asyncio.Runner() as runner:
        runner.run(proxy.start())
        yield lambda path: runner.run(_file(path, proxy, engine, rendering.stop_token_ids))
        runner.run(proxy.stop())


async def _file(path: Path, proxy: Proxy, engine: RecordedEngine, stop_token_ids: tuple[int, ...]) -> Played:
    exchanges = load(path)
    steps = plan(exchanges)
    rollout_id, key = secrets.token_hex(8), secrets.token_urlsafe(16)
    script, sampling = engine.script(rollout_id), Sampling(1.0, CONTEXT, stop_token_ids)
    url = await proxy.open(rollout_id, key, sampling, Limits(max_turns=len(exchanges) + 1, context=CONTEXT), harness=path.parent.name)
    async with httpx.AsyncClient(verify=False, timeout=60) as client:  # noqa: S501  (plain HTTP on loopback)
        rollout = _Rollout(client, script, url, key)
        await _play(steps, rollout)
    capture = await proxy.close(rollout_id)
    problems = [*rollout.problems, *script.unexpected]
    return Played(path, len(exchanges), len(exchanges) - len(steps), capture, list(script.calls.values()), problems)


async def _play(steps: Sequence[Step], rollout: _Rollout) -> None:
    """Begin the steps one after another, each when the answers that it was recorded after are there."""
    tasks: dict[int, asyncio.Task[None]] = {}
    calls = {step.exchange.i: rollout.script.prepare(step) for step in steps if step.exchange.model_call}
    for step in steps:
        await asyncio.gather(*(tasks[before.exchange.i] for before in step.after))
        call = calls.get(step.exchange.i)
        if call is None:
            tasks[step.exchange.i] = asyncio.create_task(_side(step, rollout))
            continue
        rollout.script.expect(call)
        tasks[step.exchange.i] = asyncio.create_task(_call(step, call, rollout))
        await _either(call.arrived, tasks[step.exchange.i])
    await asyncio.gather(*tasks.values())


async def _either(event: asyncio.Event, task: asyncio.Task[Any]) -> None:
    happens = asyncio.create_task(event.wait())
    await asyncio.wait({happens, task}, return_when=asyncio.FIRST_COMPLETED)
    happens.cancel()


async def _side(step: Step, rollout: _Rollout) -> None:
    """What is no model call must be answered, the same each time, and leave no trace."""
    answers = [await rollout.client.send(_request(step, rollout)) for _ in range(2)]
    if answers[0].status_code != 200 or answers[0].content != answers[1].content:
        rollout.problems.append(f"exchange {step.exchange.i}: {step.exchange.method} {step.exchange.path} got {answers[0].status_code}")


async def _call(step: Step, call: Call, rollout: _Rollout) -> None:
    request = _request(step, rollout)
    if step.hangs_up:
        sending = asyncio.create_task(rollout.client.send(request))
        await _either(call.arrived, sending)
        if sending.done():
            rollout.problems.append(f"exchange {step.exchange.i}: answered without the engine")
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        return
    try:
        response = await rollout.client.send(request)
        if response.status_code != 200:
            raise BadAnswer(f"status {response.status_code} {response.text[:200]}")
        answer = read(step.exchange.path, response.content, stream=step.exchange.body.get("stream") is True)
    except (BadAnswer, httpx.HTTPError) as error:
        rollout.problems.append(f"exchange {step.exchange.i}: {type(error).__name__} {error}")
        return
    rollout.problems += [f"exchange {step.exchange.i}: {problem}" for problem in _compare(step, answer, call)]
    rollout.ids.learn(step.exchange, step.blocks, answer)


def _request(step: Step, rollout: _Rollout) -> httpx.Request:
    exchange = step.exchange
    path = exchange.path[exchange.path.index("/v1/") :] if "/v1/" in exchange.path else ""
    headers = {name: value for name, value in exchange.headers.items() if name.lower() not in DROPPED_HEADERS}
    bearer = any(name.lower() == "authorization" for name in exchange.headers)
    headers |= {"authorization": f"Bearer {rollout.key}"} if bearer else {"x-api-key": rollout.key}
    body = None if exchange.body is None else json.dumps(rollout.ids.translate(exchange)).encode()
    url = f"{rollout.url}{path}" + (f"?{exchange.query}" if exchange.query else "")
    return rollout.client.build_request(exchange.method, url, headers=headers, content=body)


def _compare(step: Step, answer: Answer, call: Call) -> Iterator[str]:
    """The answer says what was sampled: the same calls with the same values, the same text, why it ended, a true prompt count."""
    wanted = [(block.name, json.loads(block.text)) for block in step.blocks if block.kind == "call" and usable(block)]
    try:
        given = [(name, json.loads(arguments)) for _, name, arguments in answer.calls]
    except ValueError:
        yield "arguments that are no JSON were given out as a call"
        return
    if given != wanted:
        yield f"calls {str(given)[:200]} given for {str(wanted)[:200]}"
    said = "\n".join(block.text for block in step.blocks if block.kind == "text").strip()
    if all(block.kind == "text" for block in step.blocks) and answer.text.strip() != said:
        yield f"text {answer.text[:200]!r} given for {said[:200]!r}"
    finish = "length" if step.by_length else "calls" if wanted else "stop"
    if answer.finish and answer.finish != finish:
        yield f"the answer ends by {answer.finish}, the turn by {finish}"
    if answer.prompt_tokens and answer.prompt_tokens != len(call.prompt):
        yield f"usage says {answer.prompt_tokens} prompt tokens, the engine got {len(call.prompt)}"
