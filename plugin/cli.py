"""`rl`: operate runs from a terminal. Exit codes: 0 fine, 1 a problem was found or the run failed, 2 wrong usage.

Only click is imported here; each command imports what it needs, so that `rl --help` answers at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .errors import ControlError
from .rooms import TRAINER, VERBS, room_command

if TYPE_CHECKING:
    from server.schemas.api import RunStatus
    from server.schemas.datadir import DataDir

    from .client import Client


class Target:
    """Which control plane the commands talk to."""

    def __init__(self, data_dir: Path | None, url: str | None, token_file: Path | None) -> None:
        self.data_dir = data_dir
        self.url = url
        self.token_file = token_file

    @property
    def data(self) -> DataDir:
        from server.schemas.datadir import DataDir, default_data_dir

        return DataDir((self.data_dir or default_data_dir()).absolute())

    @property
    def local(self) -> DataDir:
        """For commands that start or stop the server of this machine. Raises UsageError where another one was named."""
        if self.url:
            raise click.UsageError("this command works on this machine's own server: leave out --url, name its directory with --data-dir")
        return self.data

    def client(self) -> Client:
        from .client import Client

        return Client.of(self.data, self.url, self.token_file)


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ControlError as error:
            raise click.ClickException(str(error)) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--data-dir", type=click.Path(path_type=Path, file_okay=False), help="Where server, token and runs live. [~/.local/share/lego-rl]"
)
@click.option("--url", help="A server elsewhere, instead of the one on the data directory.")
@click.option("--token-file", type=click.Path(path_type=Path, dir_okay=False), help="Its token. [DATA_DIR/token]")
@click.version_option(package_name="lego-rl")
@click.pass_context
def main(ctx: click.Context, data_dir: Path | None, url: str | None, token_file: Path | None) -> None:
    """Train coding agents with online RL inside the harness they ship in."""
    ctx.obj = Target(data_dir, url, token_file)


def _spec_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--set", "overrides", multiple=True, metavar="FIELD=VALUE", help="Set a RunSpec field: trainer.steps=20")(
        command
    )
    return click.argument("spec", default="local", metavar="[SPEC.yaml|PRESET]")(command)


def _print(lines: Iterable[str]) -> None:
    """What a policy or a task wrote must not steer the terminal."""
    for line in lines:
        click.echo("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in line))


@main.command()
@click.option("--port", type=click.IntRange(0, 65535), default=None, help="Port on 127.0.0.1; 0 takes any free one. [8420]")
@click.option("--foreground", is_flag=True, help="Stay attached and log to this terminal.")
@click.pass_obj
def up(target: Target, port: int | None, foreground: bool) -> None:
    """Start the control plane and its Live UI, unless they run already."""
    from .local import PORT, ensure_server, server_command

    port, data = PORT if port is None else port, target.local
    if foreground:
        command = server_command(data, port)
        os.execv(command[0], command)  # noqa: S606  (no shell wanted)
    server = ensure_server(data, port)
    click.echo(f"{'started' if server.started else 'already running'}: {server.client.url}  (data in {data.root}; `rl down` stops it)")


@main.command()
@click.pass_obj
def down(target: Target) -> None:
    """Stop the control plane. Runs go on, and the next `rl up` finds them again."""
    from .local import stop_server

    click.echo(f"stopped the server at {stop_server(target.local).url}")


@main.command()
@_spec_options
@click.option("--skip-slow", is_flag=True, help="Leave out the checks that start sandboxes.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def check(target: Target, spec: str, overrides: tuple[str, ...], skip_slow: bool, as_json: bool) -> None:
    """Check that a run would work here."""
    from server.schemas.api import CheckRequest

    from . import show
    from .spec import parse_overrides, spec_request

    request = spec_request(spec, parse_overrides(overrides), Path.cwd())
    report = target.client().report(CheckRequest(**request.model_dump(), skip_slow=skip_slow))
    _print([report.model_dump_json()] if as_json else show.report(report))
    sys.exit(0 if report.ok else 1)


@main.command()
@_spec_options
@click.option("--plan", "only_plan", is_flag=True, help="Show the plan and start nothing.")
@click.option("--yes", is_flag=True, help="Start without asking.")
@click.option("--follow", is_flag=True, help="Watch until it ends; exit 1 when it fails.")
@click.pass_obj
def run(target: Target, spec: str, overrides: tuple[str, ...], only_plan: bool, yes: bool, follow: bool) -> None:
    """Show the plan of a run, ask, and start it."""
    from . import show
    from .spec import parse_overrides, spec_request

    client = target.client()
    plan = client.plan(spec_request(spec, parse_overrides(overrides), Path.cwd()))
    _print(show.plan(plan))
    if only_plan:
        return
    try:
        agreed = yes or click.confirm("Start this run?")
    except click.Abort:
        click.echo()
        raise ControlError("not started: nobody answered; --yes starts without asking") from None
    if not agreed:
        raise ControlError("not started")
    started = client.start(plan.digest)
    click.echo(f"{started.run_id} is {started.state}  {client.dashboard(started.run_id)}")
    if follow:
        _finish(_watch(target, started.run_id))


@main.command()
@_spec_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def plan(target: Target, spec: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print the trainer's command for a spec: environment, program and every setting of verl. Looks at no machine."""
    from .spec import parse_overrides, spec_request

    resolved = target.client().resolve(spec_request(spec, parse_overrides(overrides), Path.cwd()))
    argv = room_command(TRAINER, ["plan", *(["--json"] if as_json else [])])
    sys.exit(subprocess.run(argv, input=json.dumps(resolved.spec), text=True, check=False).returncode)


