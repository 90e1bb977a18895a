"""What the proxy adds to a model call: HTTP, rendering, parsing and capture, over calling the engine directly.

Client, proxy and an engine that answers at once share one process and one loop, as trainer and proxy do; the client is a bare socket,
so that little but the proxy is measured. With many rollouts at once the loop is saturated and the latency is mostly queueing: the
request rate is then the figure to look at.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from trainer.engine.base import Generation, OnTokens, Sampling, TokenIds
from trainer.proxy.limits import Limits
from trainer.proxy.rendering import Rendering
from trainer.proxy.service import Proxy

TURNS = 4
PROMPT = "Please solve this issue. " + "Read the file, find the wrong function, repair it, and submit. " * 56
"""About 3.6 KB, the size of mini-swe-agent's first user message."""
OBSERVATION = '{\n  "returncode": 0,\n  "output": "' + "def add(a, b):\\n    return a - b\\n" * 8 + '"\n}'
ANSWER = 'I look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "cat calc.py"}}\n</tool_call><|im_end|>'
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds per model call over all turns of all rollouts; `added` is the call through the proxy less the direct call."""

    sessions: int
    turns: int
    prompt_tokens: int
    direct_p50_ms: float
    added_p50_ms: float
    added_p99_ms: float
    calls_per_s: float

    @property
    def line(self) -> str:
        return (
            f"{self.sessions:3d} rollouts x {self.turns} turns: +{self.added_p50_ms:.2f} ms median, +{self.added_p99_ms:.2f} ms p99, "
            f"{self.calls_per_s:,.0f} calls/s  (direct {self.direct_p50_ms:.3f} ms, prompts to {self.prompt_tokens} tokens)"
        )


class Instant:
    """An engine that answers the same turn at once."""

    def __init__(self, answer: list[int]) -> None:
        self._answer = answer
        self.longest = 0

    async def generate(
        self,
        session: str,
        prompt_ids: TokenIds,
        sampling: Sampling,
        routes_from: int = 0,
        on_tokens: OnTokens | None = None,
        salt: str = "",
    ) -> Generation:
        self.longest = max(self.longest, len(prompt_ids))
        return Generation(list(self._answer), [-0.1] * len(self._answer), None, "stop", 0)


def run(runs: int, model: Path | None) -> list[Row]:
    """One rollout, and a step's worth at once. `model`: a directory with a tokenizer; by default every byte is a token."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json")) if model else _bytes()
    return [asyncio.run(_measure(tokenizer, sessions, runs)) for sessions in (1, 64)]


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {"rows": [asdict(row) for row in rows]}


async def _measure(tokenizer: Tokenizer, sessions: int, runs: int) -> Row:
    engine, rendering = Instant(tokenizer.encode(ANSWER, add_special_tokens=False).ids), Rendering(tokenizer)
    proxy = Proxy(engine, rendering)
    await proxy.start()
    sampling = Sampling(1.0, 10_000, rendering.stop_token_ids)
    through: list[float] = []
    seconds = []
    for i in range(runs + 1):
        urls = [await proxy.open(f"r-{i}-{n}", "key", sampling, Limits(TURNS, 1_000_000), "bench") for n in range(sessions)]
        started = time.perf_counter()
        lists = await asyncio.gather(*(_converse(url) for url in urls))
        if i:  # the first round warms caches
            seconds.append(time.perf_counter() - started)
            through += [took for took_of_one in lists for took in took_of_one]
        for n in range(sessions):
            await proxy.close(f"r-{i}-{n}")
    await proxy.stop()
    direct = statistics.median([await _direct(engine, sampling) for _ in range(200)])
    added = [1000 * (took - direct) for took in through]
    return Row(
        sessions=sessions,
        turns=TURNS,
        prompt_tokens=engine.longest,
        direct_p50_ms=1000 * direct,
        added_p50_ms=statistics.median(added),
        added_p99_ms=statistics.quantiles(added, n=100, method="inclusive")[98],
        calls_per_s=sessions * TURNS / statistics.median(seconds),
    )


async def _direct(engine: Instant, sampling: Sampling) -> float:
    started = time.perf_counter()
    await engine.generate("direct", [0] * engine.longest, sampling)
    return time.perf_counter() - started


async def _converse(url: str) -> list[float]:
    """One rollout as mini-swe-agent would do it; seconds per call."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You fix code."}, {"role": "user", "content": PROMPT}]
    times = []
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages, "tools": [TOOL]}).encode()
        head = f"POST {url[url.index('/r/') :]}/v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer key\r\n"
        started = time.perf_counter()
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        header = await reader.readuntil(b"\r\n\r\n")
        size = int(header.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        answer = json.loads(await reader.readexactly(size))
        times.append(time.perf_counter() - started)
        message = answer["choices"][0]["message"]
        messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": OBSERVATION}]
    writer.close()
    await writer.wait_closed()
    return times


def _bytes() -> Tokenizer:
    """Qwen3's special tokens over single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP])
    return tokenizer
