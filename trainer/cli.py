"""`python -m trainer.cli`: commands of the learning side. `rl` dispatches here from the light install."""

from __future__ import annotations

import json
from pathlib import Path

import click


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


@bench.command("proxy")
@click.option("--runs", default=5, show_default=True, type=click.IntRange(min=1), help="Rounds of conversations after a warm-up round.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory of the tokenizer to use.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench_proxy(runs: int, model: Path | None, as_json: bool) -> None:
    """Latency that the proxy adds to a model call, for 1 and 64 rollouts at once."""
    from trainer.bench import proxy

    rows = proxy.run(runs, model)
    click.echo(json.dumps(proxy.as_json(rows), indent=2) if as_json else "\n".join(row.line for row in rows))


if __name__ == "__main__":
    main()
