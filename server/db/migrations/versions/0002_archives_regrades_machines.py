"""Archived diffs, second verdicts, and what a run's machine looks like"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_table(
        "archives",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("trial_id", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_archives_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "trial_id", name=op.f("pk_archives")),
    )
    op.create_table(
        "regrades",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("trial_id", sa.String(), nullable=False),
        sa.Column("verifier", sa.String(), nullable=False),
        sa.Column("inputs", sa.String(), nullable=False),
        sa.Column("reward", sa.Integer(), nullable=False),
        sa.Column("outcome", sa.JSON(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_regrades_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "trial_id", "verifier", "inputs", name=op.f("pk_regrades")),
    )
    op.create_table(
        "machines",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("findings", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.run_id"], name=op.f("fk_machines_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "host", name=op.f("pk_machines")),
    )
