"""`python -m sandbox.cli`: commands of the execution side. `rl` and the server's checks dispatch here from the light install."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from sandbox.harnesses.pins import PINS, Pin
from sandbox.harnesses.store import RuntimeMissing, RuntimeStoreError, Store
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.runspec import Harness

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_store = click.option("--runtimes", type=click.Path(file_okay=False, path_type=Path), help="The store [default: below the data directory].")


def _open_store(path: Path | None) -> Store:
    return Store(path or DataDir(default_data_dir()).runtimes)


def _pins(names: tuple[str, ...]) -> list[Pin]:
    if unknown := [name for name in names if name not in PINS]:
        raise click.ClickException(f"no harness {unknown[0]}; known are {', '.join(PINS)}")
    return [PINS[name] for name in names or PINS]


@click.group()
def main() -> None:
    """Execution side of lego-rl."""


@main.group()
def harness() -> None:
    """Pinned harness runtimes."""


@harness.command("install")
@click.argument("names", nargs=-1)
@click.option("--again", is_flag=True, help="Replace what is installed.")
@_store
@_json
def harness_install(names: tuple[str, ...], again: bool, runtimes: Path | None, as_json: bool) -> None:
    """Fetch and check runtimes (all, or those named)."""
    store = _open_store(runtimes)
    rows = []
    for pin in _pins(names):
        try:
            rows.append({"name": pin.name, "version": pin.version, "path": str(store.install(pin, again=again))})
        except RuntimeStoreError as error:
            raise click.ClickException(str(error)) from error
    click.echo(json.dumps(rows) if as_json else "\n".join(f"{row['name']} {row['version']}  {row['path']}" for row in rows))


def _states(store: Store, deep: bool) -> list[dict[str, str]]:
    rows = []
    for pin in PINS.values():
        problem, state = "", "verified" if deep else "installed"
        try:
            (store.verify if deep else store.require)(pin)
        except RuntimeMissing as error:
            state, problem = "missing", str(error)
        except RuntimeStoreError as error:
            state, problem = "tampered", str(error)
        rows.append({"name": pin.name, "version": pin.version, "state": state, "path": str(store.tree(pin)), "problem": problem})
    return rows


@harness.command("list")
@_store
@_json
def harness_list(runtimes: Path | None, as_json: bool) -> None:
    """What is pinned, and whether it is installed."""
    rows = _states(_open_store(runtimes), deep=False)
    click.echo(json.dumps(rows) if as_json else "\n".join(f"{row['name']:16} {row['version']:10} {row['state']}" for row in rows))


@harness.command("verify")
@_store
@_json
def harness_verify(runtimes: Path | None, as_json: bool) -> None:
    """Compare every installed byte with the manifest and the packages' own records. Exit status 1 when something was changed."""
    rows = _states(_open_store(runtimes), deep=True)
    lines = (row["problem"] or f"{row['name']} {row['version']} is as it was published" for row in rows)
    click.echo(json.dumps(rows) if as_json else "\n".join(lines))
    sys.exit(any(row["state"] == "tampered" for row in rows))


@main.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command("trials")
@click.option("--n", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--harness", "name", default="mini-swe-agent", show_default=True, type=click.Choice(list(PINS)))
@click.option("--start", default="warm_fork", show_default=True, type=click.Choice(["warm_fork", "exec"]))
@_store
@_json
def bench_trials(n: int, concurrency: int, name: str, start: str, runtimes: Path | None, as_json: bool) -> None:
    """Wall clock and CPU seconds per trial against a scripted model."""
    from sandbox.bench import trials

    wanted = Harness.model_validate({"name": name, "version": PINS[name].version, "start": start})
    figures = asyncio.run(trials.run(wanted, _open_store(runtimes).root, n, concurrency))
    click.echo(json.dumps(figures, indent=2) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
