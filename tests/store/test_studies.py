"""Submitting, listing, cancelling, deleting, claiming and fencing studies."""

from collections.abc import Callable

import pytest
from sqlalchemy import text

from autotune.domain.errors import ConflictError, InvalidRequestError, LeaseLostError, NotFoundError, UnreadableError
from autotune.domain.study import EventKind, PlanSummary, Progress, Study, StudyPhase, StudyState, TrialRole, TrialState
from autotune.store import Database, Transaction
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import (
    FakeClock,
    sample_best,
    sample_failure,
    sample_measurement,
    sample_prediction,
    sample_report,
    sample_request,
)
from tests.support.studies import claimed, started


def add(database: Database, name: str = "gpt-tiny", *, devices: int = 1, device: str = "cpu") -> Study:
    with database.begin() as tx:
        return tx.studies.add(sample_request(name, hardware={"device": device, "devices": devices}))


def claim(database: Database, owner: str = "owner", *, max_devices: int = 1, **limits: object) -> Study | None:
    with database.begin() as tx:
        return tx.studies.claim(owner, lease_seconds=10, max_devices=max_devices, **limits)  # type: ignore[arg-type]


def get(database: Database, study: Study) -> Study:
    with database.read() as tx:
        return tx.studies.get(study.id)


def test_a_submitted_study_waits_and_comes_back_whole(database: Database, clock: FakeClock) -> None:
    request = sample_request(search={"baseline": {"zero_stage": 1}, "space": {"precision": ["fp32", "bf16"]}})
    with database.begin() as tx:
        study = tx.studies.add(request)
    assert get(database, study) == study
    assert study.request == request
    assert study.state is StudyState.QUEUED
    assert study.created_at == clock.now
    assert len(study.id) == 32


def test_the_same_key_and_request_submit_once(database: Database) -> None:
    with database.begin() as tx:
        first = tx.studies.add(sample_request(), idempotency_key="key")
    with database.begin() as tx:
        again = tx.studies.add(sample_request(), idempotency_key="key")
        other = tx.studies.add(sample_request(), idempotency_key="key 2")
        assert again == first
        assert other.id != first.id
        assert len(tx.studies.page().items) == 2
        assert len(tx.events.after(0)) == 2


def test_pages_stay_disjoint_and_complete_while_studies_arrive(database: Database) -> None:
    old = [add(database, f"study-{number}") for number in range(7)]
    with database.read() as tx:
        first = tx.studies.page(limit=3)
    add(database, "new")
    with database.read() as tx:
        second = tx.studies.page(limit=3, cursor=first.next_cursor)
        third = tx.studies.page(limit=3, cursor=second.next_cursor)
    assert [study.id for page in (first, second, third) for study in page.items] == [study.id for study in old[::-1]]
    assert third.next_cursor is None


def test_a_page_that_ends_exactly_has_no_next(database: Database) -> None:
    for number in range(2):
        add(database, f"study-{number}")
    with database.read() as tx:
        assert tx.studies.page(limit=2).next_cursor is None


def test_lists_filter_by_state_and_model(database: Database) -> None:
    first, second = add(database, "a"), add(database, "b")
    with database.begin() as tx:
        tx.studies.request_cancel(first.id)
        assert [study.id for study in tx.studies.page(state=StudyState.CANCELLED).items] == [first.id]
        assert [study.id for study in tx.studies.page(model="b").items] == [second.id]
        assert tx.studies.page(model="a", state=StudyState.QUEUED).items == ()
        assert tx.studies.count()[StudyState.CANCELLED] == 1


@pytest.mark.parametrize("cursor", ["", "x", "djE6", "djE6LTU", "ÿ", "djI6NQ", "a" * 300])
def test_malformed_cursors_are_the_callers_error(database: Database, cursor: str) -> None:
    with database.read() as tx, pytest.raises(InvalidRequestError) as caught:
        tx.studies.page(cursor=cursor)
    assert caught.value.errors[0].field == "cursor"


