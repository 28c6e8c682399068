"""Simulated surfaces: the plan knows one model and one machine, the truth is another.

What the prediction goes by, every rate, bandwidth and latency of the hardware and every activation size of the model,
is off by up to `OFF`, each by itself. On top, every value of every knob multiplies the time by a factor that no
prediction knows, so do pairs of values, and a measurement repeats to about 1.5 %.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache
from random import Random
from typing import Any, NamedTuple

from autotune.domain.request import StudyRequest
from autotune.predict import predict
from autotune.search.knobs import KNOBS
from autotune.search.plan import BUCKET_KNOBS, Plan, make_plan
from autotune.search.space import parse_space
from benchmarks.search.problems import Problem, Truth, make_problem
from engine.config import TrainConfig
from engine.profile import ActivationBytes, HardwareProfile, ModelProfile
from engine.values import BYTES_PER_ELEMENT, Precision

OFF = 2.0
NOISE = 0.015
MEMORY_NOISE = 0.01
_ROUGH = {"zero_stage": 0.05, "micro_batch_size": 0.05, "precision": 0.05, "activation_checkpointing": 0.05,
          "offload_optimizer_ratio": 0.05, "offload_param": 0.05, "overlap_comm": 0.03}
"""Standard deviation of the logarithm of a value's factor, by knob."""
_ROUGH_ELSE = 0.01
_PAIR = 0.2
"""Of two values together, beside the geometric mean of theirs."""
_MIB = 2**20


def surface(seed: int) -> Problem:
    """The problem of this seed; even seeds on a small CPU, odd ones on eight accelerators."""
    return _problem(_cpu_plan() if seed % 2 == 0 else _accelerator_plan(), seed)


def large_surface() -> Problem:
    """One on which all of 5,580 configurations fit."""
    return _problem(_large_plan(), seed=0)


def _problem(plan: Plan, seed: int) -> Problem:
    random = Random(seed)
    real = _model_off(plan.model, random), _hardware_off(plan.hardware, random)
    return make_problem(f"surface {seed}", plan, _truth(plan, real, Effects(seed)))


def _truth(plan: Plan, real: tuple[ModelProfile, HardwareProfile],
           effects: "Effects") -> Callable[[TrainConfig], Truth]:
    @cache
    def truth(config: TrainConfig) -> Truth:
        expected = predict(*real, plan.request.training.optimizer, config)
        assert expected.step_seconds is not None
        seconds = expected.step_seconds * _roughness(plan, config, effects)
        random = Random(f"{effects.seed} {config.model_dump_json()}")
        memory = math.exp(random.gauss(0, MEMORY_NOISE))
        return Truth(step_seconds=seconds, measured_seconds=seconds * math.exp(random.gauss(0, NOISE)),
                     peak_device_bytes=round(expected.peak_device_bytes * memory),
                     peak_host_bytes=round(expected.peak_host_bytes * memory))

    return truth


def _roughness(plan: Plan, config: TrainConfig, effects: "Effects") -> float:
    values = {knob.name: getattr(config, knob.name) for knob in plan.space.knobs if knob.is_active(config)}
    total = sum(effects.of((name, value)) for name, value in values.items())
    names = [name for name in values if name in _ROUGH]
    for place, one in enumerate(names):
        total += sum(effects.of((one, values[one]), (other, values[other])) for other in names[place + 1:])
    return math.exp(total)


class Effects(NamedTuple):
    """Of knobs' values; in part those of another seed.

    Attributes:
        likeness: correlation with those of `other`.
    """

    seed: int
    other: int = 0
    likeness: float = 0.0

    def of(self, *values: tuple[str, Any]) -> float:
        """Logarithm of the factor of one value, or of two together."""
        own = _effect(self.seed, *values)
        if not self.likeness:
            return own
        return self.likeness * _effect(self.other, *values) + math.sqrt(1 - self.likeness**2) * own


@cache
def _effect(seed: int, *of: tuple[str, Any]) -> float:
    spread = math.prod(_ROUGH.get(name, _ROUGH_ELSE) for name, _ in of) ** (1 / len(of))
    return Random(f"{seed} {of}").gauss(0, spread if len(of) == 1 else _PAIR * spread)


def _off(random: Random) -> float:
    return math.exp(random.uniform(-1, 1) * math.log(OFF))


def _hardware_off(hardware: HardwareProfile, random: Random) -> HardwareProfile:
    return HardwareProfile.model_validate(_floats_off(hardware.model_dump(), random))


def _floats_off(value: Any, random: Random) -> Any:
    """Every float multiplied, wherever it is: in a profile, these are what was measured."""
    match value:
        case float():
            return value * _off(random)
        case Mapping():
            return {name: _floats_off(each, random) for name, each in value.items()}
        case list() | tuple():
            return [_floats_off(each, random) for each in value]
        case _:
            return value


