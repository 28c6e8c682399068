"""Studies brought to a state through the store."""

from autotune.domain.study import Study, Trial, TrialRole
from autotune.store import Database
from engine.config import TrainConfig
from tests.support.samples import sample_prediction, sample_request


def claimed(database: Database, *, name: str = "gpt-tiny", owner: str = "owner", lease_seconds: float = 10.0) -> Study:
    """A study that `owner` has just claimed; its epoch is 1."""
    with database.begin() as tx:
        tx.studies.add(sample_request(name))
        study = tx.studies.claim(owner, lease_seconds=lease_seconds, max_devices=1)
    assert study is not None
    return study


def started(database: Database, study: Study, *, micro_batch_size: int = 1) -> Trial:
    """The study's next trial, running."""
    with database.begin() as tx:
        return tx.trials.start(study.id, study.lease_epoch, role=TrialRole.SUGGESTED,
                               config=TrainConfig(micro_batch_size=micro_batch_size), prediction=sample_prediction())
