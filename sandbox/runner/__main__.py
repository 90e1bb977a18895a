"""`python -m sandbox.runner --run-dir DIR`: the trial runner of one run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from . import quiet


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sandbox.runner", description="Execute the trials of a run.")
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    quiet()

    from server.schemas.rundir import RunDir

    from .service import NotReady, serve

    try:
        asyncio.run(serve(RunDir(options.run_dir.resolve())))
    except NotReady as error:
        print(f"runner: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
