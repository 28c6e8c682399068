"""Measurements that cannot be trusted do not win, and the study says why."""

import math
import random

import pytest

from autotune.domain.study import Trial, TrialRole, TrialState
from autotune.scheduler.gates import (
    drifted,
    gated,
    implausible,
    improves_reference,
    judged_again,
    reference_configs,
    reference_trial,
    set_aside,
)
from autotune.search.plan import Plan
from engine.config import TrainConfig
from engine.report import Outcome, TrialReport
from tests.search.support import hardware_profile, model_profile, study_plan, study_request
from tests.support.samples import START, sample_measurement

FALLING = tuple(5 * math.exp(-0.05 * step) for step in range(12))
FP32 = TrainConfig()
BF16 = TrainConfig(precision="bf16")
FP16 = TrainConfig(precision="fp16")


def trial(number: int = 0, config: TrainConfig = FP32, *, outcome: Outcome = Outcome.OK,
          losses: tuple[float | None, ...] = FALLING) -> Trial:
    return Trial(study_id="s", number=number, role=TrialRole.BASELINE if number == 0 else TrialRole.SUGGESTED,
                 state=TrialState.FINISHED, config=config, outcome=outcome,
                 measurement=sample_measurement(losses=losses), started_at=START, finished_at=START)


def report(losses: tuple[float | None, ...], **changes: object) -> TrialReport:
    return TrialReport(outcome=Outcome.OK, measurement=sample_measurement(losses=losses, **changes))


def plan_of(**search: object) -> Plan:
    return study_plan(study_request(**search))


def test_the_reference_is_in_fp32_and_early() -> None:
    trials = [trial(0, BF16), trial(1, FP32, outcome=Outcome.OOM_DEVICE), trial(2, FP32), trial(3, FP32)]
    assert reference_trial(trials) is trials[2]
    assert reference_trial(trials[:2]) is trials[0]
    compute = TrainConfig(precision="bf16", optimizer_precision="compute")
    assert reference_trial([trial(0, compute)]) is None


@pytest.mark.parametrize(("config", "factor", "trusted"), [
    (FP32, 1.001, True), (FP32, 1.02, False), (BF16, 1.01, True), (BF16, 1.05, False), (FP16, 0.95, False)])
def test_losses_agree_as_well_as_the_precision_allows(config: TrainConfig, factor: float, trusted: bool) -> None:
    measurement = sample_measurement(losses=tuple(loss * factor for loss in FALLING))
    reason = drifted(measurement, config, trial())
    assert (reason is None) == trusted
    if reason:
        assert f"losses are not those of trial 0 (fp32), trained on the same samples: {5 * factor:.6g}" in reason


def test_training_that_stands_still_drifts_although_its_first_loss_agrees() -> None:
    assert drifted(sample_measurement(losses=(5.0,) * 12), BF16, trial()) is not None


def test_one_step_apart_is_no_drift() -> None:
    spiky = tuple(loss * (1.5 if step == 6 else 1) for step, loss in enumerate(FALLING))
    assert drifted(sample_measurement(losses=spiky), BF16, trial()) is None
    assert drifted(sample_measurement(losses=(FALLING[0] * 1.5, *FALLING[1:])), BF16, trial()) is not None


def test_skipped_steps_delay_the_losses() -> None:
    steep = tuple(5 * 0.8**step for step in range(10))
    delayed = (steep[0], steep[0], *steep)[:10]
    assert drifted(sample_measurement(losses=delayed, skipped_steps=2), FP16, trial(losses=steep)) is None
    assert drifted(sample_measurement(losses=delayed), FP16, trial(losses=steep)) is not None


def test_what_is_random_in_the_losses_is_allowed_for() -> None:
    generator = random.Random(0)

    def noisy() -> tuple[float, ...]:
        return tuple(loss + generator.gauss(0, 0.2) for loss in FALLING)

    assert all(drifted(sample_measurement(losses=noisy()), BF16, trial(losses=noisy())) is None for _ in range(50))


