"""Serve a data directory: one server per directory, found by its clients through server.json."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvicorn
from alembic.util import CommandError
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from .app import create_app
from .db import Database
from .schemas.datadir import DataDir, ServerFile
from .schemas.rundir import write_atomic
from .security import RedactingFormatter, load_or_create_token, redact
from .settings import Settings


class CannotServe(Exception):
    """One line: what is in the way and what to do."""


def serve(settings: Settings) -> None:
    """Until SIGINT or SIGTERM. Raises CannotServe before anything was changed on disk."""
    if not settings.is_loopback and not settings.public:
        raise CannotServe(f"{settings.host} can be reached from other machines: add --public if that is meant")
    if settings.otlp_url and importlib.util.find_spec("opentelemetry.exporter") is None:
        raise CannotServe("traces need the extra `telemetry`: uv sync --extra telemetry --inexact, or leave out --otlp-url")
    settings = settings.model_copy(update={"data_dir": settings.data_dir.resolve()})
    with contextlib.closing(_bind(settings)) as listener, _owned(settings.data):
        _configure_logging()
        _prepare_database(settings)
        _prepare_token(settings.data)
        server = _Server(settings.model_copy(update={"port": listener.getsockname()[1]}))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)  # uvicorn raises the signal again when it has shut down
        try:
            server.run(sockets=[listener])
        finally:
            settings.data.server_file.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """Tells where it listens once it does."""

    def __init__(self, settings: Settings) -> None:
        # Long polls end with their clients; they must not hold up the end of the server. No access log: URLs may carry a token.
        super().__init__(
            uvicorn.Config(create_app(settings), log_config=None, access_log=False, timeout_graceful_shutdown=3, server_header=False)
        )
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            own = ServerFile(url=self._settings.url, pid=os.getpid(), create_time=psutil.Process().create_time())
            write_atomic(self._settings.data.server_file, own.model_dump_json())
            logging.getLogger(__name__).info("listening on %s", self._settings.url)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _bind(settings: Settings) -> socket.socket:
    """Port 0 takes the port of a server that was killed on this directory, so that its runs find the new one, else any free port."""
    reason: str | None = None
    for port in [settings.port] if settings.port else [*_last_port(settings.data), 0]:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((settings.host, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror
    raise CannotServe(f"cannot listen on {settings.host} port {settings.port}: {reason}; choose another with --port (0: any free one)")


def _last_port(data: DataDir) -> list[int]:
    try:
        return [int(ServerFile.model_validate_json(data.server_file.read_bytes()).url.rpartition(":")[2])]
    except (OSError, ValidationError, ValueError):
        return []


@contextlib.contextmanager
def _owned(data: DataDir) -> Iterator[None]:
    """The directory, created when missing, and locked against a second server. The lock ends with this process, however it ends.

    What was created goes again when the server cannot be served from it.
    """
    made = [directory for directory in (data.runtimes, data.runs, data.root, *data.root.parents) if not directory.exists()]
    with contextlib.ExitStack() as stack:
        try:
            for directory in reversed(made):
                directory.mkdir(mode=0o700)
                stack.callback(_remove_if_empty, directory)
            fd = os.open(data.root, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            tempfile.TemporaryFile(dir=data.root).close()
        except BlockingIOError:
            raise CannotServe(f"another server runs on {data.root}: use it, or choose another --data-dir") from None
        except OSError as error:
            raise CannotServe(f"cannot write to the data directory {data.root}: {error.strerror}; choose another with --data-dir") from None
        yield


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):
        directory.rmdir()


def _prepare_database(settings: Settings) -> None:
    fresh = not settings.data.database.exists()
    try:
        with contextlib.closing(Database(settings.resolved_database_url)) as db:
            db.migrate()
    except ImportError as error:
        raise CannotServe(f"cannot use the database: {error}; --database-url takes postgresql://… or sqlite:///…") from None
    except (SQLAlchemyError, CommandError) as error:
        if fresh:
            settings.data.database.unlink(missing_ok=True)
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        raise CannotServe(f"cannot use the database: {redact(reason)}; see --database-url") from None


def _prepare_token(data: DataDir) -> None:
    try:
        load_or_create_token(data.token)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise CannotServe(f"cannot use the token {data.token}: {reason}; remove it and a new one is made") from None


def _configure_logging() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("alembic", "httpx", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
