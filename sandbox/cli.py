"""`python -m sandbox.cli`: commands of the execution side. `rl` and the server's checks dispatch here from the light install."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from sandbox.doctor.command import doctor
from sandbox.environments.images.commands import image
from sandbox.harnesses.commands import as_json_option as _json
from sandbox.harnesses.commands import harness
from sandbox.harnesses.commands import store_options as _store
from sandbox.harnesses.pins import CLAUDE_CODE, MINI_SWE_AGENT, PINS
from sandbox.harnesses.store import Store
from sandbox.purge.command import purge
from sandbox.redteam.command import redteam
from sandbox.regrade.command import regrade
from sandbox.runner import quiet
from server.schemas.runspec import Harness

_BENCHED = [MINI_SWE_AGENT.name, CLAUDE_CODE.name]
"""Whose tools the scripted model of the benchmark knows."""


@click.group()
def main() -> None:
    """Execution side of lego-rl."""


main.add_command(harness)
main.add_command(redteam)
main.add_command(doctor)
main.add_command(image)
main.add_command(regrade)
main.add_command(purge)


@main.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command("trials")
@click.option("--n", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(min=1))
@click.option("--harness", "name", default="mini-swe-agent", show_default=True, type=click.Choice(_BENCHED))
@click.option("--start", default="warm_fork", show_default=True, type=click.Choice(["warm_fork", "exec"]))
@_store
@_json
def bench_trials(n: int, concurrency: int, name: str, start: str, store: Store, as_json: bool) -> None:
    """Wall clock and CPU seconds per trial against a scripted model."""
    from sandbox.bench import trials

    wanted = Harness.model_validate({"name": name, "version": PINS[name].version, "start": start})
    figures = asyncio.run(trials.run(wanted, store.root, n, concurrency))
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


@bench.command("sandbox")
@click.option("--n", default=64, show_default=True, type=click.IntRange(min=1))
@click.option("--concurrency", default=16, show_default=True, type=click.IntRange(min=1))
@_json
def bench_sandbox(n: int, concurrency: int, as_json: bool) -> None:
    """Medians of create, exec and destroy, CPU per cycle and cycles per second."""
    quiet()
    from sandbox.bench import sandboxes
    from sandbox.environments.errors import SandboxError

    try:
        figures = asyncio.run(sandboxes.run(n, concurrency))
    except SandboxError as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(figures) if as_json else "\n".join(f"{key}: {value}" for key, value in figures.items()))


_spec = click.option(
    "--spec", "spec_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A RunSpec, JSON."
)
_tasks = click.option("--tasks", default=2, show_default=True, type=click.IntRange(min=1), help="Tasks of each split.")


@main.command("selftest")
@_spec
@_tasks
@_json
def selftest(spec_file: Path, tasks: int, as_json: bool) -> None:
    """Grade sampled tasks with their own solution, with nothing done and with a cheat, in real sandboxes."""
    quiet()
    from sandbox.runner.selftest import selftest as grade
    from server.schemas.runspec import RunSpec

    facts = asyncio.run(grade(RunSpec.model_validate_json(spec_file.read_bytes()), tasks))
    lines = [f"oracle {row.task}: {row.reward}" for row in facts.oracle] + [f"no-op {row.task}: {row.reward}" for row in facts.noop]
    click.echo(facts.model_dump_json() if as_json else "\n".join([*lines, *facts.problems, f"limits by {facts.limits_mode or 'nothing'}"]))
    good = all(row.reward == 1 for row in facts.oracle) and all(row.reward == 0 for row in facts.noop) and not facts.problems
    sys.exit(0 if good or as_json else 1)


@main.group()
def tasks() -> None:
    """Task directories."""


@tasks.command("check")
@click.argument("directories", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def tasks_check(directories: tuple[Path, ...]) -> None:
    """Say whether directories in Harbor's task format can be run and graded here."""
    from sandbox.tasks.prepare import TaskError, check_task

    problems = 0
    for directory in directories:
        try:
            click.echo(f"{check_task(directory).task}: can be run")
        except TaskError as error:
            problems += 1
            click.echo(str(error))
    sys.exit(problems > 0)


@tasks.command("make")
@click.option("--seed", default=0, show_default=True)
@click.option("--n", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--held-out", is_flag=True, help="Tasks of the held-out split.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
def tasks_make(seed: int, n: int, held_out: bool, directory: Path) -> None:
    """Write tasks of the family `onebug` below a new directory."""
    from sandbox.tasks.onebug import generate

    if directory.exists():
        raise click.ClickException(f"{directory} exists; name a new directory")
    for task in generate(seed, n, held_out):
        task.write(directory / task.name)
    click.echo(f"{n} tasks in {directory}")


if __name__ == "__main__":
    main(prog_name="rl")  # which is how it is called
