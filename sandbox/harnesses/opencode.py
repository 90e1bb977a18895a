"""OpenCode, unmodified: the native binary in headless mode, set by an inline configuration and environment variables.

It speaks the OpenAI chat dialect through the provider package inside the binary; every agent, sub-agent and title is the policy.
"""

from __future__ import annotations

import json
from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind

from .base import STREAM, HarnessAgent
from .logs import Entry, LogBook
from .pins import OPENCODE, Pin

_SETTINGS = {
    "IS_SANDBOX": "1",
    "TERM": "dumb",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}
_KEY = "LEGO_RL_ROLLOUT_KEY"
# In its configuration directory it installs `@opencode-ai/plugin` from the npm registry, unless a lock file says that it is there.
_LOCK = json.dumps({"packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}})
_READY = f"""d=$HOME/.config/opencode; mkdir -p $d/node_modules && printf %s '{_LOCK}' >$d/package-lock.json; exec "$@" """


class OpenCode(HarnessAgent):
    pin: ClassVar[Pin | None] = OPENCODE
    reads: ClassVar[tuple[str, ...]] = (STREAM,)
    memory_mb: ClassVar[int] = 1024

    @staticmethod
    @override
    def name() -> str:
        return OPENCODE.name

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        env = _SETTINGS | {
            "OPENCODE_CONFIG_CONTENT": json.dumps(self._config(self.api_url(environment, "/v1"))),
            _KEY: self.rollout.proxy.key.get_secret_value(),
        }
        argv = ["/bin/sh", "-c", _READY, "sh", str(self.tree / "bin" / "opencode"), "run", "--format", "json"]
        await self.start(environment, argv, env, instruction)

    def _config(self, url: str) -> dict[str, object]:
        output = min(self.rollout.max_output_tokens, self.rollout.context // 2)
        model = {"name": "Policy", "limit": {"context": self.rollout.context, "output": output}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "lego-rl",
            "options": {"baseURL": url, "apiKey": f"{{env:{_KEY}}}"},
            "models": {"policy": model},
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "model": "lego/policy",
            "small_model": "lego/policy",
            "enabled_providers": ["lego"],
            "provider": {"lego": provider},
        }

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        match entry.text("type"):
            case "tool_use":
                _tool(entry.at("part"), book)
            case "step_finish":
                book.turn(entry.number("part", "cost"))
                book.stopped(entry.text("part", "reason"))
            case "text":
                # It announces a compaction by what it asks of itself behind one.
                if entry.at("part", "metadata", "compaction_continue").value is True:
                    book.note(LogEventKind.COMPACTION)
            case "error":
                words = entry.text("error", "data", "message") or entry.text("error", "message")
                book.note(LogEventKind.ERROR, words, name=entry.text("error", "name"))
            case kind:
                return kind in ("step_start", "reasoning")
        return True


def _tool(part: Entry, book: LogBook) -> None:
    """A tool that has ended; one that is under way is not in the log."""
    name, call_id = part.text("tool"), part.text("callID")
    # A call that it cannot read, or of a tool that is not there, runs as a tool of this name.
    error = part.text("state", "input", "error") if name == "invalid" else part.text("state", "error")
    started, ended = part.number("state", "time", "start"), part.number("state", "time", "end")
    ok = not error and part.text("state", "status") == "completed" and part.number("state", "metadata", "exit") in (None, 0)
    book.began(call_id, name, None if started is None else started / 1000)
    book.ended(call_id, None if ended is None else ended / 1000, ok)
    if name == "task":
        kind = part.text("state", "input", "subagent_type")
        book.note(LogEventKind.SUB_AGENT, part.text("state", "input", "description"), name=kind, call_id=call_id)
    elif error and "permission" in error:
        book.note(LogEventKind.DENIED, error, name=name, call_id=call_id)
    elif error:
        book.note(LogEventKind.ERROR, error, name=name, call_id=call_id)