@main.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--follow", is_flag=True, help="Watch until it ends. Without RUN: the newest.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def status(target: Target, run_id: str | None, follow: bool, as_json: bool) -> None:
    """List the runs, or show one."""
    from . import show

    client = target.client()
    if follow:
        _finish(_watch(target, client.run(run_id).run_id if run_id else client.latest().run_id))
    if run_id is None:
        runs = client.runs()
        _print((r.model_dump_json() for r in runs) if as_json else show.runs(runs))
        return
    found = client.run(run_id)
    _print([found.model_dump_json()] if as_json else show.status(found))
    sys.exit(1 if found.state == "failed" else 0)


def _watch(target: Target, run_id: str) -> RunStatus:
    from .follow import follow

    on_terminal = sys.stdout.isatty()
    clear = "\r\x1b[K" if on_terminal else ""
    width = shutil.get_terminal_size().columns - 3  # a line that wraps could not be overwritten
    try:
        return follow(
            target.client,
            run_id,
            say=lambda line: click.echo(clear + line),
            say_now=lambda line: click.echo(f"{clear}  {line[:width]}", nl=False) if on_terminal else None,
        )
    except KeyboardInterrupt:
        click.echo(clear, nl=False)
        raise ControlError(f"no longer watching; the run goes on (`rl stop {run_id}` ends it)") from None


def _finish(status: RunStatus) -> None:
    """Say how a watched run ended, and end the command accordingly."""
    from . import show

    _print(show.status(status))
    sys.exit(0 if status.state == "succeeded" else 1)


@main.command()
@click.argument("run_id", metavar="RUN")
@click.pass_obj
def stop(target: Target, run_id: str) -> None:
    """Stop a run for good."""
    stopped = target.client().stop(run_id)
    click.echo(f"{stopped.run_id} is {stopped.state}")


@main.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.pass_obj
def dashboard(target: Target, run_id: str | None) -> None:
    """Print the address of the Live UI."""
    client = target.client()
    if run_id:
        client.run(run_id)
    click.echo(client.dashboard(run_id))


@main.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--explain", is_flag=True, help="Let the server's language model rank and explain the findings.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_obj
def diagnose(target: Target, run_id: str | None, explain: bool, as_json: bool) -> None:
    """Look for what goes wrong in a run, with evidence. Without RUN: the newest."""
    from . import show

    client = target.client()
    found = client.diagnose(run_id or client.latest().run_id, explain)
    _print([found.model_dump_json()] if as_json else show.diagnosis(found))


@main.command()
@click.argument("finding_id", metavar="FINDING")
@click.argument("decision", type=click.Choice(["confirm", "reject"]))
@click.option("--note", default="", help="Why; the next diagnosis shows it.")
@click.pass_obj
def review(target: Target, finding_id: str, decision: str, note: str) -> None:
    """Confirm or reject a finding."""
    from server.schemas.checks import Verdict

    finding = target.client().review(finding_id, Verdict.CONFIRMED if decision == "confirm" else Verdict.REJECTED, note)
    click.echo(f"{finding.id} {finding.verdict}: {finding.title}")


