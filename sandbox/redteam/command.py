"""`rl redteam`: every attack in every environment of this machine."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
import tempfile
from typing import IO

import click

from sandbox.environments.namespace.preflight import problems
from sandbox.runner import quiet

from .exploit import Exploit


@click.command("redteam")
@click.option("--only", default="", metavar="NAME", help="Attacks whose name contains this.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object per attack and environment.")
def redteam(only: str, as_json: bool) -> None:
    """Try to earn rewards without solving tasks. Exit status 1 when any attack does, escapes its zero, or gets out."""
    quiet()
    from .ordinary import as_ordinary_user
    from .play import EXPLOITS, Row, chosen, holes

    exploits = chosen(only)
    if not exploits:
        raise click.ClickException(f"no attack is called {only}; known are {', '.join(exploit.name for exploit in EXPLOITS)}")
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
    found = holes(rows)
    click.echo(json.dumps(rows, indent=1) if as_json else "\n".join([*map(_line, rows), *found]))
    sys.exit(bool(found))


def _attack(exploits: list[Exploit], results: IO[str]) -> None:
    from .play import play

    json.dump(asyncio.run(play(exploits)), results)
    results.flush()


def _line(row: dict[str, object]) -> str:
    seen = "detected" if row["detected"] else ""
    return f"{row['environment']:19} {row['exploit']:52} {row['reward']!s:5} {row['outcome']:24} {seen}"
