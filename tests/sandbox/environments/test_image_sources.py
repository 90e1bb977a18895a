"""Images from a real registry on this machine, and from a Dockerfile, built without a network."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.environments.errors import ImageError
from sandbox.environments.images.build import build, reference
from sandbox.environments.images.cache import ImageCache
from sandbox.environments.images.fetch import fetch_all, lacking
from sandbox.environments.images.registry import pull
from server.schemas.runspec import Images
from tests.sandbox.environments.images import directory, layout, programs, tar

needs_registry = pytest.mark.skipif(
    not all(map(shutil.which, ("skopeo", "docker-registry"))), reason="needs the Debian packages skopeo and docker-registry"
)
needs_buildah = pytest.mark.skipif(shutil.which("buildah") is None, reason="needs the Debian package buildah")


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of a registry with the image `base:1`: a shell, coreutils and nothing else."""
    place = tmp_path_factory.mktemp("registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = place / "config.yml"
    settings.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {place}/data}}}}\nhttp: {{addr: {address}}}\n"
    )
    process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        files = [*programs(), directory("tmp", 0o1777), directory("etc"), directory("proc"), directory("dev"), directory("sys")]
        layout(place / "layout", [tar(files)], {"PATH": "/bin"}, "v1")
        push = [
            "skopeo",
            "--insecure-policy",
            "copy",
            "-q",
            "--dest-tls-verify=false",
            f"oci:{place}/layout:v1",
            f"docker://{address}/base:1",
        ]
        deadline = time.monotonic() + 30
        while subprocess.run(push, capture_output=True).returncode != 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait()


@needs_registry
def test_an_image_comes_from_a_registry_once(registry: str, tmp_path: Path) -> None:
    cache = ImageCache(tmp_path)

    async def all_at_once() -> list[str]:
        return [image.digest for image in await asyncio.gather(*(pull(cache, f"{registry}/base:1") for _ in range(4)))]

    assert len(set(asyncio.run(all_at_once()))) == 1
    assert (cache.rootfs(f"{registry}/base:1").layers[0] / "bin/sh").is_symlink()
    assert len(list((tmp_path / "layers").glob("*.size"))) == 1 and not list((tmp_path / "staging").iterdir())
    assert len(list(cache.blobs.iterdir())) == 1  # the layer, for the next image that has it
    cache.tidy()
    assert not cache.blobs.exists() and cache.find(f"{registry}/base:1") is not None


@needs_registry
def test_what_cannot_be_fetched_is_told_and_holds_nothing_up(registry: str, tmp_path: Path) -> None:
    wanted = {f"{registry}/base:1": None, f"{registry}/none:1": None, "--help": None, "dir:/nowhere": None}
    failed = asyncio.run(fetch_all(ImageCache(tmp_path), wanted, Images()))
    assert failed.keys() == wanted.keys() - {f"{registry}/base:1"}
    assert "manifest unknown" in failed[f"{registry}/none:1"] and "no image reference" in failed["--help"]


def test_what_to_install_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lacking(Images()) == [] and "apt-get install buildah" in lacking(Images(build=True))[0]
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    for work, package in ((pull(ImageCache(tmp_path), "example/x:1"), "skopeo"), (build(ImageCache(tmp_path), tmp_path, "x"), "buildah")):
        with pytest.raises(ImageError, match=f"apt-get install {package}"):
            asyncio.run(work)


def test_a_context_is_named_by_all_that_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "link").symlink_to("Dockerfile")
    names = [reference("Task #7", tmp_path)]
    for change in (
        lambda: (tmp_path / "empty").mkdir(),
        lambda: (tmp_path / "Dockerfile").chmod(0o755),
        lambda: (tmp_path / "link").unlink(),
        lambda: (tmp_path / "empty/file").write_text("x"),
    ):
        change()
        names.append(reference("Task #7", tmp_path))
    assert len({*names, reference("Task #7", tmp_path, "http://index:80")}) == 6
    assert all(name.startswith("localhost/lego-rl/task-7:") for name in names)


def dockerfile(context: Path, *lines: str) -> Path:
    context.mkdir(exist_ok=True)
    (context / "Dockerfile").write_text("\n".join(lines) + "\n")
    return context


@needs_registry
@needs_buildah
@pytest.mark.slow
def test_a_dockerfile_is_built_without_a_network_and_says_where_it_fails(registry: str, tmp_path: Path) -> None:
    cache, base = ImageCache(tmp_path / "cache"), f"FROM {registry}/base:1"

    def built(*lines: str) -> ImageCache:
        asyncio.run(build(cache, dockerfile(tmp_path / "context", *lines), "task"))
        return cache

    built(f"{base} AS first", "RUN mkdir /made && touch /made/x", "FROM first", "ENV FLAVOUR=mild", "WORKDIR /made", "RUN rm x && touch y")
    image = cache.require(reference("task", tmp_path / "context"))
    assert image.env["FLAVOUR"] == "mild" and image.workdir == "/made"
    assert any((layer / "made/y").is_file() for layer in cache.rootfs(image.digest).layers)
    for lines, words in (
        ((base, "RUN ls /nowhere"), ["the step `RUN ls /nowhere`", "No such file", "exit status 2"]),
        ((base, f"ADD http://{registry}/v2/ /x"), ["the step `ADD http", "have no network"]),
        ((base, f"RUN bash -c 'exec 3<>/dev/tcp/{registry.replace(':', '/')}'"), ["refused", "have no network"]),
        ((f"FROM {registry}/none:1", "RUN true"), [f"starts from {registry}/none:1", "manifest unknown"]),
        (("FORM x",), ["no FROM statement"]),
        (("FROM --root=/", "RUN true"), ["no image of a registry"]),
        (("FROM docker-archive:/etc/passwd", "RUN true"), ["no image of a registry"]),
    ):
        with pytest.raises(ImageError) as caught:
            built(*lines)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(tmp_path) in line]


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the index")

    def log_message(self, *_: object) -> None:
        pass


@needs_registry
@needs_buildah
@pytest.mark.slow
def test_a_build_may_reach_one_index_and_nothing_else(registry: str, tmp_path: Path) -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = server.server_address[1]
    read = "exec 3<>/dev/tcp/%s && echo GET / HTTP/1.0 >&3 && echo >&3 && cat <&3 > /answer && cat /etc/pip.conf >> /answer"
    cache = ImageCache(tmp_path / "cache")
    try:
        context = dockerfile(tmp_path / "context", f"FROM {registry}/base:1", f"RUN bash -c '{read % f'127.0.0.1/{port}'}'")
        asyncio.run(build(cache, context, "task", f"http://127.0.0.1:{port}/simple"))
        found = cache.rootfs(reference("task", context, f"http://127.0.0.1:{port}/simple"))
        answer = next(layer / "answer" for layer in found.layers if (layer / "answer").exists()).read_text()
        assert "the index" in answer and f"index-url = http://127.0.0.1:{port}/simple" in answer
        dockerfile(context, f"FROM {registry}/base:1", f"RUN bash -c '{read % registry.replace(':', '/')}'")
        with pytest.raises(ImageError, match=f"reach nothing but http://127.0.0.1:{port}/simple"):
            asyncio.run(build(cache, context, "task", f"http://127.0.0.1:{port}/simple"))
    finally:
        server.shutdown()
        with contextlib.suppress(OSError):
            server.server_close()
