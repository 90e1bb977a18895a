"""`rl regrade`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sandbox.runner import quiet
from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.outcome import Scored
from server.schemas.regrade import Change, RegradeReport, Verifier
from server.schemas.rundir import RunDir

if TYPE_CHECKING:
    from .regrade import Progress


@click.command("regrade")
@click.argument("run_id", metavar="RUN")
@click.option("--step", "steps", multiple=True, type=click.IntRange(0), help="Only trials of this step; may be given again.")
@click.option("--verifier", type=click.Choice(["separate", "shared"]), default="separate", show_default=True)
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="The data directory [default: the user's].")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def regrade(run_id: str, steps: tuple[int, ...], verifier: Verifier, data_dir: Path | None, as_json: bool) -> None:
    """Judge the archived work of a run's agents again, in fresh sandboxes with the tasks' present tests; no agent runs.

    Both verdicts are kept. Trials that were judged from the same diff, task and grader before are passed over, so a regrade that was
    interrupted goes on when it is started again. Exit status 1 when a trial got no second verdict.
    """
    quiet()
    from sandbox.environments.errors import SandboxError

    from .record import NoRecord, Record
    from .regrade import Busy
    from .regrade import regrade as play

    data = DataDir((data_dir or default_data_dir()).absolute())
    try:
        record = Record(data)
        trials = record.archives(run_id, list(steps))
        run = RunDir(data.runs / run_id)
        if not trials:
            raise click.ClickException(f"run {run_id} has no archived diff{' in these steps' if steps else ''}")
        progress = asyncio.run(play(run, record.url, trials, verifier, _silent if as_json else _line))
        report = record.report(run_id, verifier)
    except (NoRecord, Busy, SandboxError, FileNotFoundError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(_document(report, progress)))
    else:
        click.echo("\n".join(_lines(report, progress)))
    sys.exit(bool(progress.problems or not progress.delivered))


def _silent(progress: Progress) -> None:
    return


def _line(progress: Progress) -> None:
    ended = progress.done_before + progress.graded + len(progress.problems)
    if ended % 25 == 0 or ended == progress.total:
        click.echo(f"{ended}/{progress.total} trials", err=True)


def _document(report: RegradeReport, progress: Progress) -> dict[str, Any]:
    counts = {"trials": progress.total, "graded": progress.graded, "done_before": progress.done_before, "problems": progress.problems}
    return report.model_dump(mode="json") | counts | {"delivered": progress.delivered}


def _lines(report: RegradeReport, progress: Progress) -> list[str]:
    share = "nothing to compare" if report.agreement is None else f"{report.agreement:.1%} of {report.compared} verdicts agree"
    lines = [f"{progress.graded} graded now, {progress.done_before} before: {share} ({report.verifier} verifier)"]
    lines += [f"  {_change(change)}" for change in (*report.changed, *report.newly_graded)]
    lines += [f"  no verdict: {problem}" for problem in progress.problems]
    if not progress.delivered:
        lines.append("  the server has not taken all of it yet; the rest follows with the next regrade")
    return lines


def _change(change: Change) -> str:
    first = f"reward {change.first.reward}" if isinstance(change.first, Scored) else f"failed ({change.first.cause})"
    why = f": {change.again.detail.strip().splitlines()[-1][:160]}" if change.again.detail.strip() else ""
    return (
        f"{change.trial_id} ({change.task}, step {change.step}): {first} → reward {change.again.reward} ({change.again.termination}){why}"
    )