@pytest.mark.parametrize("steps", [7, 11, 12, 20])
@pytest.mark.parametrize(("every", "height"), [(2, 0.3), (2, 4.0), (3, 5.0)])
def test_a_trial_that_oscillates_is_not_excused_by_it(steps: int, every: int, height: float) -> None:
    smooth = tuple(4 - 0.1 * step / steps for step in range(steps))
    wild = tuple(loss + height * (step % every == every - 1) for step, loss in enumerate(smooth))
    assert drifted(sample_measurement(losses=wild), BF16, trial(losses=smooth)) is not None


def test_losses_that_are_missing_or_zero_are_no_reason() -> None:
    assert drifted(sample_measurement(losses=(None,) * 5), BF16, trial()) is None
    assert drifted(sample_measurement(losses=(0.0,) * 5), BF16, trial(losses=(0.0,) * 5)) is None


def test_no_rate_is_beyond_what_matrix_products_reach() -> None:
    plan = study_plan(study_request(), model=model_profile(flops_per_sample=1e9),
                      hardware=hardware_profile(matmul_flops_per_second={"fp32": 5e10, "bf16": 8e10}))
    assert implausible(sample_measurement(samples_per_second=2 * 50 * 1.1), FP32, plan) is None
    reason = implausible(sample_measurement(samples_per_second=2 * 50 * 3), FP32, plan)
    assert reason is not None
    assert reason.startswith("150 GFLOP/s per device would be 3 times the 50 GFLOP/s that fp32")
    assert implausible(sample_measurement(samples_per_second=1e9), FP16, plan) is None, "rate not known"


def test_outcomes() -> None:
    plan = study_plan(study_request(), model=model_profile(flops_per_sample=1e3))
    assert gated(report(FALLING), FP32, plan, []).outcome is Outcome.OK
    assert gated(report((9.0,) * 12), FP32, plan, []).outcome is Outcome.OK, "nothing to compare with"
    assert gated(report((9.0,) * 12), FP32, plan, [trial()]).outcome is Outcome.NUMERICS_DRIFT
    fast = report(FALLING, samples_per_second=1e12)
    assert gated(fast, FP32, plan, [trial()]).outcome is Outcome.IMPLAUSIBLE
    failed = TrialReport(outcome=Outcome.CRASHED, detail="boom")
    assert gated(failed, FP32, plan, [trial()]) is failed


def test_what_is_more_exact_than_the_reference_is_not_held_against_it() -> None:
    plan = study_plan(study_request(), model=model_profile(flops_per_sample=1e3))
    broken, right = tuple(loss + 0.3 for loss in FALLING), report(FALLING)
    assert gated(right, FP32, plan, [trial(0, BF16, losses=broken)]) is right
    assert gated(right, FP16, plan, [trial(0, BF16, losses=broken)]).outcome is Outcome.NUMERICS_DRIFT
    compute = TrainConfig(precision="bf16", optimizer_precision="compute")
    assert gated(right, BF16, plan, [trial(0, compute, losses=broken)]) is right


def test_a_better_reference_judges_earlier_trials_again() -> None:
    broken = tuple(loss + 0.3 for loss in FALLING)
    trials = [trial(0, BF16, losses=broken), trial(1, FP16, outcome=Outcome.NUMERICS_DRIFT),
              trial(2, BF16, outcome=Outcome.PRUNED, losses=broken), trial(3, FP16, losses=broken)]
    assert judged_again(trials[:2]) == []
    again = judged_again([*trials, trial(4, FP32)])
    assert [(each.number, each.outcome) for each in again] == [
        (0, Outcome.NUMERICS_DRIFT), (1, Outcome.OK), (3, Outcome.NUMERICS_DRIFT)]
    assert "not those of trial 4 (fp32)" in again[0].detail
    assert again[1].detail == ""


