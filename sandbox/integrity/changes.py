"""The agent's diff on its way from the agent's sandbox to the grading sandbox: a JSON file of the host, kept with the trial."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from sandbox.environments.archive import Change

MAX_BYTES = 32 << 20
"""Of changed file content. More is the agent's doing and is not graded."""

Step = tuple[str, str, int, bytes]
"""(kind, path, mode, content or link target): what `inside.py` applies."""


def dump(changes: Sequence[Change]) -> str:
    return json.dumps([[change.kind, change.path, change.mode, base64.b64encode(change.data).decode()] for change in changes])


def load(path: Path) -> list[Step]:
    """Paths stay below the work directory and modes are plain permissions; ValueError otherwise."""
    steps = []
    for kind, name, mode, data in json.loads(path.read_bytes()):
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{path} has a path outside the work directory: {name!r}")
        steps.append((kind, name, mode & 0o777, base64.b64decode(data)))
    return steps