@pytest.mark.parametrize("limit", [0, -1, 501])
def test_page_sizes_have_bounds(database: Database, limit: int) -> None:
    with database.read() as tx, pytest.raises(InvalidRequestError, match="limit"):
        tx.studies.page(limit=limit)


def test_unknown_studies_are_not_found(database: Database) -> None:
    calls: list[Callable[[Transaction], object]] = [
        lambda tx: tx.studies.get("nope"), lambda tx: tx.studies.request_cancel("nope"),
        lambda tx: tx.studies.delete("nope"), lambda tx: tx.trials.page("nope"), lambda tx: tx.trials.get("nope", 0),
        lambda tx: tx.trials.log("nope", 0), lambda tx: tx.best.get("nope")]
    for call in calls:
        with database.begin() as tx, pytest.raises(NotFoundError, match="nope"):
            call(tx)


def test_a_waiting_study_is_cancelled_at_once(database: Database) -> None:
    study = add(database)
    with database.begin() as tx:
        cancelled = tx.studies.request_cancel(study.id)
    assert cancelled.state is StudyState.CANCELLED
    assert cancelled.finished_at is not None
    assert claim(database) is None
    with database.begin() as tx, pytest.raises(ConflictError, match="has ended"):
        tx.studies.request_cancel(study.id)


def test_a_running_study_is_asked_to_stop(database: Database) -> None:
    study = claimed(database)
    with database.begin() as tx:
        asked = tx.studies.request_cancel(study.id)
        assert (asked.state, asked.cancel_requested) == (StudyState.RUNNING, True)
        assert tx.studies.renew(study.id, 1, lease_seconds=10).cancel_requested
        assert tx.studies.finish(study.id, 1, StudyState.CANCELLED).state is StudyState.CANCELLED


def test_a_running_study_without_a_scheduler_is_cancelled_at_once(database: Database, clock: FakeClock) -> None:
    study = claimed(database)
    clock.advance(11)
    with database.begin() as tx:
        assert tx.studies.request_cancel(study.id).state is StudyState.CANCELLED
    with database.begin() as tx, pytest.raises(LeaseLostError):
        tx.studies.set_progress(study.id, 1, Progress(trials_finished=1))


def test_no_trial_runs_on_in_a_study_that_has_ended(database: Database, clock: FakeClock) -> None:
    left, failed = claimed(database, name="left"), claimed(database, name="failed")
    for study in (left, failed):
        started(database, study)
    with database.begin() as tx:
        tx.studies.finish(failed.id, 1, StudyState.FAILED, error="no workers could be started")
    clock.advance(11)
    with database.begin() as tx:
        tx.studies.request_cancel(left.id)
    with database.read() as tx:
        for study in (left, failed):
            (trial,) = tx.trials.list(study.id)
            assert (trial.state, trial.outcome) == (TrialState.FINISHED, Outcome.CANCELLED)
            assert trial.finished_at is not None
            assert [event.kind for event in tx.events.after(0, study_id=study.id)][-2:] == [
                EventKind.TRIAL_FINISHED, EventKind.STUDY_STATE]


def spoil(database: Database, study: Study) -> None:
    """Store a request that this release does not know, as another one may have."""
    with database.begin() as tx:
        tx.studies._connection.execute(
            text("UPDATE studies SET request = :request WHERE id = :id"),
            {"id": study.id, "request": '{"name": "old", "of_another_release": 1}'})


def test_a_study_that_cannot_be_read_fails_and_holds_up_nobody(database: Database) -> None:
    with database.begin() as tx:
        spoilt, next_one = tx.studies.add(sample_request("spoilt")), tx.studies.add(sample_request("next"))
    spoil(database, spoilt)
    assert claim(database) is None, "it is failed in this turn"
    claimed_one = claim(database)
    assert claimed_one is not None
    assert claimed_one.id == next_one.id
    with database.read() as tx:
        assert [study.id for study in tx.studies.page().items] == [next_one.id]
        assert tx.studies.count()[StudyState.FAILED] == 1
        (event,) = (event for event in tx.events.after(0, study_id=spoilt.id) if event.data["state"] == "failed")
        assert "its stored request is not valid" in event.data["error"]
        with pytest.raises(UnreadableError, match="request is not valid"):
            tx.studies.get(spoilt.id)
        assert [model.name for model in tx.best.models()] == ["next"]
    with database.begin() as tx:
        tx.studies.delete(spoilt.id)


def test_an_interrupted_study_that_cannot_be_read_fails_with_its_trial(database: Database, clock: FakeClock) -> None:
    study = claimed(database)
    started(database, study)
    spoil(database, study)
    clock.advance(11)
    assert claim(database) is None
    with database.read() as tx:
        assert tx.studies.count()[StudyState.FAILED] == 1
        assert [trial.outcome for trial in tx.trials.list(study.id)] == [Outcome.CANCELLED]


def test_only_ended_studies_are_deleted_and_their_best_stays(database: Database) -> None:
    study = claimed(database)
    trial = started(database, study)
    with database.begin() as tx, pytest.raises(ConflictError, match="cancel it before"):
        tx.studies.delete(study.id)
    with database.begin() as tx:
        tx.trials.finish(study.id, 1, trial.number, sample_report(), log="text")
        tx.best.put(sample_best(study.id))
        tx.studies.finish(study.id, 1, StudyState.SUCCEEDED)
        tx.studies.delete(study.id)
    with database.read() as tx:
        assert tx.studies.page().items == ()
        assert tx.trials.list(study.id) == ()
        assert tx.events.after(0) == ()
        assert tx.best.get(study.id) == sample_best(study.id)
        assert tx.best.models()[0].studies == 0
        with pytest.raises(NotFoundError):
            tx.trials.log(study.id, 0)


def test_studies_are_claimed_in_the_order_of_submission(database: Database, clock: FakeClock) -> None:
    waiting = [add(database, f"study-{number}") for number in range(3)]
    claims = [claim(database) for _ in range(4)]
    assert [study and study.id for study in claims] == [*(study.id for study in waiting), None]
    first = claims[0]
    assert first is not None
    assert (first.state, first.lease_epoch, first.started_at) == (StudyState.RUNNING, 1, clock.now)


def test_nobody_overtakes_a_study_that_waits_for_devices(database: Database) -> None:
    large, small = add(database, "large", devices=4), add(database, "small", devices=1)
    assert claim(database, max_devices=3, total_devices=4) is None
    first = claim(database, max_devices=4, total_devices=4)
    assert first is not None
    assert first.id == large.id
    second = claim(database, max_devices=1, total_devices=4)
    assert second is not None
    assert second.id == small.id


def test_studies_that_a_host_can_never_run_are_left_to_others(database: Database) -> None:
    add(database, "too-large", devices=8)
    add(database, "other-type", device="cuda")
    mine = add(database, "mine")
    found = claim(database, max_devices=2, total_devices=2, device_type="cpu")
    assert found is not None
    assert found.id == mine.id
    assert claim(database, max_devices=2, total_devices=2, device_type="cpu") is None


def test_an_expired_lease_is_taken_over_and_the_old_owner_fenced_off(database: Database, clock: FakeClock) -> None:
    study = claimed(database, owner="first")
    trial = started(database, study)
    clock.advance(9)
    assert claim(database, "second") is None
    clock.advance(2)
    taken = claim(database, "second")
    assert taken is not None
    assert (taken.id, taken.lease_epoch, taken.state) == (study.id, 2, StudyState.RUNNING)
    assert taken.started_at == study.started_at
    late_writes: list[Callable[[Transaction], object]] = [
        lambda tx: tx.studies.renew(study.id, 1, lease_seconds=10),
        lambda tx: tx.studies.set_phase(study.id, 1, StudyPhase.SEARCHING),
        lambda tx: tx.studies.set_plan(study.id, 1, PlanSummary(space={}, points=0, feasible=0, rejections={})),
        lambda tx: tx.studies.set_progress(study.id, 1, Progress()),
        lambda tx: tx.studies.set_best(study.id, 1, sample_best(study.id)),
        lambda tx: tx.studies.set_fingerprints(study.id, 1, model="x"),
        lambda tx: tx.studies.finish(study.id, 1, StudyState.FAILED, error="late"),
        lambda tx: tx.trials.start(study.id, 1, role=TrialRole.BASELINE, config=TrainConfig(), prediction=None),
        lambda tx: tx.trials.finish(study.id, 1, 0, sample_report(), log=""),
        lambda tx: tx.trials.add_repeat(study.id, 1, 0, sample_measurement()),
        lambda tx: tx.trials.fail_repeat(study.id, 1, 0, sample_failure(Outcome.CRASHED, "late")),
        lambda tx: tx.trials.judge(study.id, 1, trial),
        lambda tx: tx.trials.discard_running(study.id, 1),
    ]
    before = get(database, study)
    for write in late_writes:
        with pytest.raises(LeaseLostError), database.begin() as tx:
            write(tx)
    assert get(database, study) == before
    with database.begin() as tx:
        tx.studies.expire_lease(study.id, 1)
    assert claim(database, "third") is None, "a lost lease cannot expire the new one"


def test_a_renewed_lease_does_not_expire(database: Database, clock: FakeClock) -> None:
    study = claimed(database)
    for _ in range(5):
        clock.advance(8)
        with database.begin() as tx:
            tx.studies.renew(study.id, 1, lease_seconds=10)
        assert claim(database, "second") is None
    with database.read() as tx:
        assert [(lease.study_id, lease.epoch, lease.owner) for lease in tx.studies.leases()] == [(study.id, 1, "owner")]


def test_a_lease_given_up_is_claimed_at_once(database: Database) -> None:
    study = claimed(database)
    with database.begin() as tx:
        tx.studies.expire_lease(study.id, 1)
    again = claim(database)
    assert again is not None
    assert (again.id, again.lease_epoch) == (study.id, 2)


def lose(database: Database, study: Study, epoch: int) -> None:
    """As if the process with this lease had been killed, and that had been seen."""
    with database.begin() as tx:
        tx.studies.expire_lease(study.id, epoch)


def test_a_study_that_was_to_be_cancelled_when_its_scheduler_was_lost_is(database: Database) -> None:
    study = claimed(database)
    started(database, study)
    with database.begin() as tx:
        assert tx.studies.request_cancel(study.id).state is StudyState.RUNNING
    lose(database, study, 1)
    assert claim(database, "another owner") is None
    with database.begin() as tx:
        found = tx.studies.get(study.id)
        assert found.state is StudyState.CANCELLED
        assert found.finished_at is not None
        assert [trial.outcome for trial in tx.trials.list(study.id)] == [Outcome.CANCELLED]
        assert tx.events.after(0, study_id=study.id)[-1].data == {"state": "cancelled"}


def test_a_study_that_loses_its_scheduler_again_and_again_fails(database: Database) -> None:
    study = claimed(database, owner="owner 1")
    behind = add(database, "behind")
    started(database, study)
    for epoch in (1, 2):
        lose(database, study, epoch)
        taken = claim(database, f"owner {epoch + 1}")
        assert taken is not None
        assert (taken.id, taken.lease_epoch) == (study.id, epoch + 1)
    lose(database, study, 3)
    assert claim(database, "owner 4") is None, "it is failed in this turn"
    ended = get(database, study)
    assert (ended.state, ended.finished_at is not None) == (StudyState.FAILED, True)
    assert ended.error is not None
    assert ended.error.startswith("study gpt-tiny: its scheduler process was lost 3 times in a row")
    with database.read() as tx:
        assert tx.trials.get(study.id, 0).outcome is Outcome.CANCELLED
        states = [event.data for event in tx.events.after(0, study_id=study.id) if event.kind is EventKind.STUDY_STATE]
    assert [data["state"] for data in states] == ["queued", "running", "running", "running", "failed"]
    assert [data.get("taken_over") for data in states] == [None, None, 1, 2, None]
    next_one = claim(database, "owner 4")
    assert next_one is not None
    assert next_one.id == behind.id


