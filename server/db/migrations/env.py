"""Alembic's entry point. The connection comes from `Database.migrate`; there is no command-line use."""

from __future__ import annotations

from alembic import context

from server.db.models import Base

context.configure(connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True)
context.run_migrations()
