"""The evidence beside a winner."""

import pytest

from autotune.domain.explanation import KnobEffect, held_bytes
from autotune.domain.study import BestConfig
from autotune.search.explain import explain
from engine.config import TrainConfig
from engine.report import Outcome, PhaseSeconds, StateBytes
from tests.search.support import (
    MIB,
    NOW,
    finished,
    hardware_profile,
    measurement,
    model_profile,
    study_plan,
    study_request,
)

SPACE = {"zero_stage": [0, 1, 2, 3], "micro_batch_size": [1, 2, 4, 8], "precision": ["fp32", "bf16"],
         "offload_optimizer_ratio": [0.0, 0.5]}
WINNER = TrainConfig(zero_stage=1, micro_batch_size=4, gradient_accumulation_steps=4, precision="bf16")


def winner(**hardware: object) -> BestConfig:
    request = study_request(space=SPACE)
    return BestConfig(
        study_id="study", trial_number=1, model_name="small", model_fingerprint="model", training_fingerprint="t",
        hardware_fingerprint="hardware", request=request, config=WINNER, model_profile=model_profile(),
        hardware_profile=hardware_profile(**hardware), tokens_per_second=1000.0, tokens_per_second_interval=(990, 1010),
        samples_per_second=10.0, step_seconds=4.096, peak_device_bytes=150 * MIB, peak_host_bytes=0, confirmed=True,
        created_at=NOW)


TRIALS = (
    finished(0, TrainConfig(micro_batch_size=16), measurement(10.0, 10.0)),
    finished(1, WINNER, measurement(4.096, 4.096)),
    finished(2, WINNER.model_copy(update={"micro_batch_size": 8, "gradient_accumulation_steps": 2}),
             measurement(5.12, 5.12)),
    finished(3, WINNER.model_copy(update={"zero_stage": 0}), outcome=Outcome.OOM_DEVICE, detail="12 MiB too many\nlog"),
)


def effects(best: BestConfig) -> dict[str, KnobEffect]:
    return {knob.name: knob for knob in explain(best, TRIALS).knobs}


def test_each_knob_is_moved_one_step_by_itself() -> None:
    knobs = effects(winner())
    assert [step.value for step in knobs["zero_stage"].steps] == [0, 2]
    assert [step.value for step in knobs["micro_batch_size"].steps] == [2, 8]
    assert [step.value for step in knobs["precision"].steps] == ["fp32"]
    assert [step.value for step in knobs["offload_optimizer_ratio"].steps] == [0.5]
    assert knobs["zero_stage"].value == 1


def test_measured_where_tried_and_predicted_where_not() -> None:
    knobs = effects(winner())
    smaller, larger = knobs["micro_batch_size"].steps
    assert (larger.evidence, larger.trial_number) == ("measured", 2)
    assert larger.tokens_per_second == pytest.approx(800.0)
    assert larger.change == pytest.approx(-0.2)
    assert smaller.evidence == "predicted"
    assert smaller.tokens_per_second is not None
    assert smaller.change == pytest.approx(smaller.tokens_per_second / 1000.0 - 1)


def test_the_baseline_is_as_much_slower_as_the_winner_s_gain_says() -> None:
    best = winner().model_copy(update={"baseline_trial_number": 2, "speedup": 1.6})
    _, larger = effects(best)["micro_batch_size"].steps
    assert (larger.trial_number, larger.tokens_per_second) == (2, pytest.approx(800.0))
    assert larger.change == pytest.approx(1 / 1.6 - 1)


def test_what_trials_taught_goes_into_what_is_expected() -> None:
    """A precision that was measured to be slow elsewhere is expected to be slow here."""
    def change(fp32_seconds: float) -> float:
        other = TrainConfig(zero_stage=2, micro_batch_size=4, gradient_accumulation_steps=4)
        trials = [*TRIALS[1:3], finished(4, other, measurement(fp32_seconds, fp32_seconds))]
        (step,) = next(knob for knob in explain(winner(), trials).knobs if knob.name == "precision").steps
        assert step.evidence == "predicted"
        assert step.change is not None
        return step.change

    assert change(12.0) < change(4.0) - 0.2


