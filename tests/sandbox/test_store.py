"""The runtime store: installed from a local index, checked to the byte, refused when anything differs."""

import base64
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sandbox.cli import main
from sandbox.harnesses.pins import DebianPin, NpmPin, PythonPin
from sandbox.harnesses.store import RuntimeMissing, RuntimeStoreError, RuntimeTampered, Store


def wheel(directory: Path, text: str = "VALUE = 1\n") -> str:
    """A distribution of one module; returns the wheel's SHA-256."""
    files = {
        "tinyharness.py": text,
        "tinyharness-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tinyharness\nVersion: 1.0\n",
        "tinyharness-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode() for name, content in files.items()
    }
    record = "".join(f"{name},sha256={digest},{len(files[name])}\n" for name, digest in digests.items())
    path = directory / "tinyharness-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (files | {"tinyharness-1.0.dist-info/RECORD": record + "tinyharness-1.0.dist-info/RECORD,,\n"}).items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    path = tmp_path / "index"
    path.mkdir()
    return path


@pytest.fixture
def pin(tmp_path: Path, index: Path) -> PythonPin:
    lock = tmp_path / "tiny.lock"
    lock.write_text(f"tinyharness==1.0 --hash=sha256:{wheel(index)}\n")
    return PythonPin("tiny", "1.0", lock)


def offline(index: Path) -> tuple[str, ...]:
    return ("--no-index", "--find-links", str(index), "--no-cache")


def test_install_places_a_read_only_tree_once(tmp_path: Path, pin: PythonPin, index: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(RuntimeMissing, match="harness install tiny"):
        store.require(pin)
    tree = store.install(pin, arguments=offline(index))
    assert store.verify(pin) == store.require(pin) == tree
    assert (tree / "tinyharness.py").read_text() == "VALUE = 1\n"
    assert list(tree.rglob("*.pyc"))
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o222 for path in [tree, *tree.rglob("*")])
    assert store.install(pin, arguments=("--no-index",)) == tree
    assert not list(tree.parent.glob(".installing*"))


def test_any_changed_added_or_missing_file_is_noticed(tmp_path: Path, pin: PythonPin, index: Path) -> None:
    store = Store(tmp_path / "store")
    tree = store.install(pin, arguments=offline(index))
    module, extra = tree / "tinyharness.py", tree / "sitecustomize.py"
    tree.chmod(0o755)
    extra.write_text("import os\n")
    with pytest.raises(RuntimeTampered, match=r"sitecustomize\.py"):
        store.verify(pin)
    extra.unlink()
    module.chmod(0o644)
    module.write_text("VALUE = 2\n")
    with pytest.raises(RuntimeTampered, match=r"tinyharness\.py"):
        store.verify(pin)
    with pytest.raises(RuntimeTampered, match=r"tinyharness\.py"):
        store.verify(pin, deep=False)
    module.unlink()
    with pytest.raises(RuntimeTampered, match=r"tinyharness\.py"):
        store.verify(pin, deep=False)
    store.install(pin, again=True, arguments=offline(index))
    assert store.verify(pin) == tree


def test_a_store_that_cannot_be_written_is_said(tmp_path: Path, pin: PythonPin, index: Path) -> None:
    (tmp_path / "store").write_text("a file")
    with pytest.raises(RuntimeStoreError, match=r"tiny 1\.0 cannot be placed in .*store: "):
        Store(tmp_path / "store").install(pin, arguments=offline(index))


