"""What a server needs to know before it starts. Nothing here is read from environment variables."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from .schemas.datadir import DataDir, default_data_dir

DEFAULT_PORT = 8420


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    data_dir: Path = Field(default_factory=default_data_dir)
    database_url: str = ""
    """Empty: SQLite in the data directory. A PostgreSQL password belongs in ~/.pgpass, not here."""
    host: str = "127.0.0.1"
    port: int = Field(default=DEFAULT_PORT, ge=0, lt=2**16)
    """0: any free one; the server says which in server.json."""
    public: bool = False
    """Allow an address that other machines reach. Reading then needs the token as well."""
    hostnames: tuple[str, ...] = ()
    """Further names under which browsers may ask for this server."""
    trainer_python: Path = Path(sys.executable)
    sandbox_python: Path = Path(sys.executable)
    trainer_args: tuple[str, ...] = ("-P", "-m", "trainer.launch")
    """Behind the interpreter; `--run-dir DIR` follows."""
    runner_args: tuple[str, ...] = ("-P", "-m", "sandbox.runner")
    stop_grace_s: float = Field(default=20, gt=0)
    """Between asking a run's processes to end and killing them."""
    anthropic_model: str = "claude-opus-5-5"
    """Explains findings when a person asks for it."""
    anthropic_key_file: Path | None = None
    """File that holds the API key; None: explanations are refused."""
    anthropic_base_url: str | None = None
    otlp_url: str | None = None
    """Of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of every finished trial."""

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def data(self) -> DataDir:
        return DataDir(self.data_dir)

    @property
    def resolved_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data.database}"

    @property
    def url(self) -> str:
        """Where processes on this machine reach the server."""
        try:
            anywhere = ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            anywhere = False
        host = "127.0.0.1" if anywhere else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"
