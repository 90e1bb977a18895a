"""`python -m tests.soak`: exit status 1 when something leaked, was lost, or was judged wrongly."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from .soak import soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Play trials in a row, with real kills.")
    parser.add_argument("--n", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="The data directory to use, kept for a look afterwards.")
    options = parser.parse_args()
    report = asyncio.run(soak(options.n, options.at_once, options.seed, options.keep))
    print(json.dumps(report, indent=2))
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
