"""Codex, unmodified: the native binary in headless mode, set by flags alone. It speaks the OpenAI Responses dialect, and no other."""

from __future__ import annotations

import json
from typing import ClassVar, override

from sandbox.integrity.environment import TrialEnvironment

from .base import HarnessAgent
from .pins import CODEX, Pin

_KEY = "LEGO_RL_ROLLOUT_KEY"
_BINARY = "vendor/x86_64-unknown-linux-musl/bin/codex"
# Plugins are a catalogue that it fetches from GitHub and ChatGPT when it starts.
_OFF = ("plugins",)
_FLAGS = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "--json")


class Codex(HarnessAgent):
    pin: ClassVar[Pin | None] = CODEX
    memory_mb: ClassVar[int] = 384

    @staticmethod
    @override
    def name() -> str:
        return CODEX.name

    @override
    async def launch(self, instruction: str, environment: TrialEnvironment) -> None:
        settings = [part for name, value in self._config(self.api_url(environment, "/v1")).items() for part in ("-c", f"{name}={value}")]
        argv = [str(self.tree / _BINARY), "exec", *_FLAGS, *settings, "-"]  # `-`: the instruction comes over standard input
        env = {"IS_SANDBOX": "1", "TERM": "dumb", _KEY: self.rollout.proxy.key.get_secret_value()}
        await self.start(environment, argv, env, instruction)

    def _config(self, url: str) -> dict[str, str]:
        """Dotted names and TOML values."""
        provider = {"name": "lego-rl", "base_url": url, "env_key": _KEY, "wire_api": "responses"}
        return {
            "model": '"policy"',
            "model_provider": '"lego"',
            **{f"model_providers.lego.{name}": json.dumps(value) for name, value in provider.items()},
            "model_context_window": str(self.rollout.context),
            "model_auto_compact_token_limit": str(max(1, self.rollout.context - 2 * self.rollout.max_output_tokens)),
            "check_for_update_on_startup": "false",
            "analytics.enabled": "false",
            "web_search": '"disabled"',
            **{f"features.{name}": "false" for name in _OFF},
        }
