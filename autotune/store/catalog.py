"""What outlives studies: best configurations, and profiles of models and hardware."""

from sqlalchemy import func, select

from autotune.domain.catalog import ModelSummary
from autotune.domain.errors import NotFoundError
from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig
from autotune.store.base import Repository
from autotune.store.tables import best_configs, hardware_profiles, model_profiles, studies
from engine.profile import HardwareProfile, ModelProfile

_RECENT = 50
"""Winners of one model that are looked at to start from."""


class BestRepository(Repository):
    """Winners of studies. All are kept; the fastest of each model, training set-up and hardware is the stored best."""

    def put(self, best: BestConfig) -> None:
        """Keep a study's winner, in place of what that study had before."""
        self._upsert(best_configs, {
            "study_id": best.study_id, "model_name": best.model_name, "model_fingerprint": best.model_fingerprint,
            "training_fingerprint": best.training_fingerprint, "hardware_fingerprint": best.hardware_fingerprint,
            "tokens_per_second": best.tokens_per_second, "best": best, "created_at": best.created_at})

    def get(self, study_id: str) -> BestConfig:
        """A study's stored winner, also after the study was deleted.

        Raises:
            NotFoundError: it has none.
        """
        found = self._connection.execute(
            select(best_configs.c.best).where(best_configs.c.study_id == study_id)).scalar_one_or_none()
        if not isinstance(found, BestConfig):
            raise NotFoundError(f"no best configuration that can be read is stored for study {study_id}")
        return found

    def for_model(self, name: str) -> tuple[BestConfig, ...]:
        """The fastest per model, training set-up and hardware fingerprint; the latest first. Empty where unknown.

        What this release cannot read is left out.
        """
        rank = func.row_number().over(
            partition_by=(best_configs.c.model_fingerprint, best_configs.c.training_fingerprint,
                          best_configs.c.hardware_fingerprint),
            order_by=(best_configs.c.tokens_per_second.desc(), best_configs.c.created_at.desc())).label("rank")
        ranked = select(best_configs, rank).where(best_configs.c.model_name == name).subquery()
        rows = self._connection.execute(
            select(ranked.c.best).where(ranked.c.rank == 1).order_by(ranked.c.created_at.desc(), ranked.c.study_id))
        return tuple(found for found in rows.scalars() if isinstance(found, BestConfig))

    def of_fingerprint(self, model_fingerprint: str) -> tuple[BestConfig, ...]:
        """All winners of studies of a model, whatever it was called; the latest first. Unreadable ones are left out."""
        rows = self._connection.execute(
            select(best_configs.c.best).where(best_configs.c.model_fingerprint == model_fingerprint)
            .order_by(best_configs.c.created_at.desc(), best_configs.c.study_id).limit(_RECENT))
        return tuple(found for found in rows.scalars() if isinstance(found, BestConfig))

    def models(self) -> tuple[ModelSummary, ...]:
        """Every model that was submitted or has a stored best configuration, by name."""
        submitted = {row.name: row for row in self._connection.execute(
            select(studies.c.name, func.count().label("studies"), func.max(studies.c.created_at).label("last_at"),
                   func.max(studies.c.sequence).label("last"))
            .group_by(studies.c.name))}
        requests = {row.name: row.request for row in self._connection.execute(
            select(studies.c.name, studies.c.request)
            .where(studies.c.sequence.in_([row.last for row in submitted.values()])))}
        names = set(submitted) | set(self._connection.execute(select(best_configs.c.model_name).distinct()).scalars())
        summaries = []
        for name in sorted(names):
            row, stored = submitted.get(name), self.for_model(name)
            known = [best.request for best in stored]
            request = next((each for each in [requests.get(name), *known] if isinstance(each, StudyRequest)), None)
            if request is None:
                continue  # nothing of it can be read
            summaries.append(ModelSummary(
                name=name, kind=request.model.kind, studies=0 if row is None else row.studies, best_configs=len(stored),
                best_tokens_per_second=max((best.tokens_per_second for best in stored), default=None),
                last_study_at=None if row is None else row.last_at))
        return tuple(summaries)


class ProfileRepository(Repository):
    """Results of probes and calibrations, by the key under which they can be used again.

    What this release cannot read counts as not there: it is measured again.
    """

    def model(self, key: str) -> ModelProfile | None:
        found = self._connection.execute(
            select(model_profiles.c.profile).where(model_profiles.c.key == key)).scalar_one_or_none()
        return found if isinstance(found, ModelProfile) else None

    def put_model(self, profile: ModelProfile, *, key: str | None = None) -> None:
        """Keep a probe's result under `key`, which defaults to its fingerprint."""
        self._upsert(model_profiles, {"key": key or profile.fingerprint, "fingerprint": profile.fingerprint,
                                      "profile": profile, "updated_at": self._clock()})

    def hardware(self, key: str) -> HardwareProfile | None:
        found = self._connection.execute(
            select(hardware_profiles.c.profile).where(hardware_profiles.c.key == key)).scalar_one_or_none()
        return found if isinstance(found, HardwareProfile) else None

    def put_hardware(self, profile: HardwareProfile, *, key: str | None = None) -> None:
        """Keep a calibration's result under `key`, which defaults to its fingerprint."""
        self._upsert(hardware_profiles, {"key": key or profile.fingerprint, "fingerprint": profile.fingerprint,
                                         "profile": profile, "updated_at": self._clock()})

    def list_hardware(self) -> tuple[HardwareProfile, ...]:
        """All calibrations, the latest first."""
        rows = self._connection.execute(select(hardware_profiles.c.profile).order_by(
            hardware_profiles.c.updated_at.desc(), hardware_profiles.c.key)).scalars()
        return tuple(found for found in rows if isinstance(found, HardwareProfile))
