"""Which of the agent's changes never reach the grading sandbox: what graders and interpreters read by themselves, and tests.

Leaving a change out puts the pristine file back. It is no accusation: an agent may well write tests or a conftest. They are listed with
the verdict. Configuration of the test runner needs no such care: it runs without any. Nor do directories `tests` deeper in the tree, which
may be part of a program.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.schemas.suspicion import Sign, signs

from .changes import Step
from .hidden import DIRECTORY

MANY = 5_000
"""Changes. Fewer are applied within seconds wherever a task can be graded, and work on a repository makes fewer."""
_GIT = re.compile(r"(^|/)\.git(/|$)")
_READ_BY_ITSELF = re.compile(
    rf"^{DIRECTORY}(/|$)|(^|/)(__pycache__(/|$)|(conftest|sitecustomize|usercustomize)\.py$|[^/]*\.(pyc|pyo|pth|egg-link)$)"
)
_SHADOWS = re.compile(r"^(_?pytest|pluggy|iniconfig|packaging|pygments|py)(/|\.py$|$)")


def split(changes: Sequence[Step], runs_tests: bool) -> tuple[list[Step], list[str]]:
    """The changes to apply, and the paths of those left out. A repository's `.git` is never taken from an agent; what test runners read
    by themselves is left out where `runs_tests`."""
    kept, left = [], []
    for step in changes:
        path = step[1]
        drop = _GIT.search(path) or (runs_tests and (_READ_BY_ITSELF.search(path) or _SHADOWS.search(path)))
        if drop:
            left.append(path)
        else:
            kept.append(step)
    return kept, left


def suspicious(changes: Sequence[Step]) -> list[str]:
    """Signs that changes are about the process that grades them: in the text of files, or by sheer number."""
    texts = [data.decode(errors="replace") for kind, _, _, data in changes if kind == "file" and b"\0" not in data[:1024]]
    found = signs(texts, (Sign.PROCESS_TAMPERING, Sign.REWARD_FILES, Sign.HIDDEN_FILES))
    return [*found, f"{len(changes)} files, directories and links changed"] if len(changes) > MANY else found
