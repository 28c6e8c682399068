"""Trials, repeats, logs and events."""

import threading

import pytest

from autotune.domain.errors import NotFoundError
from autotune.domain.study import EventKind, TrialRole, TrialState
from autotune.store import Database
from autotune.store.trials import MAX_LOG_CHARACTERS
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import (
    FakeClock,
    sample_failure,
    sample_measurement,
    sample_prediction,
    sample_report,
    sample_request,
)
from tests.support.studies import claimed, started


def test_a_trial_is_kept_whole(database: Database, clock: FakeClock) -> None:
    study = claimed(database)
    config = TrainConfig(zero_stage=2, micro_batch_size=4, precision="bf16")
    with database.begin() as tx:
        trial = tx.trials.start(study.id, 1, role=TrialRole.BASELINE, config=config, prediction=sample_prediction())
    assert (trial.number, trial.state, trial.outcome) == (0, TrialState.RUNNING, None)
    clock.advance(3)
    report = sample_report(0.25)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, report, log="hello\n")
    with database.read() as tx:
        stored = tx.trials.get(study.id, 0)
        assert tx.trials.list(study.id) == (stored,)
        assert tx.trials.log(study.id, 0) == "hello\n"
    assert (stored.config, stored.prediction, stored.measurement) == (config, sample_prediction(), report.measurement)
    assert (stored.role, stored.state, stored.outcome) == (TrialRole.BASELINE, TrialState.FINISHED, Outcome.OK)
    assert stored.finished_at == clock.now
    assert (stored.finished_at - stored.started_at).total_seconds() == 3


def test_a_failed_trial_keeps_its_detail_and_what_was_measured(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    report = sample_failure(Outcome.NON_FINITE, "loss is nan at step 3").model_copy(
        update={"measurement": sample_measurement(losses=(1.0, None))})
    with database.begin() as tx:
        trial = tx.trials.finish(study.id, 1, 0, report, log="")
    assert (trial.outcome, trial.detail) == (Outcome.NON_FINITE, "loss is nan at step 3")
    assert trial.measurement is not None
    assert trial.measurement.losses == (1.0, None)


def test_a_trial_finishes_once(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_report(), log="")
    with pytest.raises(NotFoundError, match="no running trial 0"), database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_failure(Outcome.CRASHED, "late"), log="")


def test_repeats_are_added_in_order_with_their_logs(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_report(0.1), log="first\n")
        tx.trials.add_repeat(study.id, 1, 0, sample_measurement(0.2), log="second\n")
        tx.trials.add_repeat(study.id, 1, 0, sample_measurement(0.3))
    with database.read() as tx:
        trial = tx.trials.get(study.id, 0)
        assert tx.trials.log(study.id, 0) == "first\nsecond\n"
    assert [measurement.step_seconds[1] for measurement in trial.measurements] == [0.1, 0.2, 0.3]


def test_a_configuration_that_fails_when_repeated_has_failed(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_report(0.1), log="")
        trial = tx.trials.fail_repeat(study.id, 1, 0, sample_failure(Outcome.OOM_DEVICE, "too much"))
    assert (trial.outcome, trial.detail) == (Outcome.OOM_DEVICE, "when measured again: too much")
    assert trial.measurement is not None, "what was measured stays on record"


