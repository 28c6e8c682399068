"""Earlier studies, for the next one to begin with."""

from typing import Any

from sqlalchemy import text

from autotune.domain.earlier import Relation
from autotune.domain.study import StudyState
from autotune.store import Database
from engine.profile import ModelProfile
from engine.report import Outcome
from tests.support.samples import (
    FakeClock,
    sample_failure,
    sample_hardware_profile,
    sample_model_profile,
    sample_report,
    sample_request,
)
from tests.support.studies import claimed, started

MODEL, HARDWARE = sample_model_profile(), sample_hardware_profile()


def ended(database: Database, *outcomes: Outcome, model: str = "model-1", hardware: str = "hardware-1",
          state: StudyState = StudyState.SUCCEEDED) -> str:
    """A study with one trial for each outcome; its id."""
    study = claimed(database)
    for size, outcome in enumerate(outcomes, start=1):
        trial = started(database, study, micro_batch_size=size)
        report = sample_report() if outcome is Outcome.OK else sample_failure(outcome, "")
        with database.begin() as tx:
            tx.trials.finish(study.id, study.lease_epoch, trial.number, report, log="")
    with database.begin() as tx:
        tx.studies.set_fingerprints(study.id, study.lease_epoch, model=model, hardware=hardware)
        tx.studies.finish(study.id, study.lease_epoch, state)
    return study.id


def found(database: Database, *, besides: str = "", model: ModelProfile = MODEL) -> list[tuple[str, Relation, str]]:
    with database.read() as tx:
        records = tx.earlier.of(model, HARDWARE, besides=besides)
    return [(each.study.study_id, each.study.relation, each.study.hardware) for each in records]


def put(database: Database, *profiles: Any) -> None:
    with database.begin() as tx:
        for profile in profiles:
            (tx.profiles.put_model if isinstance(profile, ModelProfile) else tx.profiles.put_hardware)(profile)


def test_the_closest_come_first_and_then_the_latest(database: Database) -> None:
    put(database, MODEL, sample_model_profile("model-2"), sample_hardware_profile("hardware-2", device_name="A100"))
    family = ended(database, Outcome.OK, model="model-2")
    here = ended(database, Outcome.OK)
    elsewhere = ended(database, Outcome.OK, hardware="hardware-2")
    expected = [(here, Relation.HERE, ""), (elsewhere, Relation.ELSEWHERE, "1 x A100"), (family, Relation.FAMILY, "")]
    assert found(database) == expected
    later = ended(database, Outcome.OK)
    assert found(database) == [(later, Relation.HERE, ""), *expected[:2]], "no more than three"
    assert found(database, besides=later) == expected


def test_only_models_of_the_same_block_are_of_a_family(database: Database) -> None:
    other = sample_model_profile("model-2").model_copy(update={"block_class": "Encoder"})
    put(database, MODEL, other, sample_model_profile("model-3"))
    ended(database, Outcome.OK, model="model-2")
    ended(database, Outcome.OK, model="model-3", hardware="hardware-2")
    ended(database, Outcome.OK, model="model-4")
    assert found(database) == []
    assert found(database, model=MODEL.model_copy(update={"block_class": None})) == []


def test_trials_that_measured_are_told_by_number_up_to_a_limit(database: Database) -> None:
    ended(database, Outcome.OOM_DEVICE, *[Outcome.OK] * 20, Outcome.CRASHED, state=StudyState.CANCELLED)
    with database.read() as tx:
        (record,) = tx.earlier.of(MODEL, HARDWARE, besides="")
    assert [trial.number for trial in record.study.trials] == [*range(1, 17)]
    assert all(trial.measurement is not None and trial.prediction is not None for trial in record.study.trials)


def test_studies_without_measurements_do_not_take_the_place_of_others(database: Database) -> None:
    telling = ended(database, Outcome.OK)
    for _ in range(4):
        ended(database, Outcome.CRASHED, state=StudyState.FAILED)
    assert [study for study, _, _ in found(database)] == [telling]


def test_a_study_that_runs_is_not_looked_at(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, study.lease_epoch, 0, sample_report(), log="")
        tx.studies.set_fingerprints(study.id, study.lease_epoch, model="model-1", hardware="hardware-1")
    assert found(database) == []


def test_trials_that_cannot_be_read_are_left_out(database: Database) -> None:
    ended(database, Outcome.OK, Outcome.OK)
    with database.begin() as tx:
        tx.trials._connection.execute(text("UPDATE trials SET measurement = '{\"odd\": 1}' WHERE number = 0"))
    with database.read() as tx:
        (record,) = tx.earlier.of(MODEL, HARDWARE, besides="")
    assert [trial.number for trial in record.study.trials] == [1]


def test_what_predictions_are_made_of_comes_with_them(database: Database, clock: FakeClock) -> None:
    """This study's own profiles where they are the same, and else the latest that are kept."""
    cousin, a100 = sample_model_profile("model-2"), sample_hardware_profile("hardware-2", device_name="A100")
    put(database, cousin, sample_hardware_profile("hardware-2", device_name="old"))
    clock.advance(1)
    with database.begin() as tx:
        tx.profiles.put_hardware(a100, key="of another release")
    ended(database, Outcome.OK, model="model-2")
    ended(database, Outcome.OK, hardware="hardware-2")
    with database.read() as tx:
        elsewhere, family = tx.earlier.of(MODEL, HARDWARE, besides="")
    assert (elsewhere.model, elsewhere.hardware) == (MODEL, a100)
    assert (family.model, family.hardware) == (cousin, HARDWARE)
    assert family.optimizer == sample_request().training.optimizer


def test_a_study_whose_profile_is_gone_is_left_out_and_takes_no_place(database: Database) -> None:
    put(database, MODEL, sample_hardware_profile("hardware-2"))
    telling = ended(database, Outcome.OK, hardware="hardware-2")
    for _ in range(3):
        ended(database, Outcome.OK, hardware="hardware-gone")
    assert [study for study, _, _ in found(database)] == [telling]
