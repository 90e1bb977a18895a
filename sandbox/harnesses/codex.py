"""Codex, unmodified: the native binary in headless mode, set by flags alone. It speaks the OpenAI Responses dialect, and no other.

What it prints has neither times nor the ids of calls; its session files have both, one for each thread.
"""

from __future__ import annotations

import json
from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind

from .base import AGENT_LOGS, STREAM, HarnessAgent
from .logs import Entry, LogBook
from .pins import CODEX, Pin

_KEY = "LEGO_RL_ROLLOUT_KEY"
_BINARY = "vendor/x86_64-unknown-linux-musl/bin/codex"
# Plugins are a catalogue that it fetches from GitHub and ChatGPT when it starts.
_OFF = ("plugins",)
_SMALLEST = 32_000
"""Tokens of the smallest window that it is told: its own prompt has 8,000, and for a small window it leaves parts of that out."""
# Its session files are written among the trial's logs, from the first record on.
_READY = f"""mkdir -p "$HOME/.codex" {AGENT_LOGS}/sessions && ln -sfn {AGENT_LOGS}/sessions "$HOME/.codex/sessions"; exec "$@" """
_FLAGS = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json")


class Codex(HarnessAgent):
    pin: ClassVar[Pin | None] = CODEX
    reads: ClassVar[tuple[str, ...]] = (STREAM, "sessions/**/*.jsonl")
    memory_mb: ClassVar[int] = 384

    @staticmethod
    @override
    def name() -> str:
        return CODEX.name

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        settings = [part for name, value in self._config(self.api_url(environment, "/v1")).items() for part in ("-c", f"{name}={value}")]
        command = [str(self.tree / _BINARY), "exec", *_FLAGS, *settings, "-"]  # `-`: the instruction comes over standard input
        argv = ["/bin/sh", "-c", _READY, "sh", *command]
        env = {"IS_SANDBOX": "1", "TERM": "dumb", _KEY: self.rollout.proxy.key.get_secret_value()}
        await self.start(environment, argv, env, instruction)

    def _config(self, url: str) -> dict[str, str]:
        """Dotted names and TOML values."""
        provider = {"name": "lego-rl", "base_url": url, "env_key": _KEY, "wire_api": "responses"}
        context, limit = self.rollout.context, max(1, self.rollout.context - 2 * self.rollout.max_output_tokens)
        window = {"model_context_window": str(context), "model_auto_compact_token_limit": str(limit)}
        return {
            "model": '"policy"',
            "model_provider": '"lego"',
            **{f"model_providers.lego.{name}": json.dumps(value) for name, value in provider.items()},
            **(window if context >= _SMALLEST else {}),
            "check_for_update_on_startup": "false",
            "analytics.enabled": "false",
            "web_search": '"disabled"',
            **{f"features.{name}": "false" for name in _OFF},
        }

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        """Of what it printed, errors and ends; everything else from the session files, whose records say when they were written."""
        if "payload" in entry.value:
            return _session(entry.text("type"), entry.at("payload"), entry.time("timestamp"), book)
        match entry.text("type"):
            case "error":
                book.note(LogEventKind.ERROR, entry.text("message"))
            case "turn.failed":
                book.stopped("failed")
            case "turn.completed":
                book.stopped("completed")
            case kind:
                return kind in ("thread.started", "turn.started", "item.started", "item.updated", "item.completed")
        return True


def _session(kind: str, payload: Entry, time: float | None, book: LogBook) -> bool:
    match kind, payload.text("type"):
        case "session_meta", _:
            book.named(payload.text("cli_version"))
        case "token_usage_record", _:
            book.turn()
        case "response_item", "function_call" | "custom_tool_call":
            book.began(payload.text("call_id"), payload.text("name"), time)
        case "response_item", "function_call_output" | "custom_tool_call_output":
            book.ended(payload.text("call_id"), time, None)
        case "event_msg", "item_completed":
            _item(payload.at("item"), payload.number("started_at_ms"), payload.number("completed_at_ms"), book)
        case "event_msg", "error" | "stream_error":
            book.note(LogEventKind.ERROR, payload.text("message"), name=payload.text("type"))
        case "event_msg", "task_complete":
            milliseconds = payload.number("duration_ms")
            book.log.seconds = max(book.log.seconds or 0.0, (milliseconds or 0.0) / 1000)
        case _:
            return kind in ("event_msg", "response_item", "compacted", "turn_context", "world_state", "inter_agent_communication")
    return True


def _item(item: Entry, started: float | None, ended: float | None, book: LogBook) -> None:
    match item.text("type"):
        case "CommandExecution":
            book.ended(item.text("id"), None if ended is None else ended / 1000, item.text("status") == "completed")
        case "ContextCompaction":
            seconds = None if started is None or ended is None else max(0.0, ended - started) / 1000
            book.note(LogEventKind.COMPACTION, seconds=seconds)
        case "CollabAgentToolCall" if item.text("tool") == "spawn_agent":
            book.note(LogEventKind.SUB_AGENT, item.text("prompt"), call_id=item.text("id"))
