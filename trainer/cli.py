"""`python -m trainer.cli`: commands of the learning side. `rl` dispatches here from the light install."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click

from trainer.checkpoints.command import checkpoint


@click.group()
def main() -> None:
    """Learning side of lego-rl."""


@main.group()
def bench() -> None:
    """Measure on this machine."""


@bench.command("engine")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(min=1), help="Runs per case; medians are reported.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_engine(runs: int, as_json: bool) -> None:
    """Tokens per second of the CPU engine against transformers' batched generate."""
    from trainer.bench import engine

    comparisons = engine.run(runs)
    click.echo(json.dumps(engine.as_json(comparisons), indent=2) if as_json else "\n".join(item.line for item in comparisons))


@main.command("check-model")
@click.option(
    "--spec", "spec_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A resolved RunSpec, JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_model(spec_file: Path, as_json: bool) -> None:
    """What the policy's chat template and tool-call parser do, for the checks before a run."""
    from server.schemas.runspec import RunSpec
    from trainer.checks.model import model_facts

    facts = model_facts(RunSpec.model_validate_json(spec_file.read_bytes()))
    lines = (f"{name}: {value}" for name, value in facts.model_dump(mode="json").items() if value)
    click.echo(facts.model_dump_json() if as_json else "\n".join(lines))


@main.command("check-device")
@click.option(
    "--spec", "spec_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A resolved RunSpec, JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_device(spec_file: Path, as_json: bool) -> None:
    """What keeps this environment from training on GPUs. Exit code 1 when something does."""
    from server.schemas.probes import DeviceFacts
    from server.schemas.runspec import RunSpec
    from trainer.launch import preflight

    facts = DeviceFacts(troubles=list(preflight.troubles(RunSpec.model_validate_json(spec_file.read_bytes()))))
    if as_json:
        click.echo(facts.model_dump_json())
        return
    click.echo("\n".join(f"{trouble.where}: {trouble.message}; {trouble.fix}" for trouble in facts.troubles) or "nothing")
    raise SystemExit(1 if facts.troubles else 0)


@main.command("plan")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(as_json: bool) -> None:
    """The trainer's command for a resolved RunSpec (JSON) on stdin."""
    from server.schemas.runspec import RunSpec
    from trainer.launch.plan import trainer_plan

    planned = trainer_plan(RunSpec.model_validate_json(sys.stdin.read()))
    click.echo(json.dumps(planned.as_json()) if as_json else "\n".join(planned.lines()))


@main.command("check-cluster")
@click.option(
    "--spec", "spec_file", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A resolved RunSpec, JSON."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check_cluster(spec_file: Path, as_json: bool) -> None:
    """Whether the cluster of `trainer.cluster.kubernetes` would take the run's job; keeps nothing there. Exit code 1 when it would not."""
    from server.schemas.runspec import RunSpec
    from trainer.launch.kuberay.preflight import cluster_facts

    facts = cluster_facts(RunSpec.model_validate_json(spec_file.read_bytes()))
    if as_json:
        click.echo(facts.model_dump_json())
        return
    click.echo("\n".join([facts.version, *(f"{trouble.where}: {trouble.message}; {trouble.fix}" for trouble in facts.troubles)]).strip())
    raise SystemExit(1 if facts.troubles else 0)


@bench.command("proxy")
@click.option("--seconds", default=20.0, show_default=True, type=click.FloatRange(min=0.1), help="Of the open loop in each row.")
@click.option("--sessions", default="1,16,64", show_default=True, help="Sessions of each row.")
@click.option("--dialect", default="openai", show_default=True, type=click.Choice(["openai", "anthropic"]), help="Anthropic streams.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory of the tokenizer to use.")
@click.option(
    "--against", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Python that has another gateway."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_proxy(
    seconds: float, sessions: str, dialect: Literal["openai", "anthropic"], model: Path | None, against: tuple[Path, ...], as_json: bool
) -> None:
    """What the proxy adds to a model call, and how many calls one core serves."""
    import uvloop

    from trainer.bench.proxy import measure, report

    if not all(count.isdecimal() and int(count) for count in sessions.split(",")):
        raise click.BadParameter("give numbers of at least 1, as in 1,16,64", param_hint="--sessions")
    counts = tuple(int(count) for count in sessions.split(","))
    plan = measure.Plan(sessions=counts, seconds=seconds, dialect=dialect, model=model, against=against)
    result = uvloop.run(measure.run(plan))  # what the load itself takes to read an answer counts as added
    click.echo(json.dumps(result, indent=2) if as_json else report.text(result))


@bench.command("async")
@click.option("--workload", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="YAML; default: the one that is shipped.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_async(workload: Path | None, as_json: bool) -> None:
    """The synchronous and the asynchronous schedule over the same simulated trials. Exit code 1 when asynchronous misses 90 % of the
    bound, or a drop is unexplained."""
    from trainer.bench.schedule import simulate
    from trainer.bench.schedule import workload as work

    try:
        found = simulate.compare(work.load(workload or work.SHIPPED))
    except ValueError as error:
        raise click.ClickException(f"{workload}: {error}") from None
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else "\n".join(found.lines()))
    raise SystemExit(0 if found.passed else 1)


@bench.command("trainer")
@click.option("--steps", default=50, show_default=True, type=click.IntRange(min=3))
@click.option("--schedule", default="sync", show_default=True, type=click.Choice(["sync", "async"]))
@click.option("--start", default="warm_fork", show_default=True, type=click.Choice(["warm_fork", "plain"]), help="Of the workers.")
@click.option("--policy", default="builtin:onebug-mini-swe-agent", show_default=True, help="model.path of the run.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_trainer(steps: int, schedule: Literal["sync", "async"], start: Literal["plain", "warm_fork"], policy: str, as_json: bool) -> None:
    """Start-up, overhead per step and memory of a real run whose trials are two model calls."""
    from trainer.bench.training import measure

    try:
        found = measure.run(steps, schedule, policy, start)
    except measure.RunFailed as error:
        raise click.ClickException(str(error)) from None
    click.echo(json.dumps(found.as_json(), indent=2) if as_json else found.line)


@main.command("replay")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--rule", type=click.Choice(["all_branches", "parent_exact"]), default="all_branches", show_default=True, help="capture.train"
)
@click.option("--history", type=click.Choice(["keep", "strip"]), default="keep", show_default=True, help="capture.history")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per file.")
def replay_recordings(paths: tuple[Path, ...], rule: str, history: str, as_json: bool) -> None:
    """Replay recorded harness traffic (files or folders of .jsonl) through the proxy; exits 1 when a promise does not hold."""
    from server.schemas.runspec import History, TrainRule
    from trainer.replay.play import files, player
    from trainer.replay.recording import BadRecording
    from trainer.replay.report import report

    broken = False
    logging.disable(logging.ERROR)  # recorded faults are meant; one that the proxy could not hide is a violation
    try:
        with player(History(history)) as play:
            for path in files(paths):
                try:
                    result = report(play(path), TrainRule(rule))
                except BadRecording as error:
                    click.echo(f"Error: {error}", err=True)
                    broken = True
                    continue
                click.echo(json.dumps(asdict(result)) if as_json else result.line)
                broken = broken or bool(result.violations)
    except FileNotFoundError as error:
        raise click.ClickException(str(error)) from None
    finally:
        logging.disable(logging.NOTSET)
    if broken:
        raise SystemExit(1)


main.add_command(checkpoint)


@main.group()
def r3() -> None:
    """Work with routing replay."""


@r3.command("control")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(min=0))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def r3_control(seed: int, as_json: bool) -> None:
    """A bf16 sampler against an fp32 trainer with replay off, misaligned by one position, and aligned. Exit code 1 when the
    differences are not as they must be."""
    from trainer.r3 import control

    found = control.run(seed).as_json()
    passed = found["passed"]
    lines = (f"{name:10s} " + "  ".join(f"{key} {value:.4g}" for key, value in found[name].items()) for name in found if name != "passed")
    click.echo(json.dumps(found) if as_json else "\n".join([*lines, "as expected" if passed else "NOT as expected"]))
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
