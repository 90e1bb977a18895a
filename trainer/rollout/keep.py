"""Where a rollout's capture goes: the file with everything, and beside it the record that the server shows."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

from server.schemas.capture import CaptureRecord
from server.schemas.events import CaptureBody
from server.schemas.rundir import RunDir, write_atomic
from server.schemas.trials import ArtifactRef

log = logging.getLogger(__name__)


def keep(run: RunDir, record: CaptureRecord, file: Callable[[], bytes] | None, malformed_turns: int) -> tuple[CaptureBody, str]:
    """Write `captures/<trial_id>.npz` (unless `file` is None) and then `captures/<trial_id>.json`, which names the first with its SHA-256.

    Returns the reference to report and, when the disk would not take one of them, what to say about it: the rollout is trained all the
    same. A file is there whole or not at all.
    """
    path, problem = run.captures / f"{record.trial_id}.json", ""
    if file is not None:
        try:
            data = file()
            write_atomic(path.with_suffix(".npz"), data)
            name = str(path.with_suffix(".npz").relative_to(run.root))
            record.file = ArtifactRef(name="capture", path=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())
        except OSError as error:
            problem = f"its tokens were not kept: {error.strerror}"
        except ValueError as error:  # the graph is not what it promises: no reason to lose the run
            problem = f"its tokens were not kept: {error}".splitlines()[0]
    text = record.model_dump_json(indent=1)
    try:
        write_atomic(path, text)
    except OSError as error:
        problem = f"its capture was not kept: {error.strerror}"
        path.with_suffix(".npz").unlink(missing_ok=True)  # without its record nobody would find it, and the disk is full
    if problem:
        log.error("trial %s: %s (%s)", record.trial_id, problem, run.captures)
    body = CaptureBody(
        trial_id=record.trial_id,
        path=str(path.relative_to(run.root)),
        size=len(text.encode()),
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        turns=len(record.turns),
        branches=len(record.branches),
        sampled_tokens=record.sampled_tokens,
        tool_calls=sum(len(turn.tool_calls) for turn in record.turns),
        malformed_turns=malformed_turns,
    )
    return body, problem
