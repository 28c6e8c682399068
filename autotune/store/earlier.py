"""What earlier studies measured, for the next one of their kind."""

from itertools import islice
from typing import Any

from sqlalchemy import Row, Table, and_, exists, select

from autotune.domain.earlier import EarlierRecord, EarlierStudy, Relation
from autotune.domain.request import StudyRequest
from autotune.domain.study import StudyState
from autotune.store.base import Repository
from autotune.store.tables import Unreadable, hardware_profiles, model_profiles, studies, trials
from autotune.store.trials import read_trial
from engine.profile import HardwareProfile, ModelProfile
from engine.report import Outcome

_STUDIES = 3
_TRIALS = 16
"""Of each, the first: they are apart from each other, while later ones are all near the winner."""
_RECENT = 30
"""Studies of each relation that are looked at."""

_TELLING = and_(trials.c.outcome.in_((Outcome.OK, Outcome.PRUNED)), trials.c.measurement.is_not(None),
                trials.c.prediction.is_not(None))


class EarlierRepository(Repository):
    """Reads only."""

    def of(self, model: ModelProfile, hardware: HardwareProfile, *, besides: str) -> tuple[EarlierRecord, ...]:
        """Studies that have ended and whose measurements tell something of this model here: the same model on this
        hardware, then on other hardware, then models of the same repeated block on this hardware; the latest first.

        What this release cannot read is left out.

        Args:
            besides: a study that does not count.
        """
        found: list[tuple[Relation, Row[Any]]] = []
        for row in self._latest(studies.c.model_fingerprint == model.fingerprint, besides):
            same = row.hardware_fingerprint == hardware.fingerprint
            found.append((Relation.HERE if same else Relation.ELSEWHERE, row))
        if model.block_class is not None:
            others = self._latest(and_(studies.c.hardware_fingerprint == hardware.fingerprint,
                                       studies.c.model_fingerprint != model.fingerprint), besides)
            family = self._of_block({row.model_fingerprint for row in others}, model.block_class)
            found += [(Relation.FAMILY, row) for row in others if row.model_fingerprint in family]
        order = list(Relation)
        found.sort(key=lambda pair: order.index(pair[0]))
        records = (self._record(model, hardware, relation, row) for relation, row in found)
        return tuple(islice((record for record in records if record is not None), _STUDIES))

    def _latest(self, which: Any, besides: str) -> list[Any]:
        final = [state for state in StudyState if state.is_final]
        return list(self._connection.execute(
            select(studies.c.id, studies.c.request, studies.c.devices, studies.c.model_fingerprint,
                   studies.c.hardware_fingerprint)
            .where(which, studies.c.id != besides, studies.c.state.in_(final),
                   exists().where(trials.c.study_id == studies.c.id, _TELLING))
            .order_by(studies.c.sequence.desc()).limit(_RECENT)).all())

    def _of_block(self, fingerprints: set[str], block_class: str) -> set[str]:
        """Those of the fingerprints whose models repeat a block of this class."""
        rows = self._connection.execute(select(model_profiles.c.fingerprint, model_profiles.c.profile).where(
            model_profiles.c.fingerprint.in_(fingerprints)))
        return {row.fingerprint for row in rows
                if isinstance(row.profile, ModelProfile) and row.profile.block_class == block_class}

    def _record(self, model: ModelProfile, hardware: HardwareProfile, relation: Relation,
                row: Row[Any]) -> EarlierRecord | None:
        """None where what its predictions were made of is not there any more."""
        of = model if relation is not Relation.FAMILY else self._profile(model_profiles, row.model_fingerprint)
        on = hardware if relation is not Relation.ELSEWHERE else self._profile(
            hardware_profiles, row.hardware_fingerprint)
        if not (isinstance(row.request, StudyRequest) and isinstance(of, ModelProfile)
                and isinstance(on, HardwareProfile)):
            return None
        where = f"{row.devices} x {on.device_name}" if relation is Relation.ELSEWHERE else ""
        told = self._connection.execute(select(trials).where(trials.c.study_id == row.id, _TELLING)
                                        .order_by(trials.c.number).limit(_TRIALS))
        study = EarlierStudy(study_id=row.id, relation=relation, hardware=where,
                             trials=tuple(read_trial(each) for each in told if _is_readable(each)))
        return EarlierRecord(study=study, model=of, hardware=on, optimizer=row.request.training.optimizer)

    def _profile(self, table: Table, fingerprint: str) -> Any:
        """The latest that is kept."""
        return self._connection.execute(select(table.c.profile).where(table.c.fingerprint == fingerprint)
                                        .order_by(table.c.updated_at.desc()).limit(1)).scalar_one_or_none()


def _is_readable(row: Row[Any]) -> bool:
    return not any(isinstance(value, Unreadable) for value in row._mapping.values())
