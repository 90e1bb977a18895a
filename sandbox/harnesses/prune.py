"""`rl harness prune`: runtimes in the store that no pin names any more, and their end.

Only directories of harnesses that are named are looked at: what lies beside them may belong to somebody's own adapter. A tree that a live
run holds (`Store.hold`) stays, and a harness that is being installed is waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .pins import Pin
from .store import Store, discard, lock


class Old(NamedTuple):
    """`tree` may be missing beside its manifest, and the manifest beside its tree: what a killed installation leaves."""

    name: str
    tree: Path
    bytes: int
    in_use: bool

    @property
    def manifest(self) -> Path:
        return self.tree.with_name(f"{self.tree.name}.json")


def old(store: Store, pins: Iterable[Pin]) -> list[Old]:
    """What is installed of these harnesses and is not what their pins name now. Changes nothing."""
    wanted: dict[str, set[str]] = {}
    for pin in pins:
        wanted.setdefault(pin.name, set()).add(store.tree(pin).name)
    found = []
    for name, kept in wanted.items():
        place = store.root / name
        entries = [path for path in place.iterdir() if not path.is_symlink()] if place.is_dir() else []
        names = {path.name for path in entries if path.is_dir()} | {path.stem for path in entries if path.suffix == ".json"}
        for tree in sorted(place / entry for entry in names - kept if not entry.startswith(".")):
            row = Old(name, tree, _size(tree), False)
            found.append(row._replace(in_use=_held(row.manifest)))
    return found


def remove(store: Store, rows: Iterable[Old]) -> list[Old]:
    """Those of `rows` that are gone now; one that a run has come to hold meanwhile is not, and none while its harness is installed."""
    gone = []
    for row in rows:
        with (store.root / f".{row.name}.lock").open("wb") as installing, contextlib.ExitStack() as held:
            fcntl.flock(installing, fcntl.LOCK_EX)
            try:
                held.callback(os.close, lock(row.manifest, fcntl.LOCK_EX))
            except BlockingIOError:
                continue
            except FileNotFoundError:
                pass  # nobody can hold what has no manifest
            row.manifest.unlink(missing_ok=True)
            discard(row.tree)
        if not row.tree.exists():
            gone.append(row)
    return gone


def _held(manifest: Path) -> bool:
    try:
        os.close(lock(manifest, fcntl.LOCK_EX))
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def _size(tree: Path) -> int:
    return sum(os.lstat(f"{folder}/{name}").st_size for folder, _, names in os.walk(tree) for name in names)
