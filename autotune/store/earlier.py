"""What earlier studies measured, for the next one of their kind."""

from typing import Any

from sqlalchemy import Row, and_, exists, select

from autotune.domain.earlier import EarlierStudy, Relation
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

    def of(self, model: ModelProfile, hardware: HardwareProfile, *, besides: str) -> tuple[EarlierStudy, ...]:
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
        return tuple(self._study(relation, row) for relation, row in found[:_STUDIES])

    def _latest(self, which: Any, besides: str) -> list[Any]:
        final = [state for state in StudyState if state.is_final]
        return list(self._connection.execute(
            select(studies.c.id, studies.c.devices, studies.c.model_fingerprint, studies.c.hardware_fingerprint)
            .where(which, studies.c.id != besides, studies.c.state.in_(final),
                   exists().where(trials.c.study_id == studies.c.id, _TELLING))
            .order_by(studies.c.sequence.desc()).limit(_RECENT)).all())

    def _of_block(self, fingerprints: set[str], block_class: str) -> set[str]:
        """Those of the fingerprints whose models repeat a block of this class."""
        rows = self._connection.execute(select(model_profiles.c.fingerprint, model_profiles.c.profile).where(
            model_profiles.c.fingerprint.in_(fingerprints)))
        return {row.fingerprint for row in rows
                if isinstance(row.profile, ModelProfile) and row.profile.block_class == block_class}

    def _study(self, relation: Relation, row: Row[Any]) -> EarlierStudy:
        hardware = ""
        if relation is Relation.ELSEWHERE:
            profiles = self._connection.execute(select(hardware_profiles.c.profile).where(
                hardware_profiles.c.fingerprint == row.hardware_fingerprint).limit(1)).scalars()
            names = [profile.device_name for profile in profiles if isinstance(profile, HardwareProfile)]
            hardware = " x ".join([str(row.devices), *names])
        told = self._connection.execute(select(trials).where(trials.c.study_id == row.id, _TELLING)
                                        .order_by(trials.c.number).limit(_TRIALS))
        return EarlierStudy(study_id=row.id, relation=relation, hardware=hardware,
                            trials=tuple(read_trial(each) for each in told if _is_readable(each)))


def _is_readable(row: Row[Any]) -> bool:
    return not any(isinstance(value, Unreadable) for value in row._mapping.values())
