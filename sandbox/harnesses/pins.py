"""The harness runtimes this version works with, pinned to the byte.

Updating one: the Python harnesses, `uv pip compile --generate-hashes --no-annotate --no-header --python-version 3.12` of
`mini-swe-agent==VERSION` into `mini_swe_agent.lock`, or of `openhands-sdk==VERSION` with `openhands-tools==VERSION` into
`openhands.lock`; the others, the `dist.integrity` that `npm view PACKAGE@VERSION` shows for the x86-64 Linux package, which holds the
native program that the harness's wrapper package would start.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PythonPin:
    """A Python distribution with all its dependencies. `lock` is a requirements file in which every line carries hashes."""

    name: str
    version: str
    lock: Path

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the tree's content: the lock and the interpreter that byte-compiles it."""
        return hashlib.sha256(self.lock.read_bytes() + (sys.implementation.cache_tag or "").encode()).hexdigest()


@dataclass(frozen=True)
class NpmPin:
    """An npm package without dependencies. `integrity` is the registry's (`sha512-<base64>`) and covers the whole archive."""

    name: str
    version: str
    package: str
    integrity: str
    published: str = ""
    """The registry's name of this version where it also names the platform."""

    @property
    def source(self) -> str:
        return f"{self.package}@{self.published or self.version}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.package, self.published or self.version, self.integrity]).encode()).hexdigest()


Pin = PythonPin | NpmPin

MINI_SWE_AGENT = PythonPin("mini-swe-agent", "2.4.6", Path(__file__).with_name("mini_swe_agent.lock"))
CLAUDE_CODE = NpmPin(
    "claude-code",
    "2.1.332",
    "@anthropic-ai/claude-code-linux-x64",
    "sha512-f4JWhzwYutJIHScC7/dYOPX6s28tt7ZADhsOi8zwOHq5fFPEuUeChh2NMfinSg0GrUckYxaeebC4h0DqiKzLcw==",
)
OPENCODE = NpmPin(
    "opencode",
    "1.18.33",
    "opencode-linux-x64-baseline",
    "sha512-1KQGBiiDDeL/VHHbHkOvvFo8Jr97WT5+C1tear+p7IcDTnXgVHXqIjU4O4jM4mHQzykTP2i884FCnW5LDa+zCA==",
)
OPENHANDS = PythonPin("openhands", "1.58.2", Path(__file__).with_name("openhands.lock"))
CODEX = NpmPin(
    "codex",
    "0.171.0",
    "@openai/codex",
    "sha512-l66NZkQgdk2C3pbcfULDz42yEUB581MVA6I+Y43Wp4OIqEy73HCdmZ0GTjeAHY2ycuH4N00d9VsLrwT1jxshTw==",
    published="0.171.0-linux-x64",
)

PINS: dict[str, Pin] = {pin.name: pin for pin in (MINI_SWE_AGENT, CLAUDE_CODE, OPENCODE, OPENHANDS, CODEX)}
