"""A model endpoint that plays shell commands, one a turn: OpenAI chat and Anthropic messages, streaming where the client asks for it.

Stands in for proxy and policy in benchmarks and tests. The last path component before `/v1` names the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"

Commands = Callable[[str, int], str | None]
"""(rollout, turn counted from 0) → the command to call the shell tool with; None ends the conversation."""


@contextlib.asynccontextmanager
async def scripted_model(commands: Commands) -> AsyncIterator[str]:
    """Serve on a free loopback port; yields `http://127.0.0.1:PORT`. A rollout's address is that + `/rollout/NAME`."""
    server = await asyncio.start_server(lambda reader, writer: _serve(reader, writer, commands), "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, commands: Commands) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        while request := await reader.readline():
            method, path, _ = request.decode().split(" ", 2)
            length = 0
            while line := (await reader.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = await reader.readexactly(length)
            kind, answer = ("application/json", b"{}") if method != "POST" else _answer(path, json.loads(body), commands)
            head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n\r\n".encode()
            writer.write(head if method == "HEAD" else head + answer)
            await writer.drain()
    writer.close()


def _answer(path: str, body: dict[str, Any], commands: Commands) -> tuple[str, bytes]:
    rollout = path.split("?", maxsplit=1)[0].partition("/v1/")[0].rpartition("/")[2]
    turn = sum(message["role"] == "assistant" for message in body.get("messages", []))
    if "count_tokens" in path:
        return "application/json", b'{"input_tokens": 10}'
    command = commands(rollout, turn)
    if "/messages" in path:
        message = _anthropic(body, turn, command)
        if body.get("stream"):
            return "text/event-stream", "".join(_events(message)).encode()
        return "application/json", json.dumps(message).encode()
    return "application/json", json.dumps(_openai(body, turn, command)).encode()


def _openai(body: dict[str, Any], turn: int, command: str | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "Next."}
    if command is not None:
        function = {"name": "bash", "arguments": json.dumps({"command": command})}
        message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
    choice = {"index": 0, "finish_reason": "stop" if command is None else "tool_calls", "message": message}
    usage = {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20}
    return {"id": "s", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice], "usage": usage}


def _anthropic(body: dict[str, Any], turn: int, command: str | None) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": "Next."}]
    if command is not None and body.get("tools"):
        content.append({"type": "tool_use", "id": f"toolu_{turn}", "name": "Bash", "input": {"command": command, "description": "step"}})
    stop = "tool_use" if len(content) == 2 else "end_turn"
    usage = {"input_tokens": 10, "output_tokens": 10}
    message = {"id": f"msg_{turn}", "type": "message", "role": "assistant", "model": body["model"], "content": content}
    return message | {"stop_reason": stop, "stop_sequence": None, "usage": usage}


def _events(message: dict[str, Any]) -> Iterator[str]:
    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    yield event("message_start", message=message | {"content": [], "stop_reason": None})
    for index, block in enumerate(message["content"]):
        if block["type"] == "text":
            empty, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta={"stop_reason": message["stop_reason"], "stop_sequence": None}, usage=message["usage"])
    yield event("message_stop")
