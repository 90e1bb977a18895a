"""What an image gives away of a task's solution, looked for once, when it is built.

Looked for are the lines that a solution adds, and those of the hidden tests; short ones say nothing, and what the agent's own tree holds
already is no secret. They are looked for in every file, in the members of wheels and other archives, and, as string constants, in byte
code. An installed copy of the project itself is told too: another version may hold the fix.
"""

from __future__ import annotations

import functools
import hashlib
import io
import lzma
import os
import re
import tarfile
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

_SHORTEST = 25
_SHORTEST_CONSTANT = 12
_MAX_BYTES = 20 << 20
_ARCHIVES = (".whl", ".zip", ".egg", ".tar", ".gz", ".tgz", ".bz2", ".xz")
_QUOTED = re.compile(rb'"([^"\\]{%d,})"|\'([^\'\\]{%d,})\'' % (_SHORTEST_CONSTANT, _SHORTEST_CONSTANT))
_DISTRIBUTION = re.compile(r"(?P<name>[\w.-]+?)-(?P<version>\d[^-]*?)(-py[\d.]+)?\.(dist|egg)-info")


class Leak(NamedTuple):
    kind: Literal["solution", "tests", "version"]
    path: str
    """In the image."""
    detail: str


@dataclass(frozen=True)
class Secrets:
    """What must not be found. `project` and `version` are those of the task's own tree, empty where it does not say."""

    solution: frozenset[bytes]
    tests: frozenset[bytes]
    project: str = ""
    version: str = ""

    @property
    def digest(self) -> str:
        parts = [*sorted(self.solution), b"", *sorted(self.tests), self.project.encode(), self.version.encode()]
        return hashlib.sha256(b"\n".join(parts)).hexdigest()


def secrets_of(task: Path) -> Secrets:
    """From the directories `solution`, `tests` and `environment/workspace` of a task."""
    tree = task / "environment" / "workspace"
    known = {line for path in _files(tree) for line in _lines(_read(path))}
    solution = {line for path in _files(task / "solution") for line in _added(_read(path))}
    tests = {line for path in _files(task / "tests") for line in _lines(_read(path))}
    project, version = _project(tree / "pyproject.toml")
    return Secrets(frozenset(solution - known), frozenset(tests - known - solution), project, version)


def scan(layers: Iterable[Path], secrets: Secrets) -> list[Leak]:
    """Every leak in these layers of an image. Reads all of their files; links are not followed."""
    constants = {found[1] or found[2] for line in secrets.solution for found in _QUOTED.finditer(line)}
    leaks = []
    for layer in layers:
        for directory, names, files in os.walk(layer):
            inside = "/" + os.path.relpath(directory, layer).removeprefix(".").lstrip("/")
            leaks += [Leak("version", f"{inside}/{name}".replace("//", "/"), words) for name in names if (words := _other(name, secrets))]
            for name in files:
                place = f"{inside}/{name}".replace("//", "/")
                leaks += [Leak(kind, place, words) for kind, words in _in_file(Path(directory, name), secrets, constants)]
    return sorted(set(leaks))


def _in_file(path: Path, secrets: Secrets, constants: set[bytes]) -> Iterator[tuple[Literal["solution", "tests"], str]]:
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return
    data = _read(path)
    if path.suffix == ".pyc":
        if constants and (count := sum(constant in data for constant in constants)) * 2 >= len(constants):
            yield "solution", f"{count} of {len(constants)} string constants of the solution"
        return
    found = set(_lines(data)) if path.suffix not in _ARCHIVES else {line for member in _members(data) for line in _lines(member)}
    for kind, lines in (("solution", secrets.solution), ("tests", secrets.tests)):
        if lines and (count := len(found & lines)) * 2 >= len(lines):
            yield kind, f"{count} of {len(lines)} lines"  # type: ignore[misc]


def _other(name: str, secrets: Secrets) -> str:
    found = _DISTRIBUTION.fullmatch(name)
    if not found or not secrets.project or _normal(found["name"]) != secrets.project or found["version"] == secrets.version:
        return ""
    return f"version {found['version']} of the project is installed" + (f", the task has {secrets.version}" if secrets.version else "")


def _project(file: Path) -> tuple[str, str]:
    try:
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    except (OSError, ValueError):
        return "", ""
    return _normal(str(project.get("name", ""))), str(project.get("version", ""))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file() and not path.is_symlink() and ".git" not in path.parts]


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)


def _lines(data: bytes) -> Iterator[bytes]:
    return (line for line in map(bytes.strip, data.splitlines()) if len(line) >= _SHORTEST)


def _added(data: bytes) -> Iterator[bytes]:
    """What a patch adds, or all of a file that holds none."""
    if b"\n+++ " not in data and not data.startswith(b"+++ "):
        return _lines(data)
    added = (line[1:] for line in data.splitlines() if line.startswith(b"+") and not line.startswith(b"+++ "))
    return _lines(b"\n".join(added))


def _members(data: bytes) -> Iterator[bytes]:
    """Files in an archive, as far as they and all of it stay small."""
    left = 10 * _MAX_BYTES
    try:
        for size, read in _zipped(data) if zipfile.is_zipfile(io.BytesIO(data)) else _tarred(data):
            if size <= _MAX_BYTES and (left := left - size) >= 0:
                yield read()
    except (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError, EOFError, OSError):
        return  # no archive, damaged, encrypted or packed in a way that nobody can read here


def _zipped(data: bytes) -> Iterator[tuple[int, Callable[[], bytes]]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for member in archive.infolist():
            yield member.file_size, functools.partial(archive.read, member)


def _tarred(data: bytes) -> Iterator[tuple[int, Callable[[], bytes]]]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                yield member.size, file.read
