"""Small complete values for tests."""

from datetime import UTC, datetime, timedelta
from typing import Any

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from autotune.domain.study import BestConfig
from engine.config import TrainConfig
from engine.profile import ActivationBytes, HardwareProfile, ModelProfile
from engine.report import Measurement, Outcome, PhaseSeconds, StateBytes, TrialReport

START = datetime(2030, 1, 1, tzinfo=UTC)


class FakeClock:
    """Time that stands still until told to pass."""

    def __init__(self, start: datetime = START) -> None:
        self.now = start

    def __call__(self) -> datetime:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def sample_request(name: str = "gpt-tiny", **changes: Any) -> StudyRequest:
    body: dict[str, Any] = {
        "name": name,
        "model": {"kind": "gpt", "layers": 2, "hidden": 32, "heads": 2, "vocab": 64, "sequence_length": 16},
        "training": {"global_batch_size": 8},
        "hardware": {"device": "cpu", "devices": 1},
        "search": {"sampler": "random", "seed": 1, "space": {"zero_stage": [0, 1], "micro_batch_size": [1, 2, 4]}},
        "budget": {"max_trials": 20, "max_seconds": 600},
    }
    return StudyRequest.model_validate({**body, **changes})


def sample_measurement(step_seconds: float = 0.1, *, samples: int = 8, tokens_per_sample: int = 16,
                       **changes: Any) -> Measurement:
    """Five nearly equal steps of a global batch of `samples`."""
    steps = tuple(step_seconds * factor for factor in (0.99, 1.0, 1.01, 1.0, 1.0))
    rate = samples / step_seconds
    values: dict[str, Any] = {
        "step_seconds": steps, "warmup_seconds": (2 * step_seconds,), "tokens_per_second": rate * tokens_per_sample,
        "tokens_per_second_interval": (rate * tokens_per_sample * 0.99, rate * tokens_per_sample * 1.01),
        "samples_per_second": rate, "peak_device_bytes": 1_000_000, "peak_host_bytes": 0,
        "phases": PhaseSeconds(data=0.0, forward=step_seconds / 2, backward=step_seconds / 4, step=step_seconds / 4),
        "losses": (4.0, 3.9, 3.8, 3.7, 3.6, 3.5),
        "state_bytes": StateBytes(parameters=100, gradients=100, optimizer=200, host=0), "world_size": 1,
        "threads_per_rank": 1, "setup_seconds": 0.2, "compute_dtype": "fp32"}
    return Measurement.model_validate({**values, **changes})


def sample_report(step_seconds: float = 0.1, **changes: Any) -> TrialReport:
    return TrialReport(outcome=Outcome.OK, measurement=sample_measurement(step_seconds, **changes))


def sample_failure(outcome: Outcome, detail: str) -> TrialReport:
    return TrialReport(outcome=outcome, detail=detail)


def sample_prediction(peak: int = 1_000_000) -> Prediction:
    return Prediction(device_bytes={"parameters": peak}, host_bytes={}, peak_device_bytes=peak, peak_host_bytes=0)


def sample_model_profile(fingerprint: str = "model-1") -> ModelProfile:
    choices = [(checkpointing, precision) for checkpointing in ("none", "selective", "full")
               for precision in ("fp32", "bf16", "fp16")]
    return ModelProfile(
        fingerprint=fingerprint, parameters=10_000, trainable_parameters=10_000, parameter_tensors=10,
        largest_parameter=2_000, buffer_bytes=0, block_class="Block", block_count=2, block_parameters=4_000,
        tokens_per_sample=16, flops_per_sample=1e6,
        activations=tuple(ActivationBytes(checkpointing=checkpointing, precision=precision, saved_per_sample=50_000,
                                          peak_per_sample=60_000) for checkpointing, precision in choices))


def sample_hardware_profile(fingerprint: str = "hardware-1", **changes: Any) -> HardwareProfile:
    values: dict[str, Any] = {
        "fingerprint": fingerprint, "device_type": "cpu", "device_name": "test", "world_size": 1,
        "memory_bytes": 2**31, "host_memory_bytes": 2**32, "precisions": ("fp32", "bf16"),
        "matmul_flops_per_second": {"fp32": 1e10, "bf16": 5e9}, "copy_bytes_per_second": 1e9,
        "allreduce_bytes_per_second": None, "allreduce_latency_seconds": None, "software": {"torch": "2.13"}}
    return HardwareProfile.model_validate({**values, **changes})


def sample_best(study_id: str = "0" * 32, **changes: Any) -> BestConfig:
    values: dict[str, Any] = {
        "study_id": study_id, "trial_number": 3, "model_name": "gpt-tiny", "model_fingerprint": "model-1",
        "training_fingerprint": "training-1", "hardware_fingerprint": "hardware-1", "request": sample_request(),
        "config": TrainConfig(micro_batch_size=8), "model_profile": sample_model_profile(),
        "hardware_profile": sample_hardware_profile(), "tokens_per_second": 1000.0,
        "tokens_per_second_interval": (990.0, 1010.0), "samples_per_second": 62.5, "step_seconds": 0.128,
        "peak_device_bytes": 1_000_000, "peak_host_bytes": 0, "baseline_trial_number": 0,
        "baseline_tokens_per_second": 800.0, "speedup": 1.25, "speedup_interval": (1.2, 1.3), "confirmed": True,
        "created_at": START}
    return BestConfig.model_validate({**values, **changes})
