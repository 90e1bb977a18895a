"""The harness runtimes this version works with, pinned to the byte.

Updating one: the Python harnesses, `uv pip compile --generate-hashes --no-annotate --no-header --python-version 3.12` of
`mini-swe-agent==VERSION` into `mini_swe_agent.lock`, or of `openhands-sdk==VERSION` with `openhands-tools==VERSION` into
`openhands.lock`; the npm ones, the `dist.integrity` that `npm view PACKAGE@VERSION` shows for the x86-64 Linux package, which holds the
native program that the harness's wrapper package would start; Terminus 2, whose own code is in the pinned Harbor, the SHA-256 of the Debian
packages of tmux that `apt-get download` brings.

All are for x86-64 Linux.
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
        """SHA-256 of what decides the tree's content: the lock, the Python that goes with it, and how a tree is laid out."""
        return hashlib.sha256(self.lock.read_bytes() + f"{sys.version}, with its own Python".encode()).hexdigest()


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


@dataclass(frozen=True)
class DebianPin:
    """tmux from its Debian package, and the packages of its libraries, as (name, version, SHA-256 of the archive).

    The C library is not among them: it gets fixes at any time, and the one of the machine that installs is as good.
    """

    name: str
    version: str
    program: str
    packages: tuple[tuple[str, str, str], ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.program, "with a locale", *self.packages]).encode()).hexdigest()


Pin = PythonPin | NpmPin | DebianPin

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
TERMINUS_2 = DebianPin(
    "terminus-2",
    "2.0.0",
    "usr/bin/tmux",
    (
        ("tmux", "3.3a-3", "6bd1558face5e145d66d72c9557cbc7ff5ad66701e94dcd568e6daf081269018"),
        ("libevent-core-2.1-7", "2.1.12-stable-8", "4cebf4a24fb222ddbc5569df9960c5ff2da8b7ed71a02e13c79a59dcaf3b518a"),
        ("libutempter0", "1.2.1-3", "e2bf3c7fb0ebd7d7966166d98320767adcd35a6d1eabc32220d8219c9efb1c0f"),
        ("libtinfo6", "6.4-4", "072d908f38f51090ca28ca5afa3b46b2957dc61fe35094c0b851426859a49a51"),
    ),
)

PINS: dict[str, Pin] = {pin.name: pin for pin in (MINI_SWE_AGENT, CLAUDE_CODE, OPENCODE, OPENHANDS, CODEX, TERMINUS_2)}
