"""Files of a run. Paths come from the record, never from a request, and stay inside the run's directory."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from ..db.models import CaptureRow
from ..schemas.capture import CaptureRecord
from ..schemas.rundir import RunDir
from ..security import redact
from ..settings import Settings

TAIL_BYTES = 512 * 1024


class Missing(LookupError):
    """The record points to a file that is not there, or not ours to show."""


def run_dir(settings: Settings, run_id: str) -> RunDir:
    """`run_id` must be the key of a row: ids of runs are made by the server."""
    return RunDir(settings.data.runs / run_id)


def inside(run: RunDir, path: str) -> Path:
    """A path of the record, which producers wrote, as a file inside the run's directory. Raises Missing."""
    root = run.root.resolve()
    file = (root / path).resolve()
    if not file.is_relative_to(root) or not file.is_file():
        raise Missing(f"{path} is not in the run's directory")
    return file


def read_capture(run: RunDir, row: CaptureRow) -> CaptureRecord:
    """The record beside the token arrays. Raises Missing."""
    raw = inside(run, str(Path(row.path).with_suffix(".json"))).read_bytes()
    if hashlib.sha256(raw).hexdigest() != row.sha256:
        raise Missing(f"{row.path} is not the file that was reported for trial {row.trial_id}: its SHA-256 differs, so it is not shown")
    try:
        return CaptureRecord.model_validate_json(raw)
    except ValidationError as error:
        raise Missing(f"{row.path} holds no capture: {error.error_count()} errors") from None


def tail(file: Path, lines: int) -> list[str]:
    """The last lines of a log, at most TAIL_BYTES, without secrets."""
    with file.open("rb") as log:
        size = log.seek(0, 2)
        log.seek(max(0, size - TAIL_BYTES))
        text = log.read().decode(errors="replace")
    whole = text.splitlines()[1 if size > TAIL_BYTES else 0 :]
    return [redact(line) for line in whole[-lines:]]
