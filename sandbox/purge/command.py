"""`rl purge`."""

from __future__ import annotations

from pathlib import Path

import click

from server.schemas.datadir import DataDir, default_data_dir


@click.command("purge")
@click.argument("index", type=click.Path(exists=True, path_type=Path))
@click.option("--run", "runs", multiple=True, help="Only the evidence of this run; may be given again [default: all runs].")
@click.option("--at-least", default=4, show_default=True, type=click.IntRange(min=1), help="Trials that a task must have had.")
@click.option(
    "--share", default=1.0, show_default=True, type=click.FloatRange(min=0.01, max=1), help="Share of them that must have failed."
)
@click.option("--most", is_flag=True, help="Go on even when most of the index would go.")
@click.option("--apply", "do", is_flag=True, help="Write the index; without it, only say what would go.")
@click.option("--undo", is_flag=True, help="INDEX is the manifest of a purge: put its index back.")
@click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="The data directory [default: the user's].")
@click.option("--json", "as_json", is_flag=True, help="Print the manifest as JSON.")
def purge(
    index: Path, runs: tuple[str, ...], at_least: int, share: float, most: bool, do: bool, undo: bool, data_dir: Path | None, as_json: bool
) -> None:
    """Take tasks whose image, tree or tests are broken out of INDEX (an index.jsonl, or a directory of tasks), by the evidence of runs.

    A manifest says what went and why, the index before is kept beside it, and `--undo MANIFEST` puts it back. Nothing is written without
    `--apply`.
    """
    from sandbox.regrade.record import NoRecord, Record

    from . import purge as work

    try:
        if undo:
            manifest = work.undo(index)
            click.echo(f"{manifest.index} is as it was, with {len(manifest.removed)} tasks back")
            return
        lines = work.read(index)
        records = {record.task: record for record in Record(DataDir((data_dir or default_data_dir()).absolute())).tasks(list(runs))}
        manifest = work.plan(index, lines, records, at_least, share)
        if len(manifest.removed) > work.MOST * len(lines) and not most:
            raise work.PurgeError(
                f"{len(manifest.removed)} of {len(lines)} tasks look broken: that is rather the machine (`rl doctor`); --most goes on"
            )
        if do and manifest.removed:
            work.apply(manifest, lines)
    except (work.PurgeError, NoRecord) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(manifest.model_dump_json())
        return
    for entry in manifest.removed:
        click.echo(
            f"{work.task_of(entry.line)}: {entry.why}"
            + "".join(f"\n  {e.run_id} {e.trial_id}: {e.cause}: {e.detail[:160]}" for e in entry.evidence)
        )
    if not manifest.removed:
        failed = [sum(records[task].failed.values()) for line in lines if (task := work.task_of(line)) in records]
        where = f"{len(failed)} of its {len(lines)} tasks in {'these' if runs else 'all'} runs"
        click.echo(f"nothing to take out of {manifest.index}: {sum(failed)} failed trials on {where}")
    elif do:
        click.echo(f"{len(manifest.removed)} tasks taken out; `rl purge --undo {manifest.path}` puts them back")
    else:
        click.echo(f"{len(manifest.removed)} of {len(lines)} tasks would go; --apply does it")
