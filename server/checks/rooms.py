"""Asking the other rooms: each answers one JSON document from a process of its own, in its own interpreter, in bounded time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from .facts import Answer, Room

VERSIONS_S = 30
VERSIONS = """
import importlib.metadata as m, json, sys
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


class Rooms:
    """Thread-safe. `close` ends what is running, so that a server can end at any time and leaves nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[subprocess.Popen[str]] = set()
        self._closed = False

    def versions(self, python: Path, packages: list[str]) -> Room:
        answer = self.ask(dict[str, str | None], [str(python), "-P", "-c", VERSIONS, *packages], VERSIONS_S)
        return Room(python=str(python), problem=answer.problem, versions=answer.value or {})

    def ask(self, kind: Any, command: list[str], timeout_s: float) -> Answer[Any]:
        """The last line of the command's output, read as `kind`. The whole process group ends with the deadline."""
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        pipe = subprocess.PIPE
        try:
            with self._lock:
                if self._closed:
                    return Answer(None, "the server is ending")
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, process_group=0, env=environment
                )
                self._live.add(process)
        except OSError as error:
            return Answer(None, f"cannot run {command[0]}: {error.strerror}")
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            process.communicate()
            return Answer(None, f"no answer within {timeout_s:g} s")
        finally:
            with self._lock:
                self._live.discard(process)
        if process.returncode != 0:
            return Answer(None, (_last_line(err) or f"exit code {process.returncode}")[:500])
        try:
            return Answer(TypeAdapter(kind).validate_python(json.loads(_last_line(out))))
        except (ValueError, ValidationError) as error:
            return Answer(None, f"an answer that is not understood: {str(error).splitlines()[0]}")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._live:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    """Our own child, not yet waited for, so the group's number is its."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
