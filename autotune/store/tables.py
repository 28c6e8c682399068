"""The tables. Rows never leave this package: repositories return the domain's frozen values.

No relationships are declared, so nothing is ever loaded behind the reader's back.
"""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Float,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig, PlanSummary, Progress
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import Measurement

metadata = MetaData(naming_convention={
    "ix": "ix_%(column_0_N_label)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
})


class UtcDateTime(TypeDecorator[datetime]):
    """Aware datetimes, in UTC on both sides; SQLite keeps no time zone of its own."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "naive datetime"
        value = value.astimezone(UTC)
        return value.replace(tzinfo=None) if dialect.name == "sqlite" else value

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Unreadable(NamedTuple):
    """Read in place of a value whose JSON is none of this release. Repositories decide what that means."""

    reason: str


class JsonValue(TypeDecorator[Any]):
    """A frozen domain value as JSON, validated when it is read; what is not valid is read as `Unreadable`.

    Raising here would make every row that is read together with the bad one unreadable too.
    """

    impl = JSON(none_as_null=True)
    cache_ok = True

    def __init__(self, value_type: Any) -> None:
        super().__init__()
        self.value_type = value_type
        self._adapter: TypeAdapter[Any] = TypeAdapter(value_type)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else self._adapter.dump_python(value, mode="json")

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            return Unreadable(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")


STUDY_ID = String(32)
FINGERPRINT = String(64)

studies = Table(
    "studies", metadata,
    Column("sequence", Integer, primary_key=True, autoincrement=True),  # order of submission
    Column("id", STUDY_ID, nullable=False, unique=True),
    Column("idempotency_key", String(255), unique=True),
    Column("name", String(120), nullable=False, index=True),
    Column("device", String(16), nullable=False),
    Column("devices", Integer, nullable=False),
    Column("request", JsonValue(StudyRequest), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("phase", String(16)),
    Column("error", Text),
    Column("note", Text),
    Column("cancel_requested", Boolean, nullable=False),
    Column("progress", JsonValue(Progress), nullable=False),
    Column("plan", JsonValue(PlanSummary)),
    Column("best", JsonValue(BestConfig)),
    Column("model_fingerprint", FINGERPRINT, index=True),
    Column("hardware_fingerprint", FINGERPRINT, index=True),
    Column("lease_epoch", Integer, nullable=False),
    Column("lease_owner", String(255)),
    Column("lease_expires_at", UtcDateTime),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    sqlite_autoincrement=True,  # numbers of deleted studies are never given again
)

trials = Table(
    "trials", metadata,
    Column("study_id", STUDY_ID, ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("role", String(16), nullable=False),
    Column("state", String(16), nullable=False),
    Column("config", JsonValue(TrainConfig), nullable=False),
    Column("prediction", JsonValue(Prediction | None)),
    Column("outcome", String(32)),
    Column("detail", Text, nullable=False),
    Column("measurement", JsonValue(Measurement | None)),
    Column("repeats", JsonValue(tuple[Measurement, ...]), nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("finished_at", UtcDateTime),
)

trial_logs = Table(
    "trial_logs", metadata,
    Column("study_id", STUDY_ID, primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("text", Text, nullable=False),
    ForeignKeyConstraint(["study_id", "number"], ["trials.study_id", "trials.number"], ondelete="CASCADE"),
)

events = Table(
    "events", metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("study_id", STUDY_ID, ForeignKey("studies.id", ondelete="CASCADE"), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("data", JSON, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Index(None, "study_id", "id"),
    sqlite_autoincrement=True,  # ids grow for ever, also after deletions
)

best_configs = Table(
    "best_configs", metadata,
    # No foreign key: a best configuration outlives its study.
    Column("study_id", STUDY_ID, primary_key=True),
    Column("model_name", String(120), nullable=False, index=True),
    Column("model_fingerprint", FINGERPRINT, nullable=False, index=True),
    Column("training_fingerprint", FINGERPRINT, nullable=False),
    Column("hardware_fingerprint", FINGERPRINT, nullable=False),
    Column("tokens_per_second", Float, nullable=False),
    Column("best", JsonValue(BestConfig), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
)

model_profiles = Table(
    "model_profiles", metadata,
    Column("key", FINGERPRINT, primary_key=True),
    Column("fingerprint", FINGERPRINT, nullable=False),
    Column("profile", JsonValue(ModelProfile), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

hardware_profiles = Table(
    "hardware_profiles", metadata,
    Column("key", FINGERPRINT, primary_key=True),
    Column("fingerprint", FINGERPRINT, nullable=False),
    Column("profile", JsonValue(HardwareProfile), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

hosts = Table(
    "hosts", metadata,
    Column("host", String(255), primary_key=True),
    Column("device_type", String(16), primary_key=True),
    Column("device_name", Text, nullable=False),
    Column("device_count", Integer, nullable=False),
    Column("device_indices", JsonValue(tuple[int, ...]), nullable=False),
    Column("owner", String(255), nullable=False),
    Column("last_seen_at", UtcDateTime, nullable=False),
)

device_leases = Table(
    "device_leases", metadata,
    Column("host", String(255), primary_key=True),
    Column("device_type", String(16), primary_key=True),
    Column("device_index", Integer, primary_key=True, autoincrement=False),
    Column("study_id", STUDY_ID, ForeignKey("studies.id", ondelete="CASCADE"), nullable=False, index=True),
    Column("epoch", Integer, nullable=False),
    Column("expires_at", UtcDateTime, nullable=False),
)

settings = Table(
    "settings", metadata,
    Column("key", String(64), primary_key=True),
    Column("value", Text, nullable=False),
)
