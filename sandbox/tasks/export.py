"""`python -m sandbox.tasks.export --seed S --n N --out FILE`: onebug tasks as JSON lines, for programs that may not import this room."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from .onebug import generate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sandbox.tasks.export", description="Write onebug tasks as JSON lines.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--n", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--held-out", action="store_true", help="tasks of the held-out split")
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as lines:
        for task in generate(options.seed, options.n, options.held_out):
            lines.write(json.dumps(dataclasses.asdict(task)) + "\n")


if __name__ == "__main__":
    main()
