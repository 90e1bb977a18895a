"""The real control plane with a trainer and a runner that take a second: `quick_server.py DATA_DIR`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from plugin.client import Client
from plugin.local import running
from server.schemas.datadir import DataDir


@contextmanager
def quick_server(data: DataDir) -> Iterator[Client]:
    """A client of such a server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-P", __file__, data.root])
    try:
        while (client := running(data)) is None:
            try:
                raise RuntimeError(f"the server ended with {process.wait(0.1)}")
            except subprocess.TimeoutExpired:
                continue
        yield client
        client.close()
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    from server.serve import serve
    from server.settings import Settings

    here = Path(__file__).parent
    trainer, runner = here / "quick_trainer.py", here.parent / "server" / "launchers" / "fakes" / "runner.py"
    serve(Settings(data_dir=Path(sys.argv[1]), port=0, trainer_args=("-P", str(trainer)), runner_args=("-P", str(runner)), stop_grace_s=3))
