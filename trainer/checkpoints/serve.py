"""The line that serves an exported policy the way it was trained: with the tool and reasoning parsers of its family."""

from __future__ import annotations

import shlex
from pathlib import Path

from server.schemas.probes import TrainedWith

PARSERS = {"qwen3": ("hermes", "qwen3"), "qwen3.5": ("qwen3_coder", "qwen3")}
"""Renderer → vLLM's names of the tool-call parser and the reasoning parser."""


def serve_line(directory: Path, trained: TrainedWith, context: int) -> str:
    """A shell command. The engine listens on loopback; the policy keeps the context it was trained in."""
    tools, reasoning = PARSERS[trained.renderer]
    words = ["vllm", "serve", str(directory), "--host", "127.0.0.1", "--max-model-len", str(context)]
    words += ["--enable-auto-tool-choice", "--tool-call-parser", tools]
    if trained.thinking:
        words += ["--reasoning-parser", reasoning]
    else:
        words += ["--default-chat-template-kwargs", '{"enable_thinking": false}']
    return shlex.join(words)
