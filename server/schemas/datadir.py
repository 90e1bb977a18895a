"""The per-user data directory: where a server and its clients on one machine find each other.

```
lego.db        the record (SQLite, unless another database is configured)
token          bearer token, created on first start (mode 0600)
server.json    ServerFile, present while a server is up
server.log     output of a server started by `rl up`
runs/          one directory per run (see rundir)
runtimes/      pinned harness runtimes
images/        unpacked images of sandboxes
```
"""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import BaseModel, ConfigDict


class ServerFile(BaseModel):
    """`create_time` is psutil's, in Unix seconds: with `pid` it names one process for good, so that nothing else is ever signalled."""

    model_config = ConfigDict(extra="forbid")

    url: str
    pid: int
    create_time: float


class DataDir:
    """Paths of one data directory. Construction does not touch the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.database = root / "lego.db"
        self.token = root / "token"
        self.server_file = root / "server.json"
        self.server_log = root / "server.log"
        self.runs = root / "runs"
        self.runtimes = root / "runtimes"
        self.images = root / "images"


def default_data_dir() -> Path:
    """`$XDG_DATA_HOME/lego-rl`, by default `~/.local/share/lego-rl`."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "lego-rl"