def test_what_failed_and_what_does_not_fit_says_so() -> None:
    failed = effects(winner())["zero_stage"].steps[0]
    assert (failed.evidence, failed.trial_number, failed.detail) == ("failed", 3, "oom_device: 12 MiB too many")
    own = study_plan(winner().request, model=model_profile(), hardware=hardware_profile()).predict(WINNER)
    tight = winner(memory_bytes=own.peak_device_bytes + MIB)
    stage_0, stage_2 = effects(tight)["zero_stage"].steps
    in_fp32 = effects(tight)["precision"].steps[0]
    assert in_fp32.evidence == "does_not_fit"
    assert f"where {(own.peak_device_bytes + MIB) / MIB:,.0f} may be used" in in_fp32.detail
    assert (stage_0.evidence, stage_2.evidence) == ("failed", "predicted")
    assert explain(tight, TRIALS).binding.startswith("memory: zero_stage 0 does not fit (oom_device: 12 MiB too many)")


def test_where_memory_and_time_go() -> None:
    explanation = explain(winner(), TRIALS[:3])
    assert sum(explanation.memory.predicted_bytes.values()) == explanation.memory.predicted_peak_bytes
    assert sum(explanation.memory.measured_bytes.values()) == 150 * MIB
    assert explanation.memory.measured_peak_bytes == 150 * MIB
    assert explanation.memory.limit_bytes == 2048 * MIB
    assert explanation.time.predicted_step_seconds == pytest.approx(sum(explanation.time.predicted_seconds.values()))
    assert sum(explanation.time.measured_seconds.values()) == pytest.approx(4.096)
    largest = max(explanation.time.predicted_seconds, key=lambda name: explanation.time.predicted_seconds[name])
    assert f"of the predicted step is {largest.replace('_', ' ')}" in explanation.binding


def test_state_that_a_trial_really_held_is_told_by_kind() -> None:
    """Of 60 MiB of optimizer states 20 are on the host; buffers there take 4, and the rest is 150 - 20 - 30 - 40."""
    run = measurement(4.096, 4.096, state_bytes=StateBytes(
        parameters=20 * MIB, gradients=30 * MIB, optimizer=60 * MIB, host=20 * MIB))
    memory = explain(winner().model_copy(update={"peak_host_bytes": 24 * MIB}), [finished(1, WINNER, run)]).memory
    assert memory.measured_bytes == {
        "parameters": 20 * MIB, "gradients": 30 * MIB, "optimizer": 40 * MIB, "rest": 60 * MIB}
    assert memory.measured_host_bytes == {"parameters": 0, "optimizer": 20 * MIB, "rest": 4 * MIB}
    assert memory.measured_peak_host_bytes == 24 * MIB
    assert set(memory.predicted_host_bytes) == {"parameters", "optimizer", "buckets"}


def test_parameters_on_the_host_are_told_from_optimizer_states_there() -> None:
    config = TrainConfig(zero_stage=3, offload_param=True, offload_optimizer_ratio=0.5)
    state = StateBytes(parameters=8, gradients=14, optimizer=16, host=8 + 12)
    device, host = held_bytes(state, config, device_peak=100, host_peak=25)
    assert device == {"parameters": 0, "gradients": 14, "optimizer": 4, "rest": 82}
    assert host == {"parameters": 8, "optimizer": 12, "rest": 5}


def test_no_rest_is_less_than_nothing() -> None:
    """Kinds of state are most on different ranks."""
    device, host = held_bytes(StateBytes(parameters=10, gradients=10, optimizer=10, host=11), TrainConfig(),
                              device_peak=15, host_peak=5)
    assert device == {"parameters": 10, "gradients": 10, "optimizer": 0, "rest": 0}
    assert host == {"parameters": 0, "optimizer": 11, "rest": 0}


def test_the_host_s_optimizer_and_transfers_are_phases_of_their_own() -> None:
    run = measurement(4.0, 4.0, phases=PhaseSeconds(data=0.1, forward=0.9, backward=1.0, step=2.0, host_step=1.2,
                                                    transfer=0.3))
    seconds = explain(winner(), [finished(1, WINNER, run)]).time.measured_seconds
    assert seconds == pytest.approx({"data": 0.1, "forward": 0.9, "backward": 1.0, "step": 0.5, "host_step": 1.2,
                                     "transfer": 0.3})