def test_a_finished_trial_can_be_judged_again(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        trial = tx.trials.finish(study.id, 1, 0, sample_report(0.1), log="")
        judged = trial.model_copy(update={"outcome": Outcome.NUMERICS_DRIFT, "detail": "not the same losses"})
        assert tx.trials.judge(study.id, 1, judged) == judged
    running = started(database, study, micro_batch_size=2)
    with database.read() as tx:
        assert tx.trials.get(study.id, 0) == judged
    with pytest.raises(NotFoundError, match="no finished trial 1"), database.begin() as tx:
        tx.trials.judge(study.id, 1, running)


def test_the_trial_under_way_is_run_again_under_its_number(database: Database) -> None:
    study = claimed(database)
    for number in range(3):
        assert started(database, study, micro_batch_size=number + 1).number == number
        if number < 2:
            with database.begin() as tx:
                tx.trials.finish(study.id, 1, number, sample_report(), log="")
    with database.begin() as tx:
        assert tx.trials.discard_running(study.id, 1) == 1
        assert tx.trials.discard_running(study.id, 1) == 0
    assert started(database, study).number == 2


def test_trial_pages_follow_numbers(database: Database) -> None:
    study = claimed(database)
    for number in range(5):
        started(database, study, micro_batch_size=number + 1)
    with database.read() as tx:
        first = tx.trials.page(study.id, limit=2)
    started(database, study, micro_batch_size=9)
    with database.read() as tx:
        second = tx.trials.page(study.id, cursor=first.next_cursor, limit=2)
        third = tx.trials.page(study.id, cursor=second.next_cursor, limit=2)
    assert [[trial.number for trial in page.items] for page in (first, second, third)] == [[0, 1], [2, 3], [4, 5]]
    assert third.next_cursor is None


def test_logs_are_bounded_and_keep_their_end(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_report(), log="x" * MAX_LOG_CHARACTERS + "the end")
    with database.read() as tx:
        log = tx.trials.log(study.id, 0)
    assert len(log) == MAX_LOG_CHARACTERS
    assert log.endswith("xthe end")


def test_a_missing_trial_is_told_from_a_missing_study(database: Database) -> None:
    study = claimed(database)
    with database.read() as tx:
        with pytest.raises(NotFoundError, match="no trial 7"):
            tx.trials.get(study.id, 7)
        assert tx.trials.page(study.id).items == ()


def test_progress_messages_are_dropped_when_the_trial_ends(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        tx.events.append(study.id, EventKind.TRIAL_PROGRESS, {"number": 0, "step": 1})
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, 0, sample_report(), log="")
    with database.read() as tx:
        events = tx.events.after(0, study_id=study.id)
    assert [event.kind for event in events] == [
        EventKind.STUDY_STATE, EventKind.STUDY_STATE, EventKind.TRIAL_STARTED, EventKind.TRIAL_FINISHED]
    assert events[-1].data["tokens_per_second"] == pytest.approx(1280)


def test_event_readers_resume_where_they_stopped(database: Database) -> None:
    first, second = claimed(database, name="first"), claimed(database, name="second")
    with database.read() as tx:
        everything = tx.events.after(0)
        assert tx.events.after(everything[1].id) == everything[2:]
        assert tx.events.after(0, study_id=second.id) == everything[2:]
        assert tx.events.after(0, limit=1) == everything[:1]
        assert tx.events.last_id(first.id) == everything[1].id
        assert tx.events.last_id() == everything[-1].id
        assert tx.events.last_id("unknown") == 0


def test_a_reader_never_misses_an_event_that_becomes_visible_late(database: Database) -> None:
    """Writers commit in another order than they began; a reader that remembers the last id still sees every event."""
    study = claimed(database)
    writers, appended = 4, 8  # few enough for a disk on which a commit takes 100 ms: SQLite queues nobody
    stop, seen = threading.Event(), []
    failures: list[BaseException] = []

    def write(writer: int) -> None:
        try:
            for number in range(appended):
                with database.begin() as tx:
                    tx.events.append(study.id, EventKind.TRIAL_PROGRESS, {"writer": writer, "number": number})
                    tx.settings.put(f"writer-{writer}", "busy")
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    def read() -> None:
        last = 0
        while True:
            ending = stop.is_set()
            with database.read() as tx:
                events = tx.events.after(last, study_id=study.id)
            if events:
                last = events[-1].id
                seen.extend(event for event in events if event.kind is EventKind.TRIAL_PROGRESS)
            elif ending:
                return

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(writers)]
    reader = threading.Thread(target=read)
    for thread in [reader, *threads]:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert failures == []
    assert sorted((event.data["writer"], event.data["number"]) for event in seen) == [
        (writer, number) for writer in range(writers) for number in range(appended)]


def test_event_ids_are_never_given_again(database: Database) -> None:
    with database.begin() as tx:
        study = tx.studies.add(sample_request())
    with database.begin() as tx:
        tx.studies.request_cancel(study.id)
    with database.begin() as tx:
        last = tx.events.last_id()
        tx.studies.delete(study.id)
        tx.studies.add(sample_request())
    with database.read() as tx:
        assert [event.id > last for event in tx.events.after(0)] == [True]
