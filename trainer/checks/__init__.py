"""What the learning side can say about a spec before a run: `python -m trainer.cli check-model`."""
