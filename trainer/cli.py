"""`python -m trainer.cli`: commands of the learning side. `rl` dispatches here from the light install."""

from __future__ import annotations

import json

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


if __name__ == "__main__":
    main()
