"""`rl redteam`: every attack in every environment of this machine."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, NoReturn

import click
import yaml

from sandbox.environments.namespace.preflight import problems
from sandbox.runner import quiet

from .exploit import Exploit


@click.command("redteam")
@click.option("--only", default="", metavar="NAME", help="Attacks whose name contains this.")
@click.option(
    "--in", "section", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Instead of namespaces, in what the `sandbox` section of a RunSpec (YAML, the keys below `sandbox:`) describes.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per attack and environment.")
def redteam(only: str, section: Path | None, as_json: bool) -> None:
    """Try to earn rewards without solving tasks. Exit status 1 when any attack does, escapes its zero, or gets out."""
    quiet()
    from .ordinary import as_ordinary_user
    from .play import EXPLOITS, Row, chosen, holes

    exploits = chosen(only)
    if not exploits:
        raise click.ClickException(f"no attack is called {only}; known are {', '.join(exploit.name for exploit in EXPLOITS)}")
    if section is not None:
        _report(_elsewhere(exploits, section), holes, as_json)
    rows: list[Row] = []
    modes = [mode for mode in ("rootful", "rootless") if not problems(mode) and (mode == "rootless" or os.geteuid() == 0)]
    if not modes:
        raise click.ClickException("; ".join(problems("rootful" if os.geteuid() == 0 else "rootless")))
    for mode in modes:
        with tempfile.TemporaryFile("w+") as results:
            attack = functools.partial(_attack, exploits, results)
            as_ordinary_user(attack) if mode == "rootless" and os.geteuid() == 0 else attack()
            results.seek(0)
            rows += json.load(results)
    _report(rows, holes, as_json)


def _report(rows: list[dict[str, Any]], holes: Callable[[list[dict[str, Any]]], list[str]], as_json: bool) -> NoReturn:
    found = holes(rows)
    click.echo(json.dumps(rows, indent=1) if as_json else "\n".join([*map(_line, rows), *found]))
    sys.exit(bool(found))


def _elsewhere(exploits: list[Exploit], section: Path) -> list[dict[str, Any]]:
    from sandbox.runner.service import NotReady

    from .play import play

    try:
        return asyncio.run(play(exploits, yaml.safe_load(section.read_text(encoding="utf-8")) or {}))
    except (NotReady, yaml.YAMLError, ValueError) as error:
        raise click.ClickException(f"{section}: {error}") from error


def _attack(exploits: list[Exploit], results: IO[str]) -> None:
    from .play import play

    json.dump(asyncio.run(play(exploits)), results)
    results.flush()


def _line(row: dict[str, object]) -> str:
    seen = "detected" if row["detected"] else ""
    return f"{row['environment']:19} {row['exploit']:52} {row['reward']!s:5} {row['outcome']:24} {seen}"