@main.group()
def rollout() -> None:
    """Look into what was captured of single rollouts."""


@rollout.command("show")
@click.argument("trial_id", metavar="ID")
@click.option("--run", "run_id", metavar="RUN", help="The run that it belongs to. [the newest]")
@click.option("--turn", type=click.IntRange(0), help="Only this turn.")
@click.option("--tokens", is_flag=True, help="Also the token ids, the sampled ones with their log-probabilities.")
@click.option("--full", is_flag=True, help="Whole messages, however long.")
@click.option("--json", "as_json", is_flag=True, help="One object: the trial, its capture, and with --tokens the ids.")
@click.pass_obj
def rollout_show(target: Target, trial_id: str, run_id: str | None, turn: int | None, tokens: bool, full: bool, as_json: bool) -> None:
    """Show turns, branches, and what became of every sampled token of a rollout. ID is a trial's, as the Live UI names it."""
    from . import rollout as show

    client = target.client()
    run_id = run_id or client.latest().run_id
    trial, record = client.trial(run_id, trial_id), client.capture(run_id, trial_id)
    turns = [found for found in record.turns if turn is None or found.index == turn]
    if turn is not None and not turns:
        raise ControlError(f"rollout {trial_id} has no turn {turn}: it has {len(record.turns)}, counted from 0")
    ids = {found.index: client.tokens(run_id, trial_id, found.index) for found in turns} if tokens else {}
    _print([show.as_json(trial, record, ids)] if as_json else show.rollout(trial, record, turns, ids, full))


@rollout.command("export")
@click.argument("trial_id", metavar="ID")
@click.option("--run", "run_id", metavar="RUN", help="The run that it belongs to. [the newest]")
@click.option("--format", "_format", type=click.Choice(["atif"]), default="atif", help="Agent Trajectory Interchange Format 1.8.")
@click.pass_obj
def rollout_export(target: Target, trial_id: str, run_id: str | None, _format: str) -> None:
    """Print a rollout as a trajectory (JSON), the same for every harness: the capture, and what the harness's own log adds to it."""
    client = target.client()
    _print([json.dumps(client.trajectory(run_id or client.latest().run_id, trial_id))])


@main.command()
@click.option("--preset", default="local", help="local, local-claude-code or local-mixed.")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps.")
@click.option("--seed", type=int, help="Seed of the trainer, or of the policy that is made.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON in the last line.")
@click.option("--stop-server", is_flag=True, help="Stop the server at the end if the demo started it.")
@click.option("--remake-policy", is_flag=True, help="Make a demo policy anew (minutes) instead of running.")
@click.pass_obj
def demo(target: Target, preset: str, steps: int | None, seed: int | None, as_json: bool, stop_server: bool, remake_policy: bool) -> None:
    """Train the demo policy and watch its held-out solve rate rise."""
    from .demo import Demo

    overrides = {field: value for field, value in (("trainer.steps", steps), ("trainer.seed", seed)) if value is not None}
    job = Demo(target.local, preset, overrides, click.echo)
    if remake_policy:
        sys.exit(job.remake_policy(seed or 0))
    sys.exit(job.run(lambda run_id: _watch(target, run_id), as_json=as_json, stop_after=stop_server))


def _dispatch(name: str) -> click.Command:
    verb = VERBS[name]
    settings = {"ignore_unknown_options": True, "help_option_names": []}

    @click.command(name, help=verb.help, hidden=verb.hidden, context_settings=settings)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    @click.pass_obj
    def command(target: Target, args: tuple[str, ...]) -> None:
        if target.url or (target.data_dir and not verb.takes_data_dir):
            raise click.UsageError(f"`rl {name}` talks to no server; see `rl {name} --help` for where it looks")
        where = ["--data-dir", str(target.data_dir)] if target.data_dir and args else []
        argv = room_command(verb.room_of(args), [name, *args, *where])
        os.execv(argv[0], argv)  # noqa: S606  (no shell wanted)

    return command


for _name in VERBS:
    main.add_command(_dispatch(_name))
