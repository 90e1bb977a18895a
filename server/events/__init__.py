"""From batches of events to the tables."""

from .ingest import MixedSources, UnknownRun, ingest

__all__ = ["MixedSources", "UnknownRun", "ingest"]
