"""`python -m trainer.launch --run-dir DIR`: from a run directory to a training run of verl, and its clean end."""

PROGRESS_LOG = "progress.log"
"""Under the run's logs: the lines that the trainer's process writes and the launcher shows."""
FAILED, FINAL, TERMINATED = 1, 2, 143
"""Exit codes: a crash, which a checkpoint may mend; an end that would come again; a SIGTERM."""

PERHAPS = "Perhaps for want of memory: see `dmesg`, `rl doctor` and logs/verl.log"
"""What to look at when a process died without a word."""


class FinalError(Exception):
    """The run cannot start, or it ends on purpose: from a checkpoint it would end the same way. The message says why and what to do."""
