"""`rl harness install|list|prune|verify`."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sandbox.runner import quiet
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.runspec import Harness

from . import prune
from .pins import PINS, Pin
from .store import RuntimeMissing, RuntimeStoreError, Store

if TYPE_CHECKING:
    from .verify import Verification

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_folder = click.Path(file_okay=False, path_type=Path)


def store_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say where runtimes are; the command gets them as `store`."""

    @click.option("--runtimes", type=_folder, help="The store [default: below the data directory].")
    @click.option("--data-dir", type=_folder, help="The data directory [default: the user's].")
    @functools.wraps(command)
    def with_store(runtimes: Path | None, data_dir: Path | None, **options: object) -> None:
        command(store=Store(runtimes or DataDir(data_dir or default_data_dir()).runtimes), **options)

    return with_store


def _named(names: tuple[str, ...]) -> list[Pin]:
    """Of those that lego-rl pins by name, of others by the `module:Class` of their adapter; all of the former when none is named."""
    return [_pin(name) for name in names or PINS]


def _pin(name: str) -> Pin:
    if name in PINS:
        return PINS[name]
    if ":" not in name:
        raise click.ClickException(f"no harness {name}; known are {', '.join(PINS)}, and adapters of your own as module:Class")
    from .registry import adapter

    quiet()
    try:
        found = adapter(Harness(name="named", version="", adapter=name))
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    if found.pin is None:
        raise click.ClickException(f"{name} has no `pin`, so there is nothing to install or to compare")
    return found.pin


@click.group()
def harness() -> None:
    """Pinned harness runtimes."""


@harness.command("install")
@click.argument("names", nargs=-1)
@click.option("--again", is_flag=True, help="Replace what is installed.")
@store_options
@as_json_option
def harness_install(names: tuple[str, ...], again: bool, store: Store, as_json: bool) -> None:
    """Fetch and check runtimes (all, or those named), once: no trial fetches anything. MODULE:CLASS names an adapter of your own."""
    rows = []
    for pin in _named(names):
        if again or not store.tree(pin).is_dir():
            click.echo(f"installing {pin.name} {pin.version} …", err=True)
        try:
            rows.append({"name": pin.name, "version": pin.version, "path": str(store.install(pin, again=again))})
        except RuntimeStoreError as error:
            raise click.ClickException(str(error)) from error
    click.echo(json.dumps(rows) if as_json else "\n".join(f"{row['name']} {row['version']}  {row['path']}" for row in rows))


@harness.command("list")
@store_options
@as_json_option
def harness_list(store: Store, as_json: bool) -> None:
    """What is pinned, and whether it is installed."""
    rows = [_state(store, pin, deep=False) for pin in PINS.values()]
    click.echo(json.dumps(rows) if as_json else "\n".join(f"{row['name']:16} {row['version']:10} {row['state']}" for row in rows))


def _state(store: Store, pin: Pin, deep: bool) -> dict[str, Any]:
    problem, state = "", "verified" if deep else "installed"
    try:
        store.verify(pin) if deep else store.require(pin)
    except RuntimeMissing as error:
        state, problem = "missing", str(error)
    except RuntimeStoreError as error:
        state, problem = "tampered", str(error)
    path = str(store.tree(pin))
    return {"name": pin.name, "version": pin.version, "state": state, "installed": state != "missing", "path": path, "problem": problem}


@harness.command("prune")
@click.argument("names", nargs=-1)
@click.option("--apply", "do", is_flag=True, help="Remove them; without it, only say what would go.")
@store_options
@as_json_option
def harness_prune(names: tuple[str, ...], do: bool, store: Store, as_json: bool) -> None:
    """Remove runtimes that no pin names any more (of all harnesses, or those named; MODULE:CLASS names an adapter of your own).

    What a live run uses stays. Nothing is removed without `--apply`.
    """
    try:
        found = prune.old(store, _named(names))
        free = [row for row in found if not row.in_use]
        gone = prune.remove(store, free) if do else []
    except OSError as error:
        raise click.ClickException(f"{store.root} cannot be pruned: {error}") from error
    rows = [{"name": row.name, "path": str(row.tree), "bytes": row.bytes, "in_use": row.in_use, "removed": row in gone} for row in found]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in found:
        state = "removed" if row in gone else "stays: a live run uses it" if row.in_use or do else "would go"
        click.echo(f"{row.name:16} {row.tree.name:30} {row.bytes / 1e6:8.1f} MB  {state}")
    total = f"{sum(row.bytes for row in gone or free) / 1e6:.1f} MB"
    if not found:
        click.echo(f"{store.root} has nothing but what is pinned now")
    elif do:
        click.echo(f"{len(gone)} runtimes removed, {total}")
    else:
        click.echo(f"{len(free)} runtimes would go, {total}; --apply does it")


@harness.command("verify")
@click.argument("names", nargs=-1)
@click.option("--bytes", "only_bytes", is_flag=True, help="Compare bytes only; run nothing.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Trials of each; times are their medians.")
@store_options
@as_json_option
def harness_verify(names: tuple[str, ...], only_bytes: bool, runs: int, store: Store, as_json: bool) -> None:
    """Prove that harnesses (all installed, or those named) are as published and work here.

    Every byte is compared with the manifest and the packages' own records. Then the real program solves a task in a sandbox that has no
    network but the proxy, against a scripted policy, while every host it looks up is recorded. Exit status 1 when anything is wrong.
    """
    wanted = _named(names)
    if own := [pin.name for pin in wanted if pin not in PINS.values() and not only_bytes]:
        raise click.ClickException(f"no script is known for {own[0]}, so its bytes alone can be verified: add --bytes")
    states = [_state(store, pin, deep=True) for pin in wanted]
    if not names:
        for row in states:
            if row["state"] == "missing":
                click.echo(f"{row['name']} {row['version']} is not installed and left out", err=True)
        states = [row for row in states if row["state"] != "missing"]
    if not states:
        raise click.ClickException("no harness is installed: `rl harness install` does")
    if only_bytes:
        lines = (row["problem"] or f"{row['name']} {row['version']} is as it was published" for row in states)
        click.echo(json.dumps(states) if as_json else "\n".join(lines))
        sys.exit(any(row["problem"] for row in states))
    good = True
    for row in states:
        result = _run(row, store, runs)
        good = good and result.good
        click.echo(result.model_dump_json() if as_json else _line(result))
    sys.exit(0 if good else 1)


def _run(row: dict[str, Any], store: Store, runs: int) -> Verification:
    quiet()
    from sandbox.runner.service import NotReady

    from .scripted import VerifyError
    from .verify import unplayed, verify

    wanted = Harness(name=row["name"], version=row["version"])
    if row["problem"]:
        return unplayed(wanted, row["problem"])
    try:
        return asyncio.run(verify(wanted, store, runs))
    except (VerifyError, NotReady) as error:
        raise click.ClickException(str(error)) from error


def _line(result: Verification) -> str:
    verdict = "works" if result.good else f"FAILS: {result.problem or 'see below'}"
    more = [*result.violations, *(f"looked up {host}" for host in result.foreign_hosts)]
    figures = f"reward {result.reward}, {result.turns} model calls, set up in {result.setup_s:.2f} s"
    figures += f", {result.cpu_s:.1f} CPU s, {result.rss_mb:.0f} MB"
    return "\n  ".join([f"{result.harness} {result.version} {verdict}  ({figures})", *more])
