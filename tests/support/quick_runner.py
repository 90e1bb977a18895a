"""A runner without sandboxes: healthy until it is asked to end. `python -m tests.support.quick_runner --run-dir DIR`."""

from __future__ import annotations

import argparse
import os
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

from server.schemas.rundir import RunDir, RunnerFile, write_atomic
from server.schemas.trials import RunnerHealth


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        content = RunnerHealth(boot="quick", live=0, limits="rlimit").model_dump_json().encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = RunDir(parser.parse_args().run_dir)
    server = HTTPServer(("127.0.0.1", 0), _Health)
    own = RunnerFile(url=f"http://127.0.0.1:{server.server_port}", pid=os.getpid(), boot="quick")
    write_atomic(run_dir.runner_file, own.model_dump_json())
    server.serve_forever()


if __name__ == "__main__":
    main()
