"""What a work directory was like before an agent came: enough to tell what changed, without its content."""

from __future__ import annotations

import hashlib
import io
import stat
import tarfile
from pathlib import Path
from typing import Any

Manifest = dict[str, list[Any]]
"""Relative path → [kind, mode, size, SHA-256 or link target], as `operations.describe` has it."""


def manifest_of(tree: Path, left_out: set[str]) -> Manifest:
    """Of a directory of this machine as it arrives in a pod: entries that are neither file, directory nor link do not."""
    found: Manifest = {}
    for path in sorted(tree.rglob("*")):
        name = str(path.relative_to(tree))
        if any(name == out or name.startswith(f"{out}/") for out in left_out):
            continue
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            found[name] = ["link", 0, 0, str(path.readlink())]
        elif stat.S_ISDIR(status.st_mode):
            found[name] = ["directory", stat.S_IMODE(status.st_mode), 0, ""]
        elif stat.S_ISREG(status.st_mode):
            found[name] = ["file", status.st_mode & 0o777, status.st_size, hashlib.sha256(path.read_bytes()).hexdigest()]
    return found


def pack_tree(tree: Path, left_out: set[str]) -> bytes:
    """A tar of the directory's content, without what will be mounted over."""
    output = io.BytesIO()

    def kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if info.name in left_out else info

    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for child in sorted(tree.iterdir()):
            tar.add(child, child.name, filter=kept)
    return output.getvalue()
