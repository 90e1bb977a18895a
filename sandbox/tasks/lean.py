"""A task as Harbor reads it again for every trial: description, instruction and nothing else.

Harbor hashes and filters every file of a task directory several times a trial, which costs more than the trial itself once a tree has more
than a few files. The tree, the check and the solution therefore stay where they are, and a lean twin names them by their digest.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

FOLDER = ".harbor"


def lean_twin(task: Path) -> Path:
    """The twin of a task directory, made when it is first asked for. Safe to call from several threads."""
    twin = task.parent / FOLDER / task.name
    if twin.is_dir():
        return twin
    twin.parent.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=twin.parent))
    for name in ("task.toml", "instruction.md"):
        shutil.copy(task / name, scratch / name)
    for folder in ("environment", "tests"):
        (scratch / folder).mkdir()
    (scratch / "tests" / "test.sh").write_text(f"# Stands for the files of the task: SHA-256 {digest(task)}\n")
    try:
        scratch.rename(twin)
    except OSError:  # another thread was faster
        shutil.rmtree(scratch)
    return twin


def full_task(twin: Path) -> Path:
    """The task directory that a twin stands for."""
    return twin.parent.parent / twin.name


def digest(task: Path) -> str:
    """SHA-256 of all that a task directory holds: names, modes, content."""
    found = hashlib.sha256()
    for path in sorted(task.rglob("*")):
        found.update(f"{path.relative_to(task)}\0{path.lstat().st_mode:o}\0".encode())
        if path.is_symlink():
            found.update(str(path.readlink()).encode())
        elif path.is_file():
            found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
