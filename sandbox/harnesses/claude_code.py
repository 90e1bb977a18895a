"""Claude Code, unmodified: the native binary in headless mode, set by environment variables and flags alone.

The settings hold what the wire shows turn by turn still: no attribution header, cache markers, experimental betas, tool search or
traffic beside the model calls; every model alias is the policy.
"""

from __future__ import annotations

from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment

from .base import HarnessAgent
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
_FLAGS = ("-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")


class ClaudeCode(HarnessAgent):
    pin: ClassVar[Pin | None] = CLAUDE_CODE

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
