"""A server whose runs are made of the fake trainer and runner."""

from __future__ import annotations

import sys
from pathlib import Path

from server.serve import serve
from server.settings import Settings

FAKES = Path(__file__).parent / "fakes"

if __name__ == "__main__":
    serve(
        Settings(
            data_dir=Path(sys.argv[1]),
            database_url=sys.argv[2],
            port=int(sys.argv[3]),
            trainer_args=("-P", str(FAKES / "trainer.py")),
            runner_args=("-P", str(FAKES / "runner.py")),
            stop_grace_s=3,
        )
    )
