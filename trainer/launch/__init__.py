"""`python -m trainer.launch --run-dir DIR`: from a run directory to a training run of verl, and its clean end."""
