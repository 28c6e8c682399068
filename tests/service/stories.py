"""Studies brought to a state through the store, as a scheduler would."""

from autotune.domain.request import StudyRequest
from autotune.domain.study import PlanSummary, StudyState, TrialRole
from autotune.store import Database
from engine.config import TrainConfig
from engine.report import Outcome, TrialReport
from tests.support.plans import cluster_plan, plan_request
from tests.support.samples import sample_best, sample_failure, sample_prediction, sample_report, sample_request


def queued(database: Database, request: StudyRequest | None = None) -> str:
    """A submitted study; returns its id."""
    with database.begin() as transaction:
        return transaction.studies.add(request or sample_request()).id


def running(database: Database, *reports: TrialReport) -> tuple[str, int]:
    """A study that a scheduler works on, with these trials finished; returns (id, epoch)."""
    study_id = queued(database)
    with database.begin() as transaction:
        study = transaction.studies.claim("scheduler-1", lease_seconds=600, max_devices=8)
    assert study is not None
    assert study.id == study_id
    for number, report in enumerate(reports):
        with database.begin() as transaction:
            transaction.trials.start(
                study_id, study.lease_epoch, role=TrialRole.SUGGESTED, prediction=sample_prediction(),
                config=TrainConfig.model_validate({"micro_batch_size": number + 1}))
        with database.begin() as transaction:
            transaction.trials.finish(study_id, study.lease_epoch, number, report, log=f"log of trial {number}\n")
    return study_id, study.lease_epoch


def succeeded(database: Database) -> str:
    """A study with a plan, one good and one out-of-memory trial, and a winner."""
    study_id, epoch = running(database, sample_report(), sample_failure(Outcome.OOM_DEVICE, "12 MiB over the limit"))
    config = TrainConfig.model_validate({"micro_batch_size": 8, "zero_stage": 3})
    best = sample_best(study_id, trial_number=0, config=config)
    with database.begin() as transaction:
        transaction.studies.set_plan(study_id, epoch, PlanSummary(
            space={"micro_batch_size": [1, 8]}, points=4, feasible=3, rejections={"does not fit": 1},
            examples={"does not fit": config}, predictions=((config, sample_prediction()),) * 3))
        transaction.studies.set_best(study_id, epoch, best)
        transaction.best.put(best)
        transaction.studies.finish(study_id, epoch, StudyState.SUCCEEDED, note="budget spent")
    return study_id


def planned(database: Database, degrees: str = "auto") -> str:
    """A study that ranked configurations for a described cluster."""
    study_id = queued(database, plan_request(degrees=degrees if degrees == "auto" else int(degrees)))
    found = cluster_plan(degrees)
    with database.begin() as transaction:
        study = transaction.studies.claim("scheduler-1", lease_seconds=600, max_devices=8)
        assert study is not None
        transaction.studies.set_plan(study_id, study.lease_epoch, found.summary)
        transaction.studies.finish(study_id, study.lease_epoch, StudyState.SUCCEEDED, note=found.note)
    return study_id


def failed(database: Database, *reports: TrialReport, error: str = "ValueError: bad arg") -> str:
    """A study that failed after these trials."""
    study_id, epoch = running(database, *reports)
    with database.begin() as transaction:
        transaction.studies.finish(study_id, epoch, StudyState.FAILED, error=error)
    return study_id
