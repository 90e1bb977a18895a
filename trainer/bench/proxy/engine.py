"""An engine that answers at once, in its own process, and the client of it that the proxy uses.

Two faces give the same turns: token ids over a bare socket, as an engine in the trainer's own cluster is called, and chat completions
with token ids over HTTP, as vLLM serves the gateways that this proxy is compared with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from trainer.engine.base import EngineError, Generation, GenerationRequest

CALL = struct.Struct("<IIII")
"""Prompt tokens, first position of routes, layers, top_k (both 0 for none); then the prompt, int32."""
REPLY = struct.Struct("<II")
"""Sampled tokens, rows of routes; then ids (int32), log-probabilities (float32), routes (uint8 [rows, layers, top_k])."""
LIMIT = 1 << 24


class SocketEngine:
    """`routed` names the sessions that get routes, of `shape` (layers, top_k)."""

    def __init__(self, port: int, shape: tuple[int, int] = (48, 8)) -> None:
        self._port, self.shape = port, shape
        self.routed: set[str] = set()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `Engine`. A cancelled call closes its connection."""
        layers, top_k = self.shape if request.session in self.routed else (0, 0)
        prompt = np.asarray(request.prompt_ids, np.int32)
        try:
            reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self._port, limit=LIMIT)
            writer.writelines((CALL.pack(len(prompt), request.routes_from, layers, top_k), prompt.data.cast("B")))
            count, rows = REPLY.unpack(await reader.readexactly(REPLY.size))
            ids, log_probs = np.frombuffer(await reader.readexactly(8 * count), np.int32).reshape(2, count)
            raw = await reader.readexactly(rows * layers * top_k)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineError(f"the bench's engine is gone: {error}") from error
        self._idle.append((reader, writer))
        routes = np.frombuffer(raw, np.uint8).reshape(rows, layers, top_k) if layers else None
        return Generation(ids.tolist(), log_probs.view(np.float32).tolist(), routes, "stop", 0)

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


async def serve(answers: list[dict[str, Any]]) -> None:
    """Print both ports and answer until standard input ends. `answers` hold `text` and `ids`."""
    turns = itertools.cycle([(answer["ids"], np.asarray(answer["ids"], np.int32).tobytes()) for answer in answers])
    chats = itertools.cycle([_chat(answer) for answer in answers])
    servers = [
        await asyncio.start_server(lambda reader, writer: _serve_tokens(reader, writer, turns), "127.0.0.1", limit=LIMIT),
        await asyncio.start_server(lambda reader, writer: _serve_http(reader, writer, chats), "127.0.0.1", limit=LIMIT),
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


async def _serve_tokens(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, turns: Iterator[tuple[list[int], bytes]]) -> None:
    try:
        while True:
            prompt, first, layers, top_k = CALL.unpack(await reader.readexactly(CALL.size))
            await reader.readexactly(4 * prompt)
            ids, raw = next(turns)
            rows = prompt + len(ids) - 1 - first if layers else 0
            log_probs = np.full(len(ids), -0.125, np.float32).tobytes()
            writer.write(REPLY.pack(len(ids), rows) + raw + log_probs + bytes(rows * layers * top_k))
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def _serve_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chats: Iterator[bytes]) -> None:
    """As much of HTTP as the clients of this bench speak: a length in every request, connections kept."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b"content-length:" in head:
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
            body = next(chats) if head.startswith(b"post") else b'{"status":"ok","object":"list","data":[{"id":"policy"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


def message(text: str) -> dict[str, Any]:
    """A sampled turn as a chat message."""
    spoken, _, rest = text.partition("\n<tool_call>\n")
    call = json.loads(rest.partition("\n</tool_call>")[0])
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    return {"role": "assistant", "content": spoken, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}


def _chat(answer: dict[str, Any]) -> bytes:
    """The turn as vLLM answers `return_token_ids` and `logprobs`, with a prompt of 20,000 ids."""
    ids = answer["ids"]
    entry = {"logprob": -0.125, "bytes": [120, 121, 122], "top_logprobs": []}
    choice = {
        "index": 0,
        "message": message(answer["text"]),
        "finish_reason": "tool_calls",
        "token_ids": ids,
        "logprobs": {"content": [{"token": f"token_id:{token}", **entry} for token in ids]},
    }
    usage = {"prompt_tokens": 20_000, "completion_tokens": len(ids), "total_tokens": 20_000 + len(ids)}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": "policy"}
    prompt = [i * 7919 % 150_000 for i in range(20_000)]
    return json.dumps({**head, "prompt_token_ids": prompt, "choices": [choice], "usage": usage}).encode()


if __name__ == "__main__":
    uvloop.run(serve(json.loads(Path(sys.argv[1]).read_text())))