def _model_off(model: ModelProfile, random: Random) -> ModelProfile:
    """Saved activations off by one factor for each checkpointing mode, transient ones by another."""
    saved = {mode: _off(random) for mode in ("none", "selective", "full")}
    transient = {mode: _off(random) for mode in saved}
    activations = tuple(entry.model_copy(update={
        "saved_per_sample": round(entry.saved_per_sample * saved[entry.checkpointing]),
        "peak_per_sample": round(entry.saved_per_sample * saved[entry.checkpointing]
                                 + (entry.peak_per_sample - entry.saved_per_sample) * transient[entry.checkpointing])})
        for entry in model.activations)
    return model.model_copy(update={"activations": activations,
                                    "flops_per_sample": model.flops_per_sample * _off(random)})


# --- pairs of studies ---


class Pair(NamedTuple):
    """Two problems of which the first was solved before the second.

    Attributes:
        model, hardware, effects: correlations of what is off in one with what is off in the other; -1: the opposite.
        same_model, same_hardware: whether both have the same.
    """

    name: str
    same_model: bool
    same_hardware: bool
    model: float
    hardware: float
    effects: float


PAIRS = (
    Pair("the same model on other hardware", True, False, model=1.0, hardware=0.5, effects=0.7),
    Pair("another size on the same hardware", False, True, model=0.5, hardware=1.0, effects=0.7),
    Pair("the same model, nothing alike", True, False, model=0.0, hardware=0.0, effects=0.0),
    Pair("the same model, all the opposite", True, False, model=-1.0, hardware=-1.0, effects=-1.0),
)


def problem_before(pair: Pair, seed: int) -> Problem:
    """The earlier problem of a pair whose later one is `surface(seed)`."""
    small = seed % 2 == 0
    later = _cpu_plan() if small else _accelerator_plan()
    hardware = later.hardware if pair.same_hardware else _OTHER_CPU if small else _OTHER_ACCELERATOR
    model = later.model if pair.same_model else _OTHER_SMALL_MODEL if small else _OTHER_LARGE_MODEL
    earlier = _plan(model, hardware, global_batch=later.request.training.global_batch_size,
                    limit=later.request.hardware.memory_limit_bytes,
                    buckets=_SMALL_BUCKETS if small else _LARGE_BUCKETS)
    own, random = seed + 500_000, Random(seed)
    off = (_model_off(model, _Like(random, Random(own), pair.model)),
           _hardware_off(hardware, _Like(random, Random(own + 1), pair.hardware)))
    return make_problem(f"before surface {seed}", earlier, _truth(earlier, off, Effects(own, seed, pair.effects)))


class _Like(Random):
    """Draws that resemble another's."""

    def __init__(self, other: Random, own: Random, likeness: float) -> None:
        super().__init__()
        self._other, self._own, self._likeness = other, own, likeness

    def uniform(self, a: float, b: float) -> float:
        middle, other = (a + b) / 2, self._other.uniform(a, b)
        return (middle + self._likeness * (other - middle)
                + math.sqrt(1 - self._likeness**2) * (self._own.uniform(a, b) - middle))


# --- what the plans know ---


@cache
def _cpu_plan() -> Plan:
    """1,000 MiB for each rank."""
    return _plan(_SMALL_MODEL, _CPU, global_batch=32, limit=1000 * _MIB, buckets=_SMALL_BUCKETS)


@cache
def _large_plan() -> Plan:
    """No limit, and more values."""
    return _plan(_SMALL_MODEL, _CPU, global_batch=32, limit=None,
                 buckets={**_SMALL_BUCKETS, "reduce_bucket_size": [1_000_000, 2_000_000, 10_000_000]})


@cache
def _accelerator_plan() -> Plan:
    return _plan(_LARGE_MODEL, _ACCELERATOR, global_batch=256, limit=None,
                 buckets=_LARGE_BUCKETS)


def _plan(model: ModelProfile, hardware: HardwareProfile, *, global_batch: int, limit: int | None,
          buckets: Mapping[str, list[int]]) -> Plan:
    """All knobs searched by default, with these values of bucket sizes."""
    request = StudyRequest.model_validate({
        "name": model.fingerprint, "model": {"kind": "gpt"}, "training": {"global_batch_size": global_batch},
        "hardware": {"devices": hardware.world_size, "memory_limit_bytes": limit},
        "search": {"space": {**{kind.name: "auto" for kind in KNOBS.values() if kind.by_default}, **buckets}}})
    return make_plan(request, parse_space(request), model, hardware)


