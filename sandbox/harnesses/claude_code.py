"""Claude Code, unmodified: the native binary in headless mode, set by environment variables and flags alone.

The settings hold what the wire shows turn by turn still: no attribution header, cache markers, experimental betas, tool search or
traffic beside the model calls; every model alias is the policy.
"""

from __future__ import annotations

from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment
from server.schemas.harnesslog import LogEventKind

from .base import STREAM, HarnessAgent
from .logs import Entry, LogBook
from .pins import CLAUDE_CODE, Pin

POLICY = "policy"
_SETTINGS = {
    "IS_SANDBOX": "1",
    "TERM": "dumb",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_PROMPT_CACHING": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "ENABLE_TOOL_SEARCH": "false",
    **dict.fromkeys(
        (
            "ANTHROPIC_MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL",
            "ANTHROPIC_DEFAULT_SONNET_MODEL",
            "ANTHROPIC_DEFAULT_OPUS_MODEL",
            "CLAUDE_CODE_SUBAGENT_MODEL",
        ),
        POLICY,
    ),
}
# It compacts 13,000 tokens plus its longest answer (at most 20,000) before the window is full: a smaller window would be compacted at once.
_RESERVE = 33_000
_QUIET = {
    "background_tasks_changed", "hook_progress", "hook_response", "hook_started", "informational", "status", "task_notification",
    "task_progress", "task_updated", "thinking_tokens", "ui_invalidate",
}  # fmt: skip
"""Records of type `system` that hold nothing for us."""
_FLAGS = ("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")


class ClaudeCode(HarnessAgent):
    pin: ClassVar[Pin | None] = CLAUDE_CODE
    memory_mb: ClassVar[int] = 192
    prompts: ClassVar[tuple[str, ...]] = ("full", "bare")
    reads: ClassVar[tuple[str, ...]] = (STREAM,)

    @staticmethod
    @override
    def name() -> str:
        return CLAUDE_CODE.name

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        env = _SETTINGS | {
            "ANTHROPIC_BASE_URL": self.api_url(environment, ""),
            "ANTHROPIC_API_KEY": self.rollout.proxy.key.get_secret_value(),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(self.rollout.max_output_tokens),
        }
        if self.rollout.context > _RESERVE:
            env |= dict.fromkeys(("CLAUDE_CODE_MAX_CONTEXT_TOKENS", "CLAUDE_CODE_AUTO_COMPACT_WINDOW"), str(self.rollout.context))
        bare = ["--bare"] if self.rollout.launcher.harness.prompt == "bare" else []
        await self.start(environment, [str(self.tree / "claude"), *bare, *_FLAGS], env, instruction)

    @classmethod
    @override
    def note(cls, entry: Entry, book: LogBook) -> bool:
        match entry.text("type"):
            case "system":
                return _system(entry, book)
            case "assistant":
                for block in entry.items("message", "content"):
                    if block.text("type") == "tool_use":
                        book.began(block.text("id"), block.text("name"), entry.time("timestamp"))
            case "user":
                _results(entry, book)
            case "result":
                _result(entry, book)
            case kind:
                return kind in ("rate_limit_event", "stream_event", "tool_progress", "tool_use_summary")
        return True


def _system(entry: Entry, book: LogBook) -> bool:
    match entry.text("subtype"):
        case "init":
            book.named(entry.text("claude_code_version"))
        case "compact_boundary":
            size = f"{entry.count('compact_metadata', 'pre_tokens')} → {entry.count('compact_metadata', 'post_tokens')} tokens, its count"
            seconds = entry.number("compact_metadata", "duration_ms")
            name = entry.text("compact_metadata", "trigger")
            book.note(LogEventKind.COMPACTION, size, name=name, seconds=None if seconds is None else seconds / 1000)
        case "task_started":
            if entry.text("task_type") == "local_agent":  # a command in the background is a task too
                kind, call_id = entry.text("subagent_type"), entry.text("tool_use_id")
                book.note(LogEventKind.SUB_AGENT, entry.text("description"), name=kind, call_id=call_id)
        case "api_retry":
            book.note(LogEventKind.ERROR, entry.text("error"), name="model call repeated")
        case "permission_denied":
            book.note(LogEventKind.DENIED, name=entry.text("tool_name"), call_id=entry.text("tool_use_id"))
        case subtype:
            return subtype in _QUIET
    return True


def _results(entry: Entry, book: LogBook) -> None:
    for block in entry.items("message", "content"):
        if block.text("type") == "tool_result":
            book.ended(block.text("tool_use_id"), entry.time("timestamp"), block.at("is_error").value is not True)


def _result(entry: Entry, book: LogBook) -> None:
    book.log.turns = entry.count("num_turns")
    book.log.cost_usd = entry.number("total_cost_usd")
    milliseconds = entry.number("duration_ms")
    book.log.seconds = None if milliseconds is None else milliseconds / 1000
    book.stopped(entry.text("terminal_reason") or entry.text("subtype"))
    denied = {event.call_id for event in book.log.events if event.kind is LogEventKind.DENIED}
    for denial in entry.items("permission_denials"):
        if (call_id := denial.text("tool_use_id")) not in denied:
            book.note(LogEventKind.DENIED, name=denial.text("tool_name"), call_id=call_id)
    if entry.at("is_error").value is True:
        status = entry.count("api_error_status")
        book.note(LogEventKind.ERROR, entry.text("result"), name=entry.text("subtype") if status is None else f"status {status}")