def test_a_baseline_that_is_not_in_fp32_gets_a_reference_that_is() -> None:
    assert reference_configs(plan_of()) == []
    assert reference_configs(plan_of(baseline={"optimizer_precision": "compute"})) == [], "fp32 all the same"
    assert reference_configs(plan_of(baseline={"precision": "fp16", "zero_stage": 2})) == [
        TrainConfig(micro_batch_size=16)]
    plan = plan_of(baseline={"precision": "bf16", "optimizer_precision": "compute", "zero_stage": 3,
                             "offload_param": True, "micro_batch_size": 2})
    fields = {"micro_batch_size": 2, "gradient_accumulation_steps": 8}
    assert reference_configs(plan) == [TrainConfig(**fields), TrainConfig(precision="bf16", **fields)]


def test_a_reference_that_does_not_fit_takes_a_smaller_micro_batch() -> None:
    def limited(memory_limit_bytes: int | None) -> Plan:
        return study_plan(study_request(baseline={"precision": "bf16", "micro_batch_size": 8},
                                        memory_limit_bytes=memory_limit_bytes))

    def needed(**changes: object) -> int:
        prediction = limited(None).predict_or_none(TrainConfig.model_validate(changes))
        assert prediction is not None
        return prediction.peak_device_bytes

    of_two = {"zero_stage": 3, "micro_batch_size": 2, "gradient_accumulation_steps": 8}
    of_four = {"zero_stage": 3, "micro_batch_size": 4, "gradient_accumulation_steps": 4}
    assert needed(**of_two) < needed(**of_four)
    (found,) = reference_configs(limited((needed(**of_two) + needed(**of_four)) // 2))
    assert found.micro_batch_size <= 2
    assert found.precision == "fp32"
    assert reference_configs(limited(1)) == []


def test_a_reference_is_tried_while_none_is_as_exact() -> None:
    assert improves_reference(FP32, [trial(0, BF16)])
    assert not improves_reference(BF16, [trial(0, FP16)])
    assert not improves_reference(FP32, [trial(0, BF16), trial(1, FP32)])
    assert improves_reference(FP32, [trial(0, FP32, outcome=Outcome.OOM_DEVICE)])


def test_the_note_names_the_choice_of_precision() -> None:
    compute = TrainConfig(precision="bf16", optimizer_precision="compute")
    assert set_aside([trial()]) is None
    assert set_aside([trial(), trial(1, compute, outcome=Outcome.NUMERICS_DRIFT), trial(2, FP16, outcome=(
        Outcome.NON_FINITE)), trial(4, compute, outcome=Outcome.NUMERICS_DRIFT)]) == (
        "not to be trusted, so left out: numerics_drift in precision bf16 with optimizer_precision compute: "
        "trials 1, 4; non_finite in precision fp16: trial 2")


def test_the_note_on_drift_names_what_differs_from_the_reference() -> None:
    """As a model with BatchNorm does, whose losses change with the micro-batch in any precision."""
    drift = Outcome.NUMERICS_DRIFT
    trials = [trial(0, TrainConfig(micro_batch_size=4)), trial(1, TrainConfig(micro_batch_size=8), outcome=drift),
              trial(2, TrainConfig(micro_batch_size=2, zero_stage=1), outcome=drift),
              trial(3, TrainConfig(micro_batch_size=2, precision="bf16"), outcome=drift)]
    note = set_aside(trials)
    assert note == (
        "not to be trusted, so left out: numerics_drift in another micro_batch_size than trial 0's 4: trials 1, 2; "
        "numerics_drift in precision bf16 and another micro_batch_size than trial 0's 4: trial 3; losses that change "
        "with the micro-batch depend on how samples are batched, as with BatchNorm or means over unmasked tokens")
    other = set_aside([trials[0], trial(1, TrainConfig(micro_batch_size=4, zero_stage=3, compile=True), outcome=drift)])
    assert other == "not to be trusted, so left out: numerics_drift in zero_stage 3, compile True: trial 1"
    measured = sample_measurement(losses=tuple(loss + 1 for loss in FALLING))
    reason = drifted(measured, TrainConfig(micro_batch_size=8), trials[0])
    assert reason is not None
    assert reason.endswith("; it differs in another micro_batch_size than trial 0's 4")
