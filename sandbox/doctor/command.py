"""`rl doctor`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from sandbox.environments.backend import backends
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.machine import Health

from .facts import gather, state_bases
from .judge import judge


@click.command("doctor")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="The data directory [default: the user's].")
@click.option("--sweep", is_flag=True, help="First remove what spawners that are gone left below the data directory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(data_dir: Path | None, sweep: bool, as_json: bool) -> None:
    """Look for what sandboxes leave behind and for what makes them slow. Exit status 1 when something is found."""
    runs = DataDir(data_dir or default_data_dir()).runs
    if sweep:
        for base in state_bases(runs):
            for left in [left for backend in backends().values() for left in backend.sweep(base)]:
                click.echo(f"swept {left}", err=True)
    findings = judge(gather(runs))
    rows = [finding.model_dump(mode="json") for finding in findings]
    lines = [f"{row['state']:5} {row['check']}: {row['message']}" + (f"; {row['hint']}" if row["hint"] else "") for row in rows]
    click.echo(json.dumps(rows) if as_json else "\n".join(lines))
    sys.exit(any(finding.state is Health.WARN for finding in findings))
