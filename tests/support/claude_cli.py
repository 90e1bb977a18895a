"""The real Claude Code CLI for tests: found on $PATH, or fetched once from npm at the pinned version."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "@anthropic-ai/claude-code-linux-x64"
VERSION = "2.1.332"


@cache
def claude_cli() -> Path:
    """Path of the executable. Skips the calling test, with the reason, when there is none and npm cannot fetch it."""
    cached = Path.home() / ".cache" / "lego-rl-tests" / f"claude-code-{VERSION}" / "claude"
    if cached.exists():
        return cached
    on_path = shutil.which("claude")
    if on_path:
        return Path(on_path)
    if not shutil.which("npm"):
        pytest.skip("the Claude Code CLI is not on PATH, and there is no npm to fetch it")
    _fetch(cached.parent)
    return cached


def _fetch(target: Path) -> None:
    """Unpack the platform package; its binary runs without the wrapper package and its post-install step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        packed = subprocess.run(["npm", "pack", f"{PACKAGE}@{VERSION}"], cwd=scratch, capture_output=True, text=True, timeout=600)
        if packed.returncode:
            pytest.skip(f"npm could not fetch {PACKAGE}@{VERSION}: {packed.stderr.strip().splitlines()[-1:]}")
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            archive.extractall(scratch, filter="data")
        if not target.exists():
            (Path(scratch) / "package").rename(target)


def claude_env(home: Path, base_url: str = "http://127.0.0.1:9") -> dict[str, str]:
    """An environment of its own: nothing of the caller's configuration, credentials or network settings."""
    (home / "config").mkdir(parents=True, exist_ok=True)
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "CLAUDE_CONFIG_DIR": str(home / "config"),
        "XDG_DATA_HOME": str(home / "data"),
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "sk-test",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "LANG": "C.UTF-8",
    }
