"""Profiles, requests and trials to search with, without any device."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from autotune.domain.request import SearchRequest, StudyRequest
from autotune.domain.study import Trial, TrialRole, TrialState
from autotune.search.plan import Plan, make_plan
from autotune.search.space import parse_space
from autotune.search.suggest import suggest
from engine.config import TrainConfig
from engine.profile import ActivationBytes, HardwareProfile, ModelProfile
from engine.report import Measurement, Outcome, PhaseSeconds, StateBytes
from engine.values import BYTES_PER_ELEMENT, Precision

MIB = 1024 * 1024
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def model_profile(**changes: Any) -> ModelProfile:
    """A small decoder: 4.3 M parameters in 4 blocks."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    activations = tuple(
        ActivationBytes(checkpointing=checkpointing, precision=precision,
                        saved_per_sample=saved * BYTES_PER_ELEMENT[precision] // 4,
                        peak_per_sample=saved * BYTES_PER_ELEMENT[precision] // 4 + MIB)
        for checkpointing, saved in (("none", 10 * MIB), ("selective", 6 * MIB), ("full", MIB))
        for precision in precisions)
    fields: dict[str, Any] = {
        "fingerprint": "model", "parameters": 4_300_000, "trainable_parameters": 4_300_000, "parameter_tensors": 52,
        "largest_parameter": 1_048_576, "buffer_bytes": 4096, "block_class": "Block", "block_count": 4,
        "block_parameters": 790_000, "tokens_per_sample": 128, "flops_per_sample": 6 * 4.3e6 * 128,
        "activations": activations}
    return ModelProfile(**{**fields, **changes})


def hardware_profile(*, world_size: int = 2, **changes: Any) -> HardwareProfile:
    fields: dict[str, Any] = {
        "fingerprint": "hardware", "device_type": "cpu", "device_name": "test cpu", "world_size": world_size,
        "memory_bytes": 2048 * MIB, "host_memory_bytes": 8192 * MIB, "precisions": ("fp32", "bf16", "fp16"),
        "matmul_flops_per_second": {"fp32": 5e10, "bf16": 8e10, "fp16": 1e10}, "copy_bytes_per_second": 5e9,
        "allreduce_bytes_per_second": 1e9 if world_size > 1 else None,
        "allreduce_latency_seconds": 1e-4 if world_size > 1 else None, "software": {"torch": "2.13"}}
    return HardwareProfile(**{**fields, **changes})


def study_request(*, devices: int = 2, global_batch_size: int = 32, training: dict[str, Any] | None = None,
                  memory_limit_bytes: int | None = None, **search: Any) -> StudyRequest:
    return StudyRequest.model_validate({
        "name": "small", "model": {"kind": "gpt"},
        "training": {"global_batch_size": global_batch_size, **(training or {})},
        "hardware": {"devices": devices, "memory_limit_bytes": memory_limit_bytes}, "search": search})


def study_plan(request: StudyRequest, *, model: ModelProfile | None = None,
               hardware: HardwareProfile | None = None) -> Plan:
    return make_plan(request, parse_space(request), model or model_profile(),
                     hardware or hardware_profile(world_size=request.hardware.devices))


def measurement(*step_seconds: float, tokens_per_step: float = 4096, samples_per_step: float = 32,
                peak_device_bytes: int = 100 * MIB, peak_host_bytes: int = 0, **changes: Any) -> Measurement:
    mean = sum(step_seconds) / len(step_seconds)
    rate = tokens_per_step / mean
    fields: dict[str, Any] = {
        "step_seconds": step_seconds, "warmup_seconds": (), "tokens_per_second": rate,
        "tokens_per_second_interval": (rate * 0.97, rate * 1.03), "samples_per_second": samples_per_step / mean,
        "peak_device_bytes": peak_device_bytes, "peak_host_bytes": peak_host_bytes,
        "phases": PhaseSeconds(data=0, forward=mean / 3, backward=2 * mean / 3, step=0), "losses": (1.0, 0.9),
        "state_bytes": StateBytes(parameters=1, gradients=1, optimizer=1, host=0), "world_size": 2,
        "threads_per_rank": 1, "setup_seconds": 0.1, "compute_dtype": "fp32"}
    return Measurement(**{**fields, **changes})


def finished(number: int, config: TrainConfig | None = None, *measurements: Measurement,
             outcome: Outcome = Outcome.OK, role: TrialRole | None = None, detail: str = "") -> Trial:
    return Trial(
        study_id="study", number=number, state=TrialState.FINISHED, config=config or TrainConfig.model_validate({}),
        role=role or (TrialRole.BASELINE if number == 0 else TrialRole.SUGGESTED), outcome=outcome, detail=detail,
        measurement=measurements[0] if measurements else None, repeats=measurements[1:], started_at=NOW,
        finished_at=NOW)


def running(number: int, config: TrainConfig) -> Trial:
    return Trial(study_id="study", number=number, role=TrialRole.SUGGESTED, state=TrialState.RUNNING, config=config,
                 started_at=NOW)


Oracle = Callable[[TrainConfig], Trial | float | Outcome]
"""Step seconds of a configuration, or how its trial ends instead."""


def search_with(plan: Plan, oracle: Oracle, *, trials: int, search: SearchRequest | None = None,
                start: Sequence[Trial] = ()) -> list[Trial]:
    """What a study does, with an oracle in place of devices; ends early when the space is exhausted."""
    done = list(start)
    while len(done) < trials:
        config = suggest(plan, done, search or plan.request.search)
        if config is None:
            break
        done.append(judged(len(done), config, oracle))
    return done


def judged(number: int, config: TrainConfig, oracle: Oracle) -> Trial:
    verdict = oracle(config)
    if isinstance(verdict, Outcome):
        return finished(number, config, outcome=verdict, detail=f"{verdict}", role=TrialRole.SUGGESTED)
    assert isinstance(verdict, float)
    return finished(number, config, measurement(verdict, verdict * 1.01), role=TrialRole.SUGGESTED)