def test_a_finished_trial_is_progress_after_which_losses_count_anew(database: Database) -> None:
    study = claimed(database, owner="owner 1")
    for epoch in range(1, 10):
        if epoch % 2 == 0:
            with database.begin() as tx:
                tx.trials.discard_running(study.id, epoch)
                trial = tx.trials.start(study.id, epoch, role=TrialRole.SUGGESTED, config=TrainConfig(),
                                        prediction=None)
                tx.trials.finish(study.id, epoch, trial.number, sample_report(), log="")
        lose(database, study, epoch)
        assert claim(database, f"owner {epoch + 1}") is not None


def test_a_scheduler_that_stops_in_good_order_is_not_lost(database: Database) -> None:
    study = claimed(database, owner="owner 1")
    for epoch in range(1, 6):
        with database.begin() as tx:
            tx.studies.give_back(study.id, epoch)
        assert claim(database, f"owner {epoch + 1}") is not None
    with database.begin() as tx:
        tx.studies.give_back(study.id, 5)
    assert claim(database, "late") is None, "a lost lease cannot be given back"


def test_the_holder_of_an_expired_lease_has_not_lost_itself(database: Database) -> None:
    study = claimed(database, owner="slept")
    for epoch in range(1, 6):
        lose(database, study, epoch)
        assert claim(database, "slept") is not None


def test_writes_under_a_lease_are_kept(database: Database, clock: FakeClock) -> None:
    study = claimed(database)
    plan = PlanSummary(space={"zero_stage": [0, 1]}, points=6, feasible=4, rejections={"memory": 2},
                       examples={"memory": TrainConfig()}, predictions=((TrainConfig(), sample_prediction()),))
    best = sample_best(study.id)
    with database.begin() as tx:
        tx.studies.set_phase(study.id, 1, StudyPhase.SEARCHING)
        tx.studies.set_plan(study.id, 1, plan)
        tx.studies.set_progress(study.id, 1, Progress(trials_finished=2, trials_total=5))
        tx.studies.set_best(study.id, 1, best)
        tx.studies.set_fingerprints(study.id, 1, model="m")
        tx.studies.set_fingerprints(study.id, 1, hardware="h")
    stored = get(database, study)
    assert (stored.phase, stored.plan, stored.best) == (StudyPhase.SEARCHING, plan, best)
    assert (stored.model_fingerprint, stored.hardware_fingerprint) == ("m", "h")
    assert stored.progress.trials_finished == 2
    with database.read() as tx:
        assert tx.studies.page().items[0] == stored.model_copy(update={"plan": None}), "lists leave plans out"
    clock.advance(5)
    with database.begin() as tx:
        tx.studies.finish(study.id, 1, StudyState.FAILED, error="boom", note="note")
    ended = get(database, study)
    assert (ended.state, ended.phase, ended.error, ended.note) == (StudyState.FAILED, None, "boom", "note")
    assert ended.finished_at == clock.now
    with database.begin() as tx, pytest.raises(LeaseLostError):
        tx.studies.finish(study.id, 1, StudyState.SUCCEEDED)


def test_state_changes_leave_events(database: Database) -> None:
    study = claimed(database)
    with database.begin() as tx:
        tx.studies.set_phase(study.id, 1, StudyPhase.PROBING)
        tx.studies.set_best(study.id, 1, sample_best(study.id))
        tx.studies.finish(study.id, 1, StudyState.SUCCEEDED, note="done")
    with database.read() as tx:
        events = tx.events.after(0, study_id=study.id)
    assert [(event.kind, event.data.get("state") or event.data.get("phase")) for event in events] == [
        (EventKind.STUDY_STATE, "queued"), (EventKind.STUDY_STATE, "running"), (EventKind.STUDY_PHASE, "probing"),
        (EventKind.BEST_CHANGED, None), (EventKind.STUDY_STATE, "succeeded")]
    assert events[3].data["trial_number"] == 3
    assert [event.id for event in events] == sorted({event.id for event in events})
