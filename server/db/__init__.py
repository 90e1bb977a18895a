"""The record: SQLAlchemy models, migrations and the two kinds of transaction."""

from .engine import Database

__all__ = ["Database"]