def _activations(saved: Mapping[str, int], *, transient: int) -> tuple[ActivationBytes, ...]:
    """Of every mode and precision, from bytes per sample in fp32."""
    precisions: tuple[Precision, ...] = ("fp32", "bf16", "fp16")
    return tuple(ActivationBytes(checkpointing=mode, precision=precision,
                                 saved_per_sample=size * BYTES_PER_ELEMENT[precision] // 4,
                                 peak_per_sample=(size + transient) * BYTES_PER_ELEMENT[precision] // 4)
                 for mode, size in saved.items() for precision in precisions)


_SMALL_BUCKETS = {name: [2_000_000, 10_000_000] for name in BUCKET_KNOBS}
_LARGE_BUCKETS = {name: [10_000_000, 100_000_000] for name in BUCKET_KNOBS}

_SMALL_MODEL = ModelProfile(
    fingerprint="small", parameters=43_000_000, trainable_parameters=43_000_000, parameter_tensors=100,
    largest_parameter=8_192_000, buffer_bytes=4096, block_class="Block", block_count=8, block_parameters=3_150_000,
    tokens_per_sample=32, flops_per_sample=6 * 43e6 * 32, hidden=512, heads=8, vocab=16_000,
    activations=_activations({"none": 24 * _MIB, "selective": 14 * _MIB, "full": 3 * _MIB}, transient=4 * _MIB))
"""A decoder of 43 million parameters."""

_CPU = HardwareProfile(
    fingerprint="cpu", device_type="cpu", device_name="cpu", world_size=2, memory_bytes=2048 * _MIB,
    host_memory_bytes=8192 * _MIB, precisions=("fp32", "bf16", "fp16"),
    matmul_flops_per_second={"fp32": 1e11, "bf16": 1.6e11, "fp16": 2e10}, copy_bytes_per_second=5e9,
    allreduce_bytes_per_second=1e9, allreduce_latency_seconds=1e-4, launch_seconds=5e-6,
    host_bytes_per_second=5e9, software={})

_LARGE_MODEL = ModelProfile(
    fingerprint="large", parameters=1_558_000_000, trainable_parameters=1_558_000_000, parameter_tensors=580,
    largest_parameter=80_411_200, buffer_bytes=0, block_class="Block", block_count=48, block_parameters=30_740_000,
    tokens_per_sample=1024, flops_per_sample=6 * 1.558e9 * 1024, hidden=1600, heads=25, vocab=50_257,
    activations=_activations({"none": 5_000 * _MIB, "selective": 3_000 * _MIB, "full": 300 * _MIB},
                             transient=600 * _MIB))
"""A decoder of 1.6 billion parameters."""

_ACCELERATOR = HardwareProfile(
    fingerprint="accelerator", device_type="cuda", device_name="accelerator", world_size=8,
    memory_bytes=40 * 1024 * _MIB, host_memory_bytes=512 * 1024 * _MIB, precisions=("fp32", "bf16", "fp16"),
    matmul_flops_per_second={"fp32": 7e13, "bf16": 2e14, "fp16": 2e14}, copy_bytes_per_second=1.3e12,
    allreduce_bytes_per_second=1e11, allreduce_latency_seconds=5e-5, launch_seconds=3e-6,
    host_bytes_per_second=2e10, software={})

_OTHER_SMALL_MODEL = _SMALL_MODEL.model_copy(update={
    "fingerprint": "other small", "parameters": 30_400_000, "trainable_parameters": 30_400_000, "block_count": 4,
    "flops_per_sample": 6 * 30.4e6 * 32, "activations": _activations(
        {"none": 13 * _MIB, "selective": 8 * _MIB, "full": 2 * _MIB}, transient=4 * _MIB)})
"""Half the blocks."""

_OTHER_LARGE_MODEL = _LARGE_MODEL.model_copy(update={
    "fingerprint": "other large", "parameters": 820_000_000, "trainable_parameters": 820_000_000, "block_count": 24,
    "flops_per_sample": 6 * 0.82e9 * 1024, "activations": _activations(
        {"none": 2_600 * _MIB, "selective": 1_600 * _MIB, "full": 200 * _MIB}, transient=600 * _MIB)})
"""Half the blocks."""

_OTHER_CPU = _CPU.model_copy(update={
    "fingerprint": "other cpu", "world_size": 4, "matmul_flops_per_second": {"fp32": 6e10, "bf16": 2e11, "fp16": 3e10},
    "copy_bytes_per_second": 8e9, "allreduce_bytes_per_second": 2e9, "host_memory_bytes": 16384 * _MIB})

_OTHER_ACCELERATOR = _ACCELERATOR.model_copy(update={
    "fingerprint": "other accelerator", "world_size": 16, "memory_bytes": 80 * 1024 * _MIB,
    "host_memory_bytes": 1024 * 1024 * _MIB, "matmul_flops_per_second": {"fp32": 5e13, "bf16": 6e14, "fp16": 6e14},
    "copy_bytes_per_second": 2.5e12, "allreduce_bytes_per_second": 4e10, "host_bytes_per_second": 4e10})
