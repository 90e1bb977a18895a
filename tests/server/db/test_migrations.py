from __future__ import annotations

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from server.db import Database
from server.db.models import Base


def test_migrations_make_the_tables_that_the_models_describe(db: Database) -> None:
    with db.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_migrating_again_changes_nothing(db: Database) -> None:
    db.migrate()
    db.migrate()


def test_passwords_are_not_shown() -> None:
    assert "secret" not in Database("postgresql://me:secret@127.0.0.1/x").shown
