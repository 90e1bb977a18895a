"""`rl image`: what the image cache of this user holds, and how it gets there."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from sandbox.environments.errors import ImageError
from server.schemas.datadir import DataDir, default_data_dir

from .cache import Image, ImageCache

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _cache(call: Callable[..., Any]) -> Callable[..., Any]:
    def made(context: click.Context, parameter: click.Parameter, value: Path | None) -> ImageCache:
        return ImageCache(DataDir(value or default_data_dir()).images)

    where = click.Path(file_okay=False, path_type=Path)
    return click.option("--data-dir", "cache", type=where, callback=made, help="The data directory [default: the user's].")(call)


@click.group("image")
def image() -> None:
    """Images of sandboxes in this user's cache."""


@image.command("pull")
@click.argument("source")
@click.option("--name", default="", help="What runs call the image [default: the source].")
@_cache
@_json
def pull_command(source: str, name: str, cache: ImageCache, as_json: bool) -> None:
    """Fetch an image.

    SOURCE is NAME:TAG or NAME@sha256:… of a registry, the directory of an OCI layout, the tar of a root file system, or a TRANSPORT:… that
    skopeo knows.
    """
    path = Path(source)
    if (path / "oci-layout").is_file():
        found = _done(lambda: cache.add_layout(path, name or source))
    elif path.is_dir():
        raise click.ClickException(
            f"{path} is no OCI image layout; a directory with a root file system needs no fetching: name it dir:{path.resolve()}"
        )
    elif path.is_file():
        found = _done(lambda: cache.add_tar(path, name or source))
    else:
        from .registry import pull

        found = _ran(pull(cache, source, name))
        cache.tidy()
    _show(found, name or source, as_json)


@image.command("build")
@click.argument("context", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--index-mirror", default="", help="URL of the one package index that the steps may reach.")
@_cache
@_json
def build_command(context: Path, index_mirror: str, cache: ImageCache, as_json: bool) -> None:
    """Build CONTEXT/Dockerfile without a network: the `environment` directory of a task."""
    from .build import build, reference

    task = context.resolve().parent
    found = _ran(build(cache, context, task.name, index_mirror))
    _show(found, reference(task.name, context, index_mirror), as_json)
    for leak in cache.leaks(found, task) if (task / "task.toml").is_file() else ():
        click.echo(f"gives the task away: {leak.path}: {leak.detail} ({leak.kind})", err=True)


@image.command("scan")
@click.argument("name")
@click.argument("tasks", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@_cache
@_json
def scan_command(name: str, tasks: tuple[Path, ...], cache: ImageCache, as_json: bool) -> None:
    """Look in an image for the solutions and tests of TASKS, and for other versions of their projects.

    Exit status 1 when something is found.
    """
    found = _done(lambda: cache.require(name))
    leaks = [(task.name, leak) for task in tasks for leak in cache.leaks(found, task)]
    rows = [{"task": task, **leak._asdict()} for task, leak in leaks]
    lines = [f"{task}: {leak.path}: {leak.detail} ({leak.kind})" for task, leak in leaks]
    click.echo(json.dumps(rows) if as_json else "\n".join(lines) or f"{name} gives nothing away")
    sys.exit(bool(leaks))


@image.command("list")
@_cache
@_json
def list_command(cache: ImageCache, as_json: bool) -> None:
    """Every image with its size and its last use; layers that images share are counted once in the sum."""
    images, total = cache.images(), round(cache.used_bytes() / 1e6, 1)
    if as_json:
        rows = [
            {"digest": found.digest, "names": names, "mb": round(found.bytes / 1e6, 1), "used": int(used)} for found, names, used in images
        ]
        click.echo(json.dumps({"images": rows, "mb": total}))
        return
    for found, names, used in images:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(used))
        click.echo(f"{found.digest[:19]}  {found.bytes / 1e6:>10.1f} MB  {when}  {' '.join(names)}")
    click.echo(f"{len(images)} images, {total} MB in {cache.root}")


@image.command("prune")
@click.option("--keep-gb", default=0.0, show_default=True, type=click.FloatRange(min=0), help="Size that may stay.")
@click.option("--builds", is_flag=True, help="Also what builds share: base images and steps.")
@_cache
@_json
def prune_command(keep_gb: float, builds: bool, cache: ImageCache, as_json: bool) -> None:
    """Remove the images used longest ago, those of a run under way excepted, and what fetching left."""
    before = cache.used_bytes()
    removed = cache.prune(int(keep_gb * 1e9), builds)
    freed = round((before - cache.used_bytes()) / 1e6, 1)
    click.echo(json.dumps({"removed": removed, "mb": freed}) if as_json else f"{len(removed)} images removed, {freed} MB free again")


def _ran(work: Coroutine[Any, Any, Image]) -> Image:
    return _done(lambda: asyncio.run(work))


def _done(call: Callable[[], Image]) -> Image:
    try:
        return call()
    except ImageError as error:
        raise click.ClickException(str(error)) from error


def _show(found: Image, name: str, as_json: bool) -> None:
    facts = {"name": name, "digest": found.digest, "layers": len(found.layers), "mb": round(found.bytes / 1e6, 1)}
    click.echo(json.dumps(facts) if as_json else f"{name}: {found.digest}, {len(found.layers)} layers, {facts['mb']} MB")
