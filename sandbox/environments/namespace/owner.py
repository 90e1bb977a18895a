"""State directories of spawners, and sweeping those whose owner is gone.

`{base}/{token}/owner.json` is locked (flock) by the spawner as long as it lives and names the cgroups that it made. All mounts live in the
spawner's mount namespace and end with it, so a left-over state directory holds nothing but this record and an empty mount point.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

from . import cgroups

_RECORD = "owner.json"
_PREFIX = "lego-rl-"


def claim(base: Path) -> tuple[Path, int]:
    """Make a state directory below `base` and lock its record. Returns the directory and the descriptor that holds the lock.

    It appears under its name only when the lock is held, so that a sweep at the same time cannot take it for abandoned.
    """
    base.mkdir(parents=True, exist_ok=True)
    token = f"{_PREFIX}{os.urandom(6).hex()}"
    making = base.resolve() / f".{token}"
    making.mkdir(mode=0o700)
    (making / "mnt").mkdir(mode=0o700)
    record = os.open(making / _RECORD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(record, fcntl.LOCK_EX)
    return making.rename(making.with_name(token)), record


def remove(state: Path) -> None:
    """Remove an unlocked state directory. Never recursive: it holds only what `claim` made."""
    for path in (state / "mnt", state):
        if path == state:
            (state / _RECORD).unlink(missing_ok=True)
        path.rmdir()


def sweep(base: Path) -> list[str]:
    """Remove what spawners that are gone left below `base`: their cgroups with all processes in them, and their state directories.

    Returns the tokens of the swept spawners. What is locked belongs to a living spawner and is not touched.
    """
    swept = []
    for state in sorted(base.glob(f"{_PREFIX}*")) if base.is_dir() else []:
        try:
            record = os.open(state / _RECORD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
            text = os.pread(record, 65536, 0)
            paths = json.loads(text)["cgroups"] if text else {}
            cgroups.sweep({kind: path for kind, path in paths.items() if path.endswith(f"/{state.name}")})
            remove(state)
        except BlockingIOError:
            continue
        finally:
            os.close(record)
        swept.append(state.name)
    return swept
