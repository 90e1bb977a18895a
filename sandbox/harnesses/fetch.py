"""Fetching a pinned runtime with the package client of its kind, and checking it before any of it is used."""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from .pins import DebianPin, NpmPin, Pin, PythonPin
from .selfcontained import enclose, own_python, proven

TIMEOUT_S = 900
_LOCALE = Path("/usr/lib/locale/C.utf8")


class FetchError(Exception):
    """The client is missing, failed, or brought other bytes; the message says which."""


def fetch(pin: Pin, tree: Path, scratch: Path, arguments: Sequence[str]) -> None:
    """Make the runtime at `tree`, which does not exist yet. `arguments` go to the client. Raises FetchError or NotSelfContained."""
    match pin:
        case PythonPin():
            _python(pin, tree, arguments)
        case NpmPin():
            _npm(pin, tree, scratch, arguments)
        case DebianPin():
            _debian(pin, tree, scratch, arguments)


def _python(pin: PythonPin, tree: Path, arguments: Sequence[str]) -> None:
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv) if uv.exists() else "uv", "pip", "install", "--quiet", "--no-config"]
    command += ["--python", sys.executable, "--target", str(tree)]
    # Copies, not hard links into uv's cache: making the tree read-only must not touch the cache.
    command += ["--require-hashes", "--no-deps", "--compile-bytecode", "--link-mode", "copy", *arguments, "-r", str(pin.lock)]
    _run(command, pin)
    own_python(tree)


def _npm(pin: NpmPin, tree: Path, scratch: Path, arguments: Sequence[str]) -> None:
    if shutil.which("npm") is None:
        raise FetchError(f"{pin.name} comes from the npm registry and `npm` was not found; install Node.js with npm")
    _run(["npm", "pack", "--silent", "--pack-destination", str(scratch), *arguments, pin.source], pin)
    if (archive := next(scratch.glob("*.tgz"), None)) is None:
        raise FetchError(f"`npm pack {pin.source}` succeeded and left no archive; nothing was installed")
    with archive.open("rb") as file:
        integrity = "sha512-" + base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()
    if integrity != pin.integrity:
        raise FetchError(f"{pin.source} has integrity {integrity}, expected {pin.integrity}; nothing was installed")
    tree.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.startswith("package/"):
                    member.name = member.name.removeprefix("package/")
                    tar.extract(member, tree, filter="data")
    except tarfile.TarError as error:
        raise FetchError(f"the archive of {pin.source} cannot be unpacked: {error}") from error


def _debian(pin: DebianPin, tree: Path, scratch: Path, arguments: Sequence[str]) -> None:
    """Of the packages: the program, shared libraries and copyrights. No package script runs and nothing is installed on this system."""
    wanted = ", ".join(f"{name} {version}" for name, version, _ in pin.packages)
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise FetchError(f"{pin.name} works in tmux, from packages of Debian 12 ({wanted}); `apt-get` and `dpkg-deb` were not found")
    download = ["apt-get", "download", *arguments, *(f"{name}={version}" for name, version, _ in pin.packages)]
    try:
        _run(download, pin, scratch)
    except FetchError:  # this machine has no package lists yet, or old ones: fetch lists of our own, which anybody may do
        lists = [f"-oDir::State::lists={scratch}/lists", f"-oDir::Cache={scratch}/cache"]
        (scratch / "lists" / "partial").mkdir(parents=True)
        _run(["apt-get", *arguments, *lists, "update"], pin, scratch)
        _run([*download, *lists], pin, scratch)
    for name, version, digest in pin.packages:
        found = [path for path in scratch.glob("*.deb") if path.name.startswith(f"{name}_")]
        data = found[0].read_bytes() if found else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise FetchError(f"package {name} {version} has not the SHA-256 {digest} of its pin; nothing was installed")
        _unpack(found[0], name, pin, tree, scratch)
    _tmux(tree, scratch / pin.program)


def _tmux(tree: Path, program: Path) -> None:
    """It refuses to start without a UTF-8 locale, which an image need not have: it brings one, and keeps it from what runs in its panes."""
    if not _LOCALE.is_dir():
        raise FetchError(f"tmux needs the locale {_LOCALE.name}, and this machine has no {_LOCALE}")
    shutil.copytree(_LOCALE, tree / "lib" / "locale" / _LOCALE.name)
    (tree / "tmux.conf").write_text("set-environment -gu LOCPATH\n")
    enclose(tree, "tmux", program, set_up='export LOCPATH="$home/lib/locale"\n', arguments='-f "$home/tmux.conf" ')
    proven([str(tree / "bin" / "tmux"), "-V"])


def _unpack(archive: Path, package: str, pin: DebianPin, tree: Path, scratch: Path) -> None:
    (tree / "lib").mkdir(parents=True, exist_ok=True)
    try:
        content = subprocess.run(["dpkg-deb", "--fsys-tarfile", archive], check=True, capture_output=True, timeout=TIMEOUT_S).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise FetchError(f"package {package} cannot be unpacked: {error}") from error
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if str(path) == pin.program:
                member.name, place = str(path), scratch
            elif ".so." in path.name:
                member.name, place = f"lib/{path.name}", tree
            elif path.name == "copyright":
                member.name, place = f"licenses/{package}", tree
            else:
                continue
            tar.extract(member, place, filter="data")


def _run(command: list[str], pin: Pin, cwd: Path | None = None) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=TIMEOUT_S, cwd=cwd)
    except FileNotFoundError as error:
        raise FetchError(f"{pin.name} cannot be installed: `{command[0]}` was not found") from error
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"installing {pin.name} took more than {TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        raise FetchError(f"{pin.name} {pin.version} could not be fetched: {(error.stderr or error.stdout).strip()[-400:]}") from error
