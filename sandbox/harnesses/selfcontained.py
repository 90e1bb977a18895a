"""Programs that need nothing of the system they run on: they bring their own C library, dynamic loader and all other shared libraries.

```
<home>/bin/NAME        a shell script: the loader below, told to look for libraries here first, starts the program
<home>/bin/*.program   the program as it was published
<home>/lib/            its libraries and the loader, as they are on the machine that installs
```

So it starts in a task image with an older C library, with another one, or with none. The library path is an argument of the loader and
not a variable: what the program itself starts (a shell, the task's own Python) is not affected. Nothing in it names the place where it
lies. The Python is the one that installs, with its standard library, but without `site-packages`, tests and Tk.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

PYTHON_HOME = ".python"
"""Below the tree of a Python harness, whose other files are what `import` sees."""
_LEFT_OUT = {
    *("site-packages", "dist-packages", "sitecustomize.py", "usercustomize.py"),
    *("test", "tests", "idlelib", "idle_test", "tkinter", "turtledemo", "turtle.py", "ensurepip", "lib2to3", "pydoc_data"),
}
_NO_EXTENSION = re.compile(r"(_tkinter|_test\w*|_ctypes_test|_xx\w*|xx\w*|nis)")
_SCRIPT = """#!/bin/sh
home=${{0%/bin/*}}
{set_up}exec "$home/lib/{loader}" --library-path "$home/lib" --argv0 "$0" "$home/bin/{program}" {arguments}"$@"
"""
_LISTED = re.compile(r"^\s*([^\s/]+) => (/\S+) \(0x", re.MULTILINE)
_PT_INTERP = 3
_ASKED_FOR = ("libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2")
"""What the C library opens by itself when a thread ends or a name is looked up: no program names them."""


class NotSelfContained(Exception):
    """A program cannot be made so here; the message says why."""


def python_of(tree: Path) -> str:
    """The Python of an installed tree."""
    return str(tree / PYTHON_HOME / "bin" / "python3")


def own_python(tree: Path) -> None:
    """Give the packages in `tree` a Python of their own. Raises NotSelfContained."""
    home, base = tree / PYTHON_HOME, Path(sys.base_prefix)
    standard = Path(sysconfig.get_path("stdlib"))
    place = home / standard.relative_to(base)
    shutil.copytree(standard, place, ignore=_left_out)
    program = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    enclose(home, "python3", program, tree.rglob("*.so*"))
    script = "import compileall, sys, ssl, ctypes; compileall.compile_dir(sys.argv[1], quiet=2)"
    proven([python_of(tree), "-I", "-c", script, str(place)])


def enclose(home: Path, name: str, program: Path, parts: Iterable[Path] = (), set_up: str = "", arguments: str = "") -> None:
    """Place `program` in `home` and start it as `home/bin/name`. `parts` are other files whose libraries it will need.

    `set_up` are lines of the shell before it starts, `arguments` go before those that it is given; `$home` is where it lies.

    Raises NotSelfContained when a library of `program` is not here; one that only a part wants may be missing, as it may be everywhere.
    """
    (home / "bin").mkdir(parents=True, exist_ok=True)
    (home / "lib").mkdir(exist_ok=True)
    placed = home / "bin" / f"{program.name}.program"
    shutil.copy2(program, placed)
    loader = _loader(program)
    shutil.copy2(loader, home / "lib" / loader.name)
    needed = _libraries(loader, program, home / "lib", wanted=True)
    beside = needed.get("libc.so.6", loader).parent
    needed |= {library: beside / library for library in _ASKED_FOR if (beside / library).is_file()}
    for part in [*parts]:
        if part.is_file() and not part.is_symlink() and _is_elf(part):
            needed |= _libraries(loader, part, home / "lib", wanted=False)
    for library, found in needed.items():
        if not found.resolve().is_relative_to(home.parent.resolve()):
            shutil.copy2(found, home / "lib" / library)
    script = home / "bin" / name
    script.write_text(_SCRIPT.format(loader=loader.name, program=placed.name, set_up=set_up, arguments=arguments))
    script.chmod(0o755)


def _left_out(folder: str, names: list[str]) -> set[str]:
    extensions = {name for name in names if folder.endswith("lib-dynload") and _NO_EXTENSION.match(name)}
    return {name for name in names if name in _LEFT_OUT or name.startswith("config-") or ".opt-" in name} | extensions


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _loader(program: Path) -> Path:
    """The dynamic loader that an x86-64 program names (ELF-64, little-endian: System V ABI, program header PT_INTERP)."""
    data = program.read_bytes()
    if data[:6] == b"\x7fELF\x02\x01":
        start, size, count = *struct.unpack_from("<Q", data, 32), *struct.unpack_from("<HH", data, 54)
        for at in range(start, start + size * count, size):
            if struct.unpack_from("<I", data, at)[0] == _PT_INTERP:
                offset, length = struct.unpack_from("<Q", data, at + 8)[0], struct.unpack_from("<Q", data, at + 32)[0]
                return Path(os.fsdecode(data[offset : offset + length - 1])).resolve()
    raise NotSelfContained(f"{program} is no dynamically linked 64-bit program")


def _libraries(loader: Path, file: Path, own: Path, wanted: bool) -> dict[str, Path]:
    """Name → place of every shared library that `file` needs, found first in `own`. Runs nothing of `file`: the loader only lists."""
    listing = subprocess.run(
        [loader, "--library-path", own, "--list", file], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    missing = [line.split()[0] for line in listing.stdout.splitlines() if line.endswith("not found")]
    if wanted and (missing or listing.returncode):
        raise NotSelfContained(f"{file} needs {', '.join(missing) or listing.stderr.strip()}, which is not on this machine")
    return {name: Path(place) for name, place in _LISTED.findall(listing.stdout)}


def proven(command: list[str]) -> None:
    """Start it with nothing of this machine's environment. Raises NotSelfContained."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env={"LANG": "C.UTF-8"})
    if ran.returncode:
        raise NotSelfContained(f"{command[0]} does not start: {ran.stderr.strip()[-400:]}")