def test_a_store_is_at_one_place_wherever_it_is_named_from(tmp_path: Path, pin: PythonPin, monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime is mounted at its path."""
    monkeypatch.chdir(tmp_path)
    assert Store(Path("store")).tree(pin) == Store(tmp_path / "store").tree(pin)


def test_a_package_with_other_bytes_is_not_installed(tmp_path: Path, pin: PythonPin, index: Path) -> None:
    wheel(index, "VALUE = 'other'\n")
    store = Store(tmp_path / "store")
    with pytest.raises(RuntimeStoreError, match=r"tiny 1\.0 could not be fetched"):
        store.install(pin, arguments=offline(index))
    with pytest.raises(RuntimeMissing):
        store.require(pin)
    assert not list(store.tree(pin).parent.iterdir())


def npm(directory: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program `npm` whose `pack` delivers `archive`, once no file `wait` is there."""
    (directory / "package.tgz").write_bytes(archive)
    program = directory / "npm"
    waits = f"while test -e {directory}/wait; do sleep 0.02; done"
    program.write_text(f'#!/bin/sh\necho >>{directory}/asked\n{waits}\ncp {directory}/package.tgz "$4"/tool-1.0.tgz\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


INSTALL = """
import sys
from pathlib import Path
from sandbox.harnesses.pins import NpmPin
from sandbox.harnesses.store import Store
root, integrity, *again = sys.argv[1:]
Store(Path(root)).install(NpmPin("tool", "1.0", "@some/tool", integrity), again=bool(again))
"""


def installing(root: Path, pin: NpmPin, *again: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", INSTALL, root, pin.integrity, *again])


def test_several_who_install_at_once_do_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({f"package/{number}": "x" for number in range(50)})
    npm(tmp_path, archive, monkeypatch)
    pin, store = NpmPin("tool", "1.0", "@some/tool", integrity(archive)), Store(tmp_path / "store")
    assert [process.wait() for process in [installing(store.root, pin) for _ in range(3)]] == [0] * 3
    assert len((tmp_path / "asked").read_text().splitlines()) == 1
    assert store.verify(pin).is_dir()
    assert [process.wait() for process in [installing(store.root, pin, "again") for _ in range(2)]] == [0] * 2
    assert store.verify(pin).is_dir() and len(list(store.tree(pin).parent.iterdir())) == 2


def test_what_a_killed_installation_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/tool": "#!/bin/sh\n"})
    npm(tmp_path, archive, monkeypatch)
    pin, store = NpmPin("tool", "1.0", "@some/tool", integrity(archive)), Store(tmp_path / "store")
    (tmp_path / "wait").touch()
    process = installing(store.root, pin)
    while not (tmp_path / "asked").exists():
        time.sleep(0.02)
    process.kill()
    process.wait()
    left = next(store.tree(pin).parent.iterdir())
    (left / "tree").mkdir()
    (left / "tree" / "file").touch()
    (left / "tree").chmod(0o555)  # as it is just before it gets its place
    with pytest.raises(RuntimeMissing):
        store.require(pin)
    (tmp_path / "wait").unlink()
    assert store.install(pin) == store.verify(pin)
    assert {path.name for path in store.tree(pin).parent.iterdir()} == {store.tree(pin).name, store.manifest_path(pin).name}


def tgz(files: dict[str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(text), 0o755
            archive.addfile(info, io.BytesIO(text.encode()))
    return buffer.getvalue()


def integrity(data: bytes) -> str:
    return "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()


def test_an_npm_package_is_taken_only_with_the_pinned_integrity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/tool": "#!/bin/sh\n", "package/package.json": "{}", "outside": "x", "package/../../escape": "x"})
    npm(tmp_path, archive, monkeypatch)
    store = Store(tmp_path / "store")
    with pytest.raises(RuntimeStoreError, match="expected sha512-other; nothing was installed"):
        store.install(NpmPin("tool", "1.0", "@some/tool", "sha512-other"))
    archive = tgz({"package/tool": "#!/bin/sh\n", "package/package.json": "{}", "outside": "x"})
    npm(tmp_path, archive, monkeypatch)
    pin = NpmPin("tool", "1.0", "@some/tool", integrity(archive))
    tree = store.install(pin)
    assert sorted(path.name for path in tree.iterdir()) == ["package.json", "tool"]
    assert (tree / "tool").stat().st_mode & 0o111
    assert store.verify(pin) == tree


def test_whatever_became_of_an_installed_tree_is_said_and_put_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/tool": "#!/bin/sh\n"})
    npm(tmp_path, archive, monkeypatch)
    pin, store = NpmPin("tool", "1.0", "@some/tool", integrity(archive)), Store(tmp_path / "store")
    tree = store.install(pin)
    tree.chmod(0o755)
    os.mkfifo(tree / "pipe")
    for deep in (False, True):
        with pytest.raises(RuntimeTampered, match="pipe"):
            store.verify(pin, deep=deep)
    for text in ('{"name": "ti', "", "\xff", '{"name": 1}'):
        store.manifest_path(pin).chmod(0o644)
        store.manifest_path(pin).write_text(text, encoding="latin-1")
        with pytest.raises(RuntimeTampered, match="is no manifest any more; run `rl harness install tool --again`"):
            store.verify(pin)
    store.install(pin, again=True)
    assert store.verify(pin) == tree
    store.manifest_path(pin).unlink()  # killed between the tree and its manifest
    with pytest.raises(RuntimeMissing):
        store.verify(pin)
    assert store.install(pin) == store.verify(pin) == tree


def test_an_archive_that_leaves_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/../../escape": "x"})
    npm(tmp_path, archive, monkeypatch)
    with pytest.raises(RuntimeStoreError, match="cannot be unpacked"):
        Store(tmp_path / "store").install(NpmPin("tool", "1.0", "@some/tool", integrity(archive)))
    assert not (tmp_path / "escape").exists() and not (tmp_path / "store" / "escape").exists()


def test_without_npm_the_message_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeStoreError, match=r"`npm` was not found; install Node\.js"):
        Store(tmp_path / "store").install(NpmPin("tool", "1.0", "@some/tool", "sha512-x"))


def apt(directory: Path, archive: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs `apt-get` and `dpkg-deb`; the former delivers `archive` as package tool, once it has lists of its own."""
    (directory / "tool.deb").write_bytes(archive)
    deliver = f"cp {directory}/tool.deb tool_1.0_amd64.deb"
    apt_get = f'case "$*" in *update*) exit;; *State*) {deliver};; *) echo no lists >&2; exit 100;; esac'
    for name, script in {"apt-get": apt_get, "dpkg-deb": 'cat "$2"'}.items():
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_a_debian_package_is_taken_only_with_the_pinned_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its program comes out with libraries, loader and locale; nothing else of the package is kept."""
    files = {"./usr/bin/tmux": Path("/bin/cat"), "./usr/lib/libown.so.1": Path("/etc/hostname"), "./etc/other": Path("/etc/hostname")}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, source in files.items():
            archive.add(source.resolve(), name)
    data = buffer.getvalue()
    apt(tmp_path, data, monkeypatch)
    monkeypatch.setattr("sandbox.harnesses.fetch.proven", lambda command: None)  # `cat` is no tmux
    other, pin = (
        DebianPin("tool", "2.0", "usr/bin/tmux", (("tool", "1.0", digest),)) for digest in ("0" * 64, hashlib.sha256(data).hexdigest())
    )
    store = Store(tmp_path / "store")
    with pytest.raises(RuntimeStoreError, match=r"package tool 1\.0 has not the SHA-256 0000.* nothing was installed"):
        store.install(other)
    tree = store.install(pin)
    assert store.verify(pin) == tree
    assert {path.name for path in tree.iterdir()} == {"bin", "lib", "tmux.conf"}
    assert {"libown.so.1", "libc.so.6", "locale"} < {path.name for path in (tree / "lib").iterdir()}
    assert (tree / "bin" / "tmux.program").read_bytes() == Path("/bin/cat").read_bytes()


def test_another_kind_of_machine_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RuntimeStoreError, match="tool is pinned for x86_64 Linux, and this is aarch64"):
        Store(tmp_path / "store").install(NpmPin("tool", "1.0", "@some/tool", "sha512-x"))
    with pytest.raises(RuntimeStoreError, match="this is aarch64"):  # a store that was copied there
        Store(tmp_path / "store").verify(NpmPin("tool", "1.0", "@some/tool", "sha512-x"), deep=False)


def test_a_verification_has_a_line_for_each_harness_that_was_named_also_where_it_cannot_run(tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, ["harness", "verify", "codex", "opencode", "--json", "--runtimes", str(tmp_path)])
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(row["harness"], row["reward"]) for row in rows] == [("codex", None), ("opencode", None)]
    assert all("is not installed" in row["problem"] for row in rows) and ran.exit_code == 1


OWN = """
from sandbox.harnesses.base import HarnessAgent
from sandbox.harnesses.pins import NpmPin

class Own(HarnessAgent):
    pin = NpmPin("own", "1.0", "@some/tool", {integrity!r})

class Bare(HarnessAgent):
    pass
"""


def test_the_runtime_of_an_adapter_of_ones_own_is_installed_by_its_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tgz({"package/tool": "#!/bin/sh\n"})
    npm(tmp_path, archive, monkeypatch)
    (tmp_path / "own_harness.py").write_text(OWN.format(integrity=integrity(archive)))
    monkeypatch.syspath_prepend(str(tmp_path))

    def harness(*arguments: str) -> Result:
        return CliRunner().invoke(main, ["harness", *arguments, "--runtimes", str(tmp_path / "store")])

    assert harness("verify", "own_harness:Own", "--bytes").exit_code == 1
    assert harness("install", "own_harness:Own").exit_code == 0
    checked = harness("verify", "own_harness:Own", "--bytes")
    assert (checked.exit_code, checked.stdout) == (0, "own 1.0 is as it was published\n")
    assert "its bytes alone can be verified" in harness("verify", "own_harness:Own").stderr
    assert "own_harness:Bare has no `pin`" in harness("install", "own_harness:Bare").stderr
    assert "cannot be imported" in harness("install", "own_harness:Nothing").stderr
    assert "as module:Class" in harness("install", "nothing").stderr
