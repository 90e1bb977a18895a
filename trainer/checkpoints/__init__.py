"""Trained weights: which of them are kept, and how they leave a run."""
