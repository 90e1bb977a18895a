"""`python -m sandbox.tasks.export --seed S --n N --out FILE`: onebug tasks as JSON lines, for programs that may not import this room."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from .onebug import generate


def rows(seed: int, n: int, held_out: bool) -> list[dict[str, Any]]:
    """The fields of `OneBug` by name."""
    return [dataclasses.asdict(task) for task in generate(seed, n, held_out)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox.tasks.export", description="Write onebug tasks as JSON lines.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true", help="tasks of the held-out split")
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows(options.seed, options.n, options.held_out))


if __name__ == "__main__":
    main()
