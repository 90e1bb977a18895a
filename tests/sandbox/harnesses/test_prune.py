"""Old runtimes go when somebody says so, and none that a live run uses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from sandbox.cli import main
from sandbox.harnesses.pins import PINS, NpmPin, Pin
from sandbox.harnesses.store import RuntimeMissing, RuntimeStoreError, Store

NOW = PINS["codex"]
HOLD = """
import sys, time
from pathlib import Path
from sandbox.harnesses.pins import NpmPin
from sandbox.harnesses.store import Store
store = Store(Path(sys.argv[1]))
store.hold(NpmPin(*sys.argv[2:]))
print("held", flush=True)
time.sleep(600)
"""


def before(version: str) -> NpmPin:
    assert isinstance(NOW, NpmPin)
    return dataclasses.replace(NOW, version=version)


def place(store: Store, pin: Pin) -> Path:
    tree = store.tree(pin)
    (tree / "bin").mkdir(parents=True)
    (tree / "bin" / "program").write_bytes(b"x" * 1000)
    (tree / "bin").chmod(0o555)
    tree.chmod(0o555)
    store.manifest_path(pin).write_text("{}")
    return tree


def prune(store: Store, *arguments: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(main, ["harness", "prune", "--runtimes", str(store.root), "--json", *arguments])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, object]] = json.loads(result.output)
    return rows


@pytest.fixture
def store(tmp_path: Path) -> Store:
    found = Store(tmp_path)
    place(found, NOW)
    return found


def test_nothing_goes_before_it_was_shown(store: Store) -> None:
    tree = place(store, before("0.1.0"))
    (store.root / "own" / "1.0-0123456789abcdef").mkdir(parents=True)
    assert prune(store) == [{"name": "codex", "path": str(tree), "bytes": 1000, "in_use": False, "removed": False}]
    assert tree.is_dir()
    assert [row["removed"] for row in prune(store, "--apply")] == [True]
    assert sorted(path.name for path in tree.parent.iterdir()) == sorted([store.tree(NOW).name, store.manifest_path(NOW).name])
    assert (store.root / "own" / "1.0-0123456789abcdef").is_dir()
    assert prune(store, "--apply") == []


def test_only_what_is_named_is_looked_at(store: Store) -> None:
    place(store, before("0.1.0"))
    assert prune(store, "opencode", "--apply") == []
    assert len(prune(store, "codex")) == 1


def test_what_a_live_run_uses_stays(store: Store) -> None:
    pin = before("0.1.0")
    tree = place(store, pin)
    arguments = [store.root, pin.name, pin.version, pin.package, pin.integrity, pin.published]
    with subprocess.Popen([sys.executable, "-c", HOLD, *map(str, arguments)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "held\n"
        assert [(row["in_use"], row["removed"]) for row in prune(store, "--apply")] == [(True, False)]
        assert (tree / "bin" / "program").is_file()
        run.kill()
    assert [(row["in_use"], row["removed"]) for row in prune(store, "--apply")] == [(False, True)]
    with pytest.raises(RuntimeMissing, match="harness install codex"):
        store.hold(pin)


def test_what_a_killed_installation_left_goes_too(store: Store) -> None:
    tree = place(store, before("0.1.0"))
    store.manifest_path(before("0.1.0")).unlink()
    store.manifest_path(before("0.2.0")).write_text("{}")
    assert [row["removed"] for row in prune(store, "--apply")] == [True, True]
    assert not tree.exists() and not store.manifest_path(before("0.2.0")).exists()


def test_what_a_live_run_uses_is_not_replaced(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Store(store.root)
    holder.hold(NOW)
    monkeypatch.setattr("sandbox.harnesses.store.fetch", lambda pin, built, scratch, arguments: built.mkdir())
    with pytest.raises(RuntimeStoreError, match="a live run uses codex"):
        store.install(NOW, again=True)
    assert (store.tree(NOW) / "bin" / "program").is_file()
