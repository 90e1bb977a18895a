"""A directory of an image, as its stacked layers show it, copied to this machine without mounting anything."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from sandbox.environments.errors import ImageError


def copy_tree(layers: Sequence[Path], path: str, target: Path) -> None:
    """Copy what is at the absolute `path` of an image into `target`, which must not exist. Layers: the topmost first.

    Files keep mode and time, links are copied as links; what is neither file, link nor directory is left out. Raises ImageError where the
    image has no such directory; one that is reached through a link has to be named by its own place.
    """
    places = list(layers)
    for name in PurePosixPath(path).parts[1:]:
        places = _visible(places).get(name, [])
        if not places or not stat.S_ISDIR(places[0].lstat().st_mode):
            raise ImageError(
                f"the image has no directory {path}: set `workdir` in [environment] of the task's task.toml to the place of its tree"
            )
    target.mkdir()
    _copy(places, target)


def _copy(places: list[Path], target: Path) -> None:
    for name, found in sorted(_visible(places).items()):
        top = found[0]
        mode = top.lstat().st_mode
        if stat.S_ISDIR(mode):
            (target / name).mkdir()
            _copy(found, target / name)
        elif stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            shutil.copy2(top, target / name, follow_symlinks=False)
    shutil.copystat(places[0], target)


def _visible(places: list[Path]) -> dict[str, list[Path]]:
    """Entries of directories that lie on each other: by name the places where each is, the topmost first; of all but directories one."""
    found: dict[str, list[Path]] = {}
    closed: set[str] = set()
    for place in places:
        for entry in os.scandir(place):
            if entry.name in closed:
                continue
            if _is_whiteout(entry):
                closed.add(entry.name)
                continue
            directory = entry.is_dir(follow_symlinks=False)
            if directory or entry.name not in found:
                found.setdefault(entry.name, []).append(Path(entry.path))
            if not directory or _is_opaque(entry.path):
                closed.add(entry.name)
    return found


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    status = entry.stat(follow_symlinks=False)
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _is_opaque(path: str) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise
