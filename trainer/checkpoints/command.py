"""`rl checkpoint`: what a run left, and how it is handed on."""

from __future__ import annotations

import json
from pathlib import Path

import click

from server.schemas.datadir import DataDir, default_data_dir
from server.schemas.probes import TRAINED_WITH, TrainedWith
from server.schemas.rundir import RunDir

from .kept import Kept, kept


@click.group()
def checkpoint() -> None:
    """List and export the weights of a run."""


def _run_options(command: click.decorators.FC) -> click.decorators.FC:
    where = click.option("--data-dir", type=click.Path(file_okay=False, path_type=Path), help="The server's. [~/.local/share/lego-rl]")
    return click.argument("run_id", metavar="RUN")(where(click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)))


@checkpoint.command("list")
@_run_options
def list_checkpoints(run_id: str, data_dir: Path | None, as_json: bool) -> None:
    """The weights that a run left on this machine."""
    found = kept(_run(run_id, data_dir))
    if as_json:
        click.echo(json.dumps([{"step": one.step, "names": one.names, "weights": str(one.weights)} for one in found]))
        return
    for one in found:
        click.echo(f"step {one.step:<6}{' '.join(one.names):<12}{one.weights}")


@checkpoint.command("export")
@_run_options
@click.option("--which", default="best", show_default=True, help="best, final, or the number of a step.")
@click.option("--to", required=True, type=click.Path(path_type=Path), help="A directory that does not exist yet.")
def export_checkpoint(run_id: str, data_dir: Path | None, which: str, to: Path, as_json: bool) -> None:
    """Weights as a Hugging Face checkpoint, verified against the base, and the line that serves them."""
    from trainer.policies import PREFIX, resolve

    from .export import ExportError, export
    from .serve import serve_line

    run = _run(run_id, data_dir)
    model = run.load().spec.model
    chosen = _chosen(kept(run), which, run_id)
    base = resolve(model.path) if model.path.startswith(PREFIX) else Path(model.path)
    try:
        done = export(chosen.weights, base, to.absolute())
        trained = TrainedWith.model_validate_json((done.directory / TRAINED_WITH).read_bytes())
    except (ExportError, OSError) as error:
        raise click.ClickException(str(error)) from None
    serve = serve_line(done.directory, trained, model.context)
    if as_json:
        said = {"step": chosen.step, "directory": str(done.directory), "tensors": done.tensors, "changed": done.changed, "serve": serve}
        click.echo(json.dumps(said))
        return
    click.echo(f"step {chosen.step} in {done.directory}: {done.tensors} tensors as in {base}, {done.changed} of them trained")
    click.echo(f"serve it with: {serve}")


def _run(run_id: str, data_dir: Path | None) -> RunDir:
    run = RunDir(DataDir(data_dir or default_data_dir()).runs / run_id)
    if Path(run_id).name != run_id or not run.run_file.is_file():
        raise click.ClickException(f"there is no run {run_id} in {run.root.parent}: `rl status` lists the runs")
    return run


def _chosen(found: list[Kept], which: str, run_id: str) -> Kept:
    for one in found:
        if which in one.names or which == str(one.step):
            return one
    has = ", ".join("/".join((str(one.step), *one.names)) for one in found) or "none"
    raise click.ClickException(f"run {run_id} has no checkpoint {which!r}; it has: {has}")
