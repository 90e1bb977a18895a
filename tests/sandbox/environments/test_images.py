"""Images: unpacked without trust, cached by content, and seen by a sandbox in place of the host's programs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import stat
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.environments.errors import ImageError
from sandbox.environments.images.cache import ImageCache
from sandbox.environments.images.tree import copy_tree
from sandbox.environments.images.unpack import unpack, unpack_here
from sandbox.environments.spec import Directory, SandboxSpec
from tests.sandbox.environments.contract import LIMITS, NAMESPACES, Place, contract
from tests.sandbox.environments.images import Member, directory, layout, member, programs, tar
from tests.support.examples import examples

LINK, HARD, DEVICE, PIPE = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE


def unpacked(target: Path, *members: Member) -> int:
    target.mkdir()
    return unpack_here(io.BytesIO(tar(members)), target, 1 << 20)


def test_a_layer_becomes_a_directory(tmp_path: Path) -> None:
    size = unpacked(
        tmp_path / "layer",
        directory("etc", 0o555),
        member("etc/motd", b"hello", mode=0o4755),
        member("etc/again", kind=HARD, link="etc/motd"),
        member("bin", kind=LINK, link="/usr/bin"),
        member("dev/null", kind=DEVICE),
        member("run/pipe", kind=PIPE),
    )
    layer = tmp_path / "layer"
    assert size == 5
    assert (layer / "etc/again").read_text() == "hello" and (layer / "etc/again").stat().st_nlink == 2
    assert stat.S_IMODE((layer / "etc/motd").stat().st_mode) == 0o755  # no set-id bits
    assert os.readlink(layer / "bin") == "/usr/bin"
    assert not (layer / "dev").exists() and not (layer / "run").exists()


def test_whiteouts_become_the_overlays_own(tmp_path: Path) -> None:
    unpacked(
        tmp_path / "layer",
        member("etc/.wh.gone"),
        member("opt/.wh..wh..opq"),
        member("opt/new", b"new"),
        member("srv/.wh.replaced"),
        member("srv/replaced", b"file"),
        member("var/.wh.cache"),
        directory("var/cache"),
        member(".wh..wh.plnk", b"aufs"),
    )
    layer = tmp_path / "layer"
    gone = (layer / "etc/gone").lstat()
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert os.getxattr(layer / "opt", "user.overlay.opaque") == b"y"
    assert os.getxattr(layer / "var/cache", "user.overlay.opaque") == b"y"
    assert (layer / "srv/replaced").read_text() == "file"
    assert sorted(path.name for path in layer.iterdir()) == ["etc", "opt", "srv", "var"]


HOSTILE = {
    "upwards": [member("../outside", b"x")],
    "upwards inside": [member("a/../../outside", b"x")],
    "absolute": [member("/outside", b"x")],
    "through a link": [member("a", kind=LINK, link="/tmp"), member("a/outside", b"x")],
    "through a link upwards": [member("a", kind=LINK, link=".."), member("a/outside", b"x")],
    "directory through a link": [member("a", kind=LINK, link="/"), directory("a/outside")],
    "hard link upwards": [member("a", kind=HARD, link="../outside")],
    "hard link to an absolute path": [member("a", kind=HARD, link="/etc/passwd")],
    "hard link through a link": [member("a", kind=LINK, link="/etc"), member("b", kind=HARD, link="a/passwd")],
    "hard link to nothing": [member("a", kind=HARD, link="b")],
    "whiteout through a link": [member("a", kind=LINK, link="/tmp"), member("a/.wh.outside")],
    "whiteout of the parent": [member("a/.wh...")],
    "opaque through a link": [member("a", kind=LINK, link="/tmp"), member("a/.wh..wh..opq")],
    "file over a directory": [directory("a"), member("a", b"x")],
    "below a file": [member("a", b"x"), member("a/b", b"x")],
    "too large": [member("a", b"x" * (1 << 19)), member("b", b"x" * (1 << 19) + b"x")],
    "too many": [member(f"f{number}") for number in range(1100)],
    "too deep": [member("a/" * 300 + "b")],
    "an owner beyond all ids": [member("a", b"x", uid=2**32)],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_layers_are_refused(tmp_path: Path, members: list[Member]) -> None:
    with pytest.raises(ImageError):
        unpacked(tmp_path / "layer", *members)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layer"]


def test_unpacking_is_done_apart_and_says_what_is_wrong(tmp_path: Path) -> None:
    for name in ("good", "bad", "cut"):
        (tmp_path / name).mkdir()
    good = tar([member("a", b"x" * 10), member("b", b"y" * 10)])
    assert unpack(io.BytesIO(good), tmp_path / "good", 1 << 20) == 20
    with pytest.raises(ImageError, match="leads out of its layer"):
        unpack(io.BytesIO(tar([member("../a", b"x" * (1 << 20)), member("b", b"y" * (8 << 20))])), tmp_path / "bad", 1 << 30)
    with pytest.raises(ImageError, match="no complete tar archive"):
        unpack(io.BytesIO(good[:600]), tmp_path / "cut", 1 << 20)


_NAMES = st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq", "etc"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map("/".join)
_MEMBERS = st.lists(
    st.tuples(
        _PATHS, st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, LINK, HARD, DEVICE]), st.sampled_from(["..", "/", "a", "a/b", "../x"])
    )
)


@examples(60)
@given(_MEMBERS)
def test_no_archive_writes_outside_its_layer(tmp_path_factory: pytest.TempPathFactory, found: list[tuple[str, bytes, str]]) -> None:
    place = tmp_path_factory.mktemp("place")
    with contextlib.suppress(ImageError):
        unpacked(place / "layer", *(member(name, kind=kind, link=link if kind in (LINK, HARD) else "") for name, kind, link in found))
    assert sorted(path.name for path in place.iterdir()) == ["layer"]


# ------------------------------------------------------------------ the cache

BASE = tar([directory("etc"), member("etc/old", b"old"), member("etc/kept", b"kept")])
UPPER = tar([member("etc/.wh.old"), member("etc/new", b"new")])


def test_an_image_is_unpacked_once_and_found_by_name_and_digest(tmp_path: Path) -> None:
    digest = layout(tmp_path / "image", [BASE, UPPER], {"PATH": "/opt/bin:/bin"}, "v1")
    cache = ImageCache(tmp_path / "cache")
    image = cache.add_layout(tmp_path / "image", "example/task:1", "v1")
    assert image.digest == digest and image.env == {"PATH": "/opt/bin:/bin"} and image.workdir == "/work"
    assert cache.find("example/task:1") == cache.find(digest) == image
    assert [layer.bytes for layer in image.layers] == [7, 3] and cache.used_bytes() == 10
    top, base = cache.rootfs(digest).layers
    assert (top / "etc/new").read_text() == "new" and (base / "etc/old").read_text() == "old"
    assert stat.S_IMODE(cache.root.stat().st_mode) == 0o700
    with pytest.raises(ImageError, match="rl image pull example/other"):
        cache.require("example/other")


def test_images_share_layers_and_processes_share_the_work(tmp_path: Path) -> None:
    layout(tmp_path / "one", [BASE])
    layout(tmp_path / "two", [BASE, UPPER])
    cache = ImageCache(tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda number: cache.add_layout(tmp_path / ("one", "two")[number % 2], f"image{number % 2}"), range(16)))
    assert images[0].layers[0] == images[1].layers[0]
    assert len([path for path in (cache.root / "layers").iterdir() if path.is_dir()]) == 2
    assert not list((cache.root / "staging").iterdir())


def damage_layer(layout: Path) -> None:
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)


def lengthen_layer(layout: Path) -> None:
    blob = max((layout / "blobs/sha256").iterdir(), key=lambda path: path.read_bytes()[:2] == b"\x1f\x8b")
    blob.write_bytes(blob.read_bytes() + b"more")


def change_document(layout: Path) -> None:
    for blob in (layout / "blobs/sha256").iterdir():
        if b"WorkingDir" in blob.read_bytes():
            blob.write_bytes(blob.read_bytes().replace(b"/work", b"/evil"))


def leave_layout(layout: Path) -> None:
    (layout / "index.json").write_text((layout / "index.json").read_text().replace("sha256:", "sha256:../../../etc/passwd"))


@pytest.mark.parametrize("damage", [damage_layer, lengthen_layer, change_document, leave_layout])
def test_every_byte_is_checked(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    layout(tmp_path / "image", [BASE])
    damage(tmp_path / "image")
    cache = ImageCache(tmp_path / "cache")
    with pytest.raises(ImageError):
        cache.add_layout(tmp_path / "image", "image")
    assert cache.find("image") is None and not list((cache.root / "staging").glob("*/*"))


def test_what_was_used_longest_ago_goes_first_and_what_is_in_use_stays(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache")
    names = ("old", "held", "fresh")
    for number, name in enumerate(names):
        layout(tmp_path / name, [BASE, tar([member(name, b"x" * 100)])])
        image = cache.add_layout(tmp_path / name, name)
        os.utime(cache.root / "images" / f"{image.digest.removeprefix('sha256:')}.json", (number, number))
    cache.require("old")
    with cache.held(cache.require("held")):
        os.utime(next(iter((cache.root / "images").glob("*.json"))), None)
        assert cache.prune(keep_bytes=10**6) == []
        removed = cache.prune(keep_bytes=0)
    assert len(removed) == 2 and cache.find("held") is not None and cache.find("old") is cache.find("fresh") is None
    assert cache.used_bytes() == 107
    cache.prune(keep_bytes=0)
    assert cache.used_bytes() == 0 and not list((cache.root / "layers").iterdir())


def test_what_an_interrupted_fetch_left_is_seen_and_removed(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache")
    assert cache.left_bytes() == 0 and not cache.root.exists()
    with cache.adding():
        (cache.root / "staging/x").mkdir(parents=True)
        (cache.root / "staging/x/half").write_bytes(b"x" * 1000)
        cache.tidy()
        assert cache.left_bytes() == 0 and (cache.root / "staging/x/half").exists()  # somebody is at it
    assert cache.left_bytes() >= 1000
    cache.tidy()
    assert cache.left_bytes() == 0


def test_a_directory_is_read_through_the_layers(tmp_path: Path) -> None:
    layers = [
        [directory("testbed/pkg"), member("testbed/a", b"old"), member("testbed/gone", b"x"), member("testbed/pkg/b", b"b", mode=0o750)],
        [
            member("testbed/.wh.gone"),
            member("testbed/a", b"new"),
            member("testbed/link", kind=LINK, link="a"),
            member("testbed/dir/c"),
        ],
        [
            member("testbed/dir/.wh..wh..opq"),
            member("testbed/dir/d", b"d"),
            member("other"),
            member("way", kind=LINK, link="testbed"),
        ],
    ]
    layout(tmp_path / "image", [tar(members) for members in layers])
    cache = ImageCache(tmp_path / "cache")
    found = cache.rootfs(cache.add_layout(tmp_path / "image", "example/testbed:1").digest).layers
    copy_tree(found, "/testbed", tmp_path / "tree")
    files = {str(path.relative_to(tmp_path / "tree")): path.read_text() for path in (tmp_path / "tree").rglob("*") if path.is_file()}
    assert files == {"a": "new", "link": "new", "pkg/b": "b", "dir/d": "d"}
    assert os.readlink(tmp_path / "tree/link") == "a" and stat.S_IMODE((tmp_path / "tree/pkg/b").stat().st_mode) == 0o750
    for path in ("/nowhere", "/testbed/gone", "/other", "/way", "/testbed/a"):
        with pytest.raises(ImageError, match="has no directory"):
            copy_tree(found, path, tmp_path / "none")


# ------------------------------------------------------------------ sandboxes


async def image_place(place: Place) -> ImageCache:
    cache = ImageCache(place.root / "images")
    members = [*programs(), directory("root", 0o700), member("etc/passwd", b"root:x:0:0::/root:/bin/sh\nagent:x:0:0::/:/bin/sh\n")]
    traps = [member("tests/leak", b"leak"), member("etc/hosts", kind=LINK, link="/etc/shadow"), member("var/gone", b"gone")]
    top = [
        member("opt/tool", b"#!/bin/sh\necho tool $FLAVOUR $HOME\n", mode=0o755),
        member("var/.wh.gone"),
        member("workspace/seed", b"seed"),
    ]
    layout(place.root / "layout", [tar(members + traps), tar(top)], {"PATH": "/opt:/bin", "FLAVOUR": "mild", "HOME": "/root"})
    await asyncio.to_thread(cache.add_layout, place.root / "layout", "example/tools:1")
    return cache


@contract(on=NAMESPACES)
async def test_a_sandbox_of_an_image_sees_the_image_and_not_the_host(place: Place) -> None:
    await image_place(place)
    spec = SandboxSpec(image="example/tools:1", directories=(Directory("/tests", "root"),), limits=LIMITS)
    sandbox = await place.sandbox(spec)
    result = await sandbox.exec("tool; ls /usr /var /tests; cat /etc/hosts /etc/passwd; cat seed; touch mine; ls")
    out = result.stdout.decode()
    assert out.startswith("tool mild /home/agent\n") and "leak" not in out and "gone" not in out and "seed" in out and "mine" in out
    assert "127.0.0.1 localhost" in out and f"agent:x:{sandbox.uid}:" in out and "agent:x:0:" not in out
    assert (await sandbox.exec("python3 -c 1")).return_code == 127
    assert [change.path for change in await sandbox.changes()] == ["mine"]
    await sandbox.destroy()


@contract(on=NAMESPACES)
async def test_sandboxes_of_one_image_share_nothing_that_they_write(place: Place) -> None:
    await image_place(place)
    first, second = [await place.sandbox(SandboxSpec(image="example/tools:1", limits=LIMITS)) for _ in range(2)]
    assert (await first.exec("rm /opt/tool; mkdir /opt/made", user="root")).return_code == 0
    assert (await second.exec("tool && ! ls /opt/made")).return_code == 0
    for sandbox in (first, second):
        await sandbox.destroy()


@contract(on=NAMESPACES)
async def test_a_missing_image_is_an_image_error(place: Place) -> None:
    for image in ("example/none:1", "dir:/nowhere", "dir:/"):
        with pytest.raises(ImageError):
            await place.sandbox(SandboxSpec(image=image, limits=LIMITS))


@contract(on=NAMESPACES)
async def test_a_root_file_system_that_leads_to_the_host_is_refused(place: Place) -> None:
    """Set-up runs with power over the machine: a link of the image in its way must not be followed."""
    for number, name in enumerate(("etc", "proc", "tmp", "dev", "home", "workspace", "tests")):
        trap = place.root / f"trap{number}"
        trap.mkdir()
        (trap / name).symlink_to("/var")
        with pytest.raises(Exception, match="leads through a link"):
            await place.sandbox(SandboxSpec(image=f"dir:{trap}", directories=(Directory("/tests", "root"),), limits=LIMITS))
