"""Studies in 16 bit: what their losses are held against, and what they say of their winner."""

import pytest

from autotune.domain.study import StudyState, TrialRole
from autotune.store import Database
from engine.report import Outcome, TrialReport, TrialRequest
from tests.scheduler.test_study import run
from tests.support.launcher import FakeLauncher
from tests.support.samples import sample_report
from tests.support.scheduling import in_loop, trials_of


def _stage_1_in_bf16_goes_wrong(request: TrialRequest) -> TrialReport:
    """It is fastest, and its losses stand still."""
    in_fp32, stage = request.config.precision == "fp32", request.config.zero_stage
    losses = (4.0,) * 6 if not in_fp32 and stage == 1 else (4.0, 3.9, 3.8, 3.7, 3.6, 3.5)
    return sample_report(0.2 if in_fp32 else {0: 0.3, 1: 0.1}[stage], losses=losses)


BROKEN_BASELINE = {"sampler": "random", "baseline": {"precision": "bf16", "micro_batch_size": 2, "zero_stage": 1}}


@pytest.mark.parametrize(("space", "role", "winner"), [
    ({"precision": ["bf16", "fp32"], "zero_stage": [1]}, TrialRole.DEFAULT, "fp32"),
    ({"precision": ["bf16"], "zero_stage": [0, 1]}, TrialRole.REFERENCE, "bf16")])
def test_a_broken_baseline_in_16_bit_does_not_win_and_a_reference_only_within_the_space(
        database: Database, space: dict[str, list[object]], role: TrialRole, winner: str) -> None:
    @in_loop
    async def whole_study() -> None:
        study = await run(database, FakeLauncher(script=_stage_1_in_bf16_goes_wrong),
                          search={**BROKEN_BASELINE, "space": space})
        trials = trials_of(database, study)
        (reference,) = (trial for trial in trials if trial.config.precision == "fp32")
        assert (reference.role, reference.outcome) == (role, Outcome.OK)
        assert trials[0].outcome is Outcome.NUMERICS_DRIFT
        assert f"not those of trial {reference.number} (fp32)" in trials[0].detail
        assert study.best is not None
        assert study.best.config.precision == winner
        assert study.best.tie_with == ()

    whole_study()


@in_loop
async def test_a_reference_alone_is_no_answer(any_database: Database) -> None:
    study = await run(any_database, FakeLauncher(script=_stage_1_in_bf16_goes_wrong),
                      search={**BROKEN_BASELINE, "space": {"precision": ["bf16"], "micro_batch_size": [1, 2]}})
    assert (study.state, study.best) == (StudyState.FAILED, None), "what led before the reference came is taken back"
    assert study.error is not None
    assert "no trial gave a valid measurement (2 x numerics_drift); trial 0: losses are not those of" in study.error


@in_loop
async def test_where_the_baseline_is_in_fp32_no_trial_is_spent_on_a_reference(database: Database) -> None:
    study = await run(database, FakeLauncher(), search={
        "sampler": "random", "space": {"precision": ["fp32", "bf16"], "micro_batch_size": [1, 2]}})
    trials = trials_of(database, study)
    assert trials[0].config.precision == "fp32"
    assert len(trials) == 4
    assert TrialRole.REFERENCE not in {trial.role for trial in trials}


@in_loop
async def test_a_winner_without_fp32_masters_carries_a_warning(database: Database) -> None:
    def script(request: TrialRequest) -> TrialReport:
        return sample_report({"compute": 0.1, "fp32": 0.2}[request.config.optimizer_precision])

    study = await run(database, FakeLauncher(script=script), search={
        "sampler": "random", "space": {"precision": ["bf16"], "optimizer_precision": ["fp32", "compute"]}})
    assert study.best is not None
    assert study.best.config.optimizer_precision == "compute"
    assert study.note is not None
    assert "the winner keeps weights and optimizer states in bf16 alone" in study.note
    safe = await run(database, FakeLauncher(), search={"sampler": "random", "space": {"precision": ["bf16"]}})
    assert safe.note is not None
    assert "the winner keeps" not in safe.note


@in_loop
async def test_a_reference_is_no_reason_for_a_second_trial(database: Database) -> None:
    study = await run(database, FakeLauncher(), budget={"max_trials": 1}, search={
        "sampler": "random", "space": {"precision": ["bf16"], "micro_batch_size": [1, 2]}})
    assert [trial.config.precision for trial in trials_of(database, study)] == ["bf16"]
