"""A control plane whose trainer is the real launcher: `serve.py DATA_DIR PORT`."""

from __future__ import annotations

import sys
from pathlib import Path

from server.serve import serve
from server.settings import Settings

if __name__ == "__main__":
    serve(Settings(data_dir=Path(sys.argv[1]), port=int(sys.argv[2]), stop_grace_s=20))
