"""`python -m trainer.launch --run-dir DIR`: from a run directory to a training run of verl, and its clean end."""

PROGRESS_LOG = "progress.log"
"""Under the run's logs: the lines that the trainer's process writes and the launcher shows."""
