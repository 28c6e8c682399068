"""Indices by which the studies of a model, or on some hardware, are found"""

from collections.abc import Sequence

from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_index("ix_best_configs_model_fingerprint", "best_configs", ["model_fingerprint"])
    op.create_index("ix_studies_model_fingerprint", "studies", ["model_fingerprint"])
    op.create_index("ix_studies_hardware_fingerprint", "studies", ["hardware_fingerprint"])


def downgrade() -> None:
    op.drop_index("ix_studies_hardware_fingerprint", "studies")
    op.drop_index("ix_studies_model_fingerprint", "studies")
    op.drop_index("ix_best_configs_model_fingerprint", "best_configs")
