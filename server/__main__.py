"""`python -m server`: the control plane of one data directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pydantic import ValidationError

from .errors import one_line
from .serve import CannotServe, serve
from .settings import DEFAULT_PORT, Settings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m server", description="Control plane of lego-rl.")
    parser.add_argument("--data-dir", type=Path, help="where the record, the runs and the token lie (default: ~/.local/share/lego-rl)")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help=f"0: any free one (default: {DEFAULT_PORT})")
    parser.add_argument("--public", action="store_true", help="allow an address that other machines reach")
    parser.add_argument("--hostname", action="append", dest="hostnames", help="a further name that browsers use for this server")
    parser.add_argument("--database-url", help="postgresql://… in place of SQLite; the password belongs in ~/.pgpass")
    parser.add_argument("--trainer-python", type=Path, help="interpreter of the environment that has the trainer")
    parser.add_argument("--sandbox-python", type=Path, help="interpreter of the environment that has the sandbox")
    parser.add_argument("--anthropic-key-file", type=Path, help="file with the API key that explaining findings uses")
    parser.add_argument("--anthropic-model")
    parser.add_argument("--otlp-url", help="OpenTelemetry collector that gets a trace of every finished trial, as http://collector:4318")
    given = {key: value for key, value in vars(parser.parse_args()).items() if value is not None}
    try:
        serve(Settings(**given))
    except CannotServe as error:
        message = str(error)
    except ValidationError as error:
        message = one_line(error)
    else:
        return 0
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
