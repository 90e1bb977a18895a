"""A repository as an agent may see it: one commit, and nothing that leads to any other.

The task's own repository, with its history, reflogs, packs, alternates, stashes, notes, worktrees, remotes and tags, moves out of the
tree to `history/` of the task. In its place comes a new repository with one commit of the same files. It is made from the index, so what
is tracked although ignored stays tracked. Grading puts the original back, read-only (`environment.py`). What an agent does to its
repository is never taken over (`policy.py`), and git never runs on the host in a tree that an agent wrote.

What is lost to the agent: `git describe`, and versions that are derived from tags.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

HISTORY = "history"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/nonexistent",
    "LANG": "C.UTF-8",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    **{f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (("NAME", "task"), ("EMAIL", "task@localhost"))},
    **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}
_SAFE = ("-c", "safe.directory=*", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-c", "core.logAllRefUpdates=false")
_GIT_S = 300


class HistoryError(Exception):
    """The history of a task's repository cannot be hidden; the message says what is in the way."""


def hide(task: Path) -> bool:
    """Replace the repository in the task's work tree, if it has one. Raises HistoryError; does nothing when it was hidden before."""
    tree = task / "environment" / "workspace"
    repositories = [path for path in tree.rglob(".git") if not path.is_symlink()]
    if not repositories or (task / HISTORY).exists():
        return False
    if repositories != [tree / ".git"] or not repositories[0].is_dir():
        odd = next(path for path in repositories if path != tree / ".git" or not path.is_dir())
        raise HistoryError(
            f"task {task.name}: {odd.relative_to(task)} is a submodule or a linked worktree; put its files in as plain files"
        )
    files = _git(tree, "ls-files", "-z")
    branch = _git(tree, "rev-parse", "--abbrev-ref", "HEAD").decode().strip()
    (tree / ".git").rename(task / HISTORY)
    _git(tree, "init", "-q", "--template=", "-b", "main" if branch == "HEAD" else branch)
    _git(tree, "config", "core.logAllRefUpdates", "false")
    _git(tree, "config", "gc.auto", "0")
    _git(tree, "update-index", "--add", "--remove", "-z", "--stdin", stdin=files)
    _git(tree, "commit", "-q", "--allow-empty", "-m", "The task's files")
    audit(task.name, tree)
    return True


def audit(name: str, tree: Path) -> None:
    """Raise HistoryError unless the object store holds exactly one commit and what it reaches, and no ref leads elsewhere."""
    stored = set(_git(tree, "cat-file", "--batch-all-objects", "--batch-check=%(objectname)").split())
    reached = {line.split(b" ")[0] for line in _git(tree, "rev-list", "--objects", "HEAD").splitlines()}
    commits = _git(tree, "rev-list", "--count", "--all").strip()
    refs = _git(tree, "for-each-ref", "--format=%(refname)").split()
    names = {path.name for path in (tree / ".git").iterdir()}
    if stored != reached or commits != b"1" or len(refs) != 1 or names & {"packed-refs", "logs", "FETCH_HEAD", "ORIG_HEAD", "worktrees"}:
        raise HistoryError(f"task {name}: the one-commit view of its repository still holds something else; please report this task")


def _git(tree: Path, *arguments: str, stdin: bytes | None = None) -> bytes:
    try:
        done = subprocess.run(
            ["git", *_SAFE, "-C", str(tree), *arguments], input=stdin, env=_ENVIRONMENT, capture_output=True, check=True, timeout=_GIT_S
        )
    except FileNotFoundError as error:
        raise HistoryError("a task's tree is a git repository, but git is not installed here") from error
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode(errors="replace").strip()
        raise HistoryError(f"git {arguments[0]} failed in {tree}: {words}") from error
    except subprocess.TimeoutExpired as error:
        raise HistoryError(f"git {arguments[0]} took longer than {_GIT_S} s in {tree}") from error
    return done.stdout
