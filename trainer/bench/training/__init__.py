"""What a run of the trainer costs beside its arithmetic."""
