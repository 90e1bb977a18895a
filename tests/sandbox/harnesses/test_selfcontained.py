"""A program that brings its own libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from sandbox.harnesses.selfcontained import NotSelfContained, enclose, proven


def test_an_enclosed_program_starts_wherever_it_lies_and_uses_its_own_libraries(tmp_path: Path) -> None:
    enclose(tmp_path / "here", "show", Path("/bin/cat"))
    home = (tmp_path / "here").rename(tmp_path / "there")
    mapped = subprocess.run([home / "bin" / "show", "/proc/self/maps"], capture_output=True, text=True, check=True).stdout
    libraries = {Path(line.split()[-1]) for line in mapped.splitlines() if ".so" in line}
    assert {home / "lib" / "libc.so.6", home / "bin" / "cat.program"} <= libraries | {home / "bin" / "cat.program"}
    assert all(path.parent == home / "lib" for path in libraries)


def test_what_cannot_be_enclosed_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(NotSelfContained, match="script is no dynamically linked 64-bit program"):
        enclose(tmp_path / "home", "script", script)
    with pytest.raises(NotSelfContained, match="/bin/false does not start"):
        proven(["/bin/false"])
