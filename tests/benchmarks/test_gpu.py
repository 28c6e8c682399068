"""What is made of a trial's report."""

import pytest

from benchmarks.gpu import CHANGES, config_of, flops_per_second, row_of
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import sample_failure, sample_hardware_profile, sample_model_profile, sample_report

MODEL = sample_model_profile().model_copy(update={"flops_per_sample": 3e9})
HARDWARE = sample_hardware_profile(matmul_flops_per_second={"fp32": 1e12}, world_size=1)
CONFIG = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2)


def test_utilisation_counts_the_whole_global_batch_and_no_recomputation() -> None:
    assert flops_per_second(MODEL, CONFIG, step_seconds=0.5) == pytest.approx(8 * 3e9 / 0.5)
    full = CONFIG.model_copy(update={"activation_checkpointing": "full"})
    assert flops_per_second(MODEL, full, step_seconds=0.5) == flops_per_second(MODEL, CONFIG, step_seconds=0.5)


def test_a_trial_stands_beside_its_prediction() -> None:
    found = sample_report(0.5, peak_device_bytes=2**31, peak_host_bytes=2**30)
    row = row_of({"zero_stage": 0}, found, CONFIG, MODEL, HARDWARE)
    assert row["step ms"] == pytest.approx(500)
    assert row["TFLOP/s"] == pytest.approx(0.048)
    assert row["of matmul"] == pytest.approx(0.048)
    assert (row["peak GiB"], row["host GiB"]) == (2.0, 1.0)
    predicted, ratio = row["predicted GiB"], row["peak / predicted"]
    assert isinstance(predicted, float)
    assert ratio == pytest.approx(2 / predicted)


def test_a_trial_without_memory_has_a_prediction_and_no_numbers() -> None:
    row = row_of({}, sample_failure(Outcome.OOM_DEVICE, "no"), CONFIG, MODEL, HARDWARE)
    assert (row["outcome"], row["step ms"], row["of matmul"], row["peak GiB"]) == ("oom_device", None, None, None)
    assert row["predicted GiB"] is not None


def test_every_change_is_a_configuration_of_its_own() -> None:
    assert len({config_of(change) for change in CHANGES}) == len(CHANGES)
