"""The first schema"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "best_configs",
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("model_name", sa.String(length=120), nullable=False),
        sa.Column("model_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("training_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("hardware_fingerprint", sa.String(length=64), nullable=False),
        sa.Column("tokens_per_second", sa.Float(), nullable=False),
        sa.Column("best", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("study_id", name="pk_best_configs"),
    )
    op.create_index("ix_best_configs_model_name", "best_configs", ["model_name"])
    op.create_table(
        "hardware_profiles",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("profile", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_hardware_profiles"),
    )
    op.create_table(
        "hosts",
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("device_type", sa.String(length=16), nullable=False),
        sa.Column("device_name", sa.Text(), nullable=False),
        sa.Column("device_count", sa.Integer(), nullable=False),
        sa.Column("device_indices", sa.JSON(), nullable=False),
        sa.Column("owner", sa.String(length=255), nullable=False),
        sa.Column("last_seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("host", "device_type", name="pk_hosts"),
    )
    op.create_table(
        "model_profiles",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("profile", sa.JSON(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_model_profiles"),
    )
    op.create_table(
        "settings",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_settings"),
    )
    op.create_table(
        "studies",
        sa.Column("sequence", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("idempotency_key", sa.String(length=255), nullable=True),
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("devices", sa.Integer(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("phase", sa.String(length=16), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=True),
        sa.Column("best", sa.JSON(), nullable=True),
        sa.Column("model_fingerprint", sa.String(length=64), nullable=True),
        sa.Column("hardware_fingerprint", sa.String(length=64), nullable=True),
        sa.Column("lease_epoch", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.String(length=255), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("sequence", name="pk_studies"),
        sa.UniqueConstraint("id", name="uq_studies_id"),
        sa.UniqueConstraint("idempotency_key", name="uq_studies_idempotency_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_studies_name", "studies", ["name"])
    op.create_index("ix_studies_state", "studies", ["state"])
    op.create_table(
        "device_leases",
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("device_type", sa.String(length=16), nullable=False),
        sa.Column("device_index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"],
            name="fk_device_leases_study_id_studies", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("host", "device_type", "device_index", name="pk_device_leases"),
    )
    op.create_index("ix_device_leases_study_id", "device_leases", ["study_id"])
    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_events_study_id_studies", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_study_id_events_id", "events", ["study_id", "id"])
    op.create_table(
        "trials",
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("prediction", sa.JSON(), nullable=True),
        sa.Column("outcome", sa.String(length=32), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("measurement", sa.JSON(), nullable=True),
        sa.Column("repeats", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["study_id"], ["studies.id"], name="fk_trials_study_id_studies", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "number", name="pk_trials"),
    )
    op.create_table(
        "trial_logs",
        sa.Column("study_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["study_id", "number"], ["trials.study_id", "trials.number"],
            name="fk_trial_logs_study_id_number_trials", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study_id", "number", name="pk_trial_logs"),
    )


def downgrade() -> None:
    op.drop_table("trial_logs")
    op.drop_table("trials")
    op.drop_table("events")
    op.drop_table("device_leases")
    op.drop_table("studies")
    op.drop_table("settings")
    op.drop_table("model_profiles")
    op.drop_table("hosts")
    op.drop_table("hardware_profiles")
    op.drop_table("best_configs")
