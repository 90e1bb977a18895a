"""Tar streams between host and sandbox: what goes in comes out, and nothing in a stream reaches outside its target."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.environments import archive
from sandbox.environments.archive import Change
from sandbox.environments.namespace import transfer
from tests.support.examples import examples

NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
    lambda name: name not in (".", "..")
)
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=2000), max_size=8).filter(
    lambda tree: not any(f"{one}/" == other[: len(one) + 1] for one in tree for other in tree)
)


def plant(root: Path, tree: dict[str, bytes]) -> Path:
    root.mkdir(parents=True)
    for name, data in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def packed(path: Path, overlay: bool = False) -> bytes:
    output = io.BytesIO()
    transfer.pack(str(path), output, overlay)
    return output.getvalue()


@examples(40)
@given(TREES)
def test_down_and_up_again(tree: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        source = plant(root / "source", tree)
        assert archive.extract(packed(source), root / "down") == []
        data, target = archive.pack(source, str(root / "up"))
        transfer.unpack(target, io.BytesIO(data))
        assert files(root / "up") == tree
        assert not tree or files(root / "down") == tree


@examples(40)
@given(TREES, TREES)
def test_changes_turn_the_pristine_tree_into_the_upper_layer(pristine: dict[str, bytes], upper: dict[str, bytes]) -> None:
    """Without deletions, the pristine tree with the changes applied is the merged tree; what is equal is no change."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        lower = plant(root / "lower", pristine)
        try:
            merged = plant(root / "merged", pristine | upper)
        except (NotADirectoryError, IsADirectoryError, FileExistsError):
            return  # a file of one tree is a directory of the other
        found = archive.changes(packed(plant(root / "upper", upper), overlay=True), lower)
        assert all(change.kind in ("file", "directory") for change in found)
        written = {change.path: change.data for change in found if change.kind == "file"}
        assert written == {name: data for name, data in upper.items() if pristine.get(name) != data}
        assert pristine | written == files(merged)


def test_one_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("echo")
    (tmp_path / "run.sh").chmod(0o755)
    archive.extract(packed(tmp_path / "run.sh"), tmp_path / "down/copy.sh")
    assert (tmp_path / "down/copy.sh").read_text() == "echo"
    assert (tmp_path / "down/copy.sh").stat().st_mode & 0o777 == 0o755
    data, directory = archive.pack(tmp_path / "run.sh", "/opt/tool")
    assert directory == "/opt"
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(member.name, member.mode & 0o777) for member in tar] == [("tool", 0o755)]


def test_a_hostile_stream_stays_in_its_target(tmp_path: Path) -> None:
    """Even if the packer inside were taken over, the host writes nothing outside."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, kind in (("../up", b"0"), ("/abs", b"0"), ("a/../../up", b"0"), ("dev", tarfile.CHRTYPE), ("hard", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        link = tarfile.TarInfo("out")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        through = tarfile.TarInfo("out/through")
        through.size = 1
        tar.addfile(through, io.BytesIO(b"x"))
    skipped = archive.extract(output.getvalue(), tmp_path / "target")
    assert skipped == ["../up", "/abs", "a/../../up", "dev", "hard", "out"]
    assert sorted(files(tmp_path)) == ["target/out/through"]


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts as device nodes need root outside a sandbox")
def test_whiteouts_and_opaque_directories(tmp_path: Path) -> None:
    lower = plant(tmp_path / "lower", {"gone": b"1", "dir/a": b"2", "dir/b/c": b"3"})
    upper = plant(tmp_path / "upper", {"dir/a": b"2"})
    os.mknod(upper / "gone", 0o020000, 0)
    os.setxattr(upper / "dir", "trusted.overlay.opaque", b"y")
    assert archive.changes(packed(upper, overlay=True), lower) == [
        Change("dir/b", "deleted"),
        Change("dir/b/c", "deleted"),
        Change("gone", "deleted"),
    ]


def test_what_lies_behind_a_link_of_the_tree_is_not_the_trees(tmp_path: Path) -> None:
    """An agent may put a directory where the tree has a link to one of the host's: nothing there is read, listed or compared."""
    host, tree, upper = tmp_path / "host", tmp_path / "tree", tmp_path / "upper"
    for directory in (host, tree, upper / "data"):
        directory.mkdir(parents=True)
    (host / "secret").write_text("same")
    (tree / "data").symlink_to(host)
    (tree / "endless").symlink_to("/dev")
    (upper / "data" / "secret").write_text("same")
    (upper / "endless").mkdir()
    (upper / "endless" / "zero").write_text("x")
    output = io.BytesIO()
    transfer.pack(str(upper), output, overlay=True)
    found = {change.path: change.kind for change in archive.changes(output.getvalue(), tree)}
    assert found == {"data": "directory", "data/secret": "file", "endless": "directory", "endless/zero": "file"}


def test_an_agent_cannot_replace_the_hosts_own_records(tmp_path: Path) -> None:
    """Logs come down into the directory where the host has written its own: those stay, and the rest still arrives."""
    logs, target = tmp_path / "logs", tmp_path / "trial"
    for directory in (logs / "harness.log", logs / "session", target):
        directory.mkdir(parents=True)
    (logs / "harness.log" / "forged").write_text("x")
    (logs / "trajectory.json").write_text("forged")
    (logs / "session" / "deep").write_text("forged")
    (logs / "zz.log").write_text("real")
    for name in ("harness.log", "trajectory.json", "session"):
        (target / name).write_text("the host's")
    assert sorted(archive.extract(packed(logs), target)) == [
        "harness.log",
        "harness.log/forged",
        "session",
        "session/deep",
        "trajectory.json",
    ]
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        **dict.fromkeys(("harness.log", "trajectory.json", "session"), "the host's"),
        "zz.log": "real",
    }
