"""Properties of the prediction that hold for every model and configuration, and the ZeRO paper's table."""

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict import predict
from autotune.search.knobs import KNOBS
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import (
    ActivationBytes,
    BackwardPoint,
    Collective,
    ModelProfile,
    OperatorClass,
    OperatorCost,
    OperatorWork,
    PassWork,
)
from tests.search.support import MIB, hardware_profile, model_profile

ADAMW = OptimizerConfig()
STATES = ("parameters", "gradients", "optimizer")


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    """With no blocks, equal ones or unequal ones, of which profiles may not tell."""
    blocks = draw(st.integers(0, 48))
    sizes = draw(st.one_of(st.lists(st.integers(1, 10**7), min_size=blocks, max_size=blocks),
                           st.integers(1, 10**7).map(lambda size: [size] * blocks)))
    outside = draw(st.integers(1, 10**8))
    total = sum(sizes) + outside
    frozen = draw(st.integers(0, outside - 1))
    return model_profile(parameters=total, trainable_parameters=total - frozen, block_count=blocks,
                         block_parameters=max(sizes, default=0), block_sizes=sizes if draw(st.booleans()) else (),
                         largest_parameter=draw(st.integers(1, max(outside, *sizes, 1))),
                         block_class="Block" if blocks else None)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    stage = draw(st.integers(0, 3))
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16"]))
    sizes = st.integers(1, 10**9)
    return TrainConfig.model_validate({
        "zero_stage": stage, "precision": precision, "micro_batch_size": draw(st.integers(1, 64)),
        "gradient_accumulation_steps": draw(st.integers(1, 8)),
        "optimizer_precision": "fp32" if precision == "fp16" else draw(st.sampled_from(["fp32", "compute"])),
        "reduce_bucket_size": draw(sizes), "allgather_bucket_size": draw(sizes), "prefetch_bucket_size": draw(sizes),
        "overlap_comm": draw(st.booleans()), "offload_optimizer_ratio": draw(st.sampled_from([0.0, 0.3, 0.5, 1.0])),
        "offload_param": stage == 3 and draw(st.booleans()),
        "activation_checkpointing": draw(st.sampled_from(["none", "selective", "full"]))})


optimizers = st.sampled_from([OptimizerConfig(), OptimizerConfig(name="sgd"), OptimizerConfig(name="sgd", momentum=0.9),
                              OptimizerConfig(name="adagrad")])
world_sizes = st.sampled_from([1, 2, 3, 4, 7, 8, 64])


def prediction(model: ModelProfile, config: TrainConfig, *, world_size: int = 2,
               optimizer: OptimizerConfig = ADAMW, **hardware: Any) -> Any:
    return predict(model, hardware_profile(world_size=world_size, **hardware), optimizer, config)


def state_bytes(predicted: Any) -> int:
    """Of parameters, gradients and optimizer, device and host."""
    return sum(predicted.device_bytes[name] for name in STATES) + sum(
        predicted.host_bytes.get(name, 0) for name in STATES)


class TestProperties:
    @given(models(), configs(), optimizers, world_sizes)
    @settings(max_examples=200, deadline=None)
    def test_terms_are_not_negative_and_sum_to_the_totals(self, model: ModelProfile, config: TrainConfig,
                                                          optimizer: OptimizerConfig, ranks: int) -> None:
        predicted = prediction(model, config, world_size=ranks, optimizer=optimizer)
        assert all(size >= 0 for size in (*predicted.device_bytes.values(), *predicted.host_bytes.values()))
        assert predicted.peak_device_bytes == sum(predicted.device_bytes.values())
        assert predicted.peak_host_bytes == sum(predicted.host_bytes.values())
        assert predicted.seconds["forward"] > 0
        assert predicted.seconds["backward"] > 0

    @given(models(), configs(), optimizers, world_sizes)
    @settings(max_examples=200, deadline=None)
    def test_shards_of_all_ranks_are_at_least_one_full_copy(self, model: ModelProfile, config: TrainConfig,
                                                            optimizer: OptimizerConfig, ranks: int) -> None:
        whole = prediction(model, config.model_copy(update={"zero_stage": 0, "offload_param": False}), world_size=1,
                           optimizer=optimizer)
        sharded = prediction(model, config, world_size=ranks, optimizer=optimizer)
        for name in STATES:
            every_rank = ranks * (sharded.device_bytes[name] + sharded.host_bytes.get(name, 0))
            # rounding of the offloaded share to whole elements, on every rank
            assert every_rank + 16 * ranks >= whole.device_bytes[name] + whole.host_bytes.get(name, 0)

    @given(models(), configs(), optimizers, world_sizes)
    @settings(max_examples=200, deadline=None)
    def test_a_higher_stage_never_holds_more_state(self, model: ModelProfile, config: TrainConfig,
                                                   optimizer: OptimizerConfig, ranks: int) -> None:
        held = [state_bytes(prediction(model, config.model_copy(update={"zero_stage": stage, "offload_param": False}),
                                       world_size=ranks, optimizer=optimizer)) for stage in range(4)]
        assert held == sorted(held, reverse=True)

    @given(models(), configs(), optimizers, st.sampled_from([(1, 2), (2, 3), (2, 4), (7, 64)]))
    @settings(max_examples=200, deadline=None)
    def test_more_ranks_never_hold_more_state_each(self, model: ModelProfile, config: TrainConfig,
                                                   optimizer: OptimizerConfig, ranks: tuple[int, int]) -> None:
        few, many = (state_bytes(prediction(model, config, world_size=size, optimizer=optimizer)) for size in ranks)
        assert many <= few

    @given(models(), configs(), optimizers)
    @settings(max_examples=200, deadline=None)
    def test_on_one_rank_all_stages_are_equal(self, model: ModelProfile, config: TrainConfig,
                                              optimizer: OptimizerConfig) -> None:
        alike = [prediction(model, config.model_copy(update={"zero_stage": stage, "offload_param": False}),
                            world_size=1, optimizer=optimizer) for stage in range(4)]
        assert len({(each.peak_device_bytes, each.peak_host_bytes, each.step_seconds) for each in alike}) == 1

    @given(models(), configs(), world_sizes, st.data())
    @settings(max_examples=300, deadline=None)
    def test_knobs_that_do_nothing_change_nothing(self, model: ModelProfile, config: TrainConfig, ranks: int,
                                                  data: st.DataObject) -> None:
        before = prediction(model, config, world_size=ranks)
        for kind in KNOBS.values():
            if kind.active(config.__dict__, ranks) or kind.name in ("offload_optimizer_ratio", "offload_param"):
                continue
            other = config.model_copy(update={kind.name: data.draw(st.sampled_from(kind.auto))})
            assert prediction(model, other, world_size=ranks) == before, kind.name

    @given(models(), configs(), world_sizes)
    @settings(max_examples=200, deadline=None)
    def test_larger_micro_batches_and_buckets_never_need_less(self, model: ModelProfile, config: TrainConfig,
                                                              ranks: int) -> None:
        before = prediction(model, config, world_size=ranks).peak_device_bytes
        for name in ("micro_batch_size", "reduce_bucket_size", "prefetch_bucket_size"):
            larger = config.model_copy(update={name: 2 * getattr(config, name), "allgather_bucket_size": 1})
            smaller = config.model_copy(update={"allgather_bucket_size": 1})
            assert (prediction(model, larger, world_size=ranks).peak_device_bytes
                    >= prediction(model, smaller, world_size=ranks).peak_device_bytes), name
        assert before > 0

    @given(models(), configs(), world_sizes, st.sampled_from([0.0, 0.25, 0.5]))
    @settings(max_examples=100, deadline=None)
    def test_offloading_moves_optimizer_states_from_device_to_host(self, model: ModelProfile, config: TrainConfig,
                                                                   ranks: int, ratio: float) -> None:
        less, more = (prediction(model, config.model_copy(update={"offload_optimizer_ratio": share}),
                                 world_size=ranks) for share in (ratio, 1.0))
        assert more.device_bytes["optimizer"] <= less.device_bytes["optimizer"]
        assert more.device_bytes["optimizer"] == 0
        assert more.host_bytes["optimizer"] > less.host_bytes["optimizer"]


class TestTable:
    """Bytes per parameter of mixed-precision Adam (arXiv 1910.02054, figure 1): 2 + 2 + 12, K = 12.

    With one micro-batch stage 1 keeps no whole gradients either, where the paper's does.
    """

    @pytest.mark.parametrize(("stage", "per_parameter"), [(0, 16), (1, 2 + 14 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
    def test_of_the_paper(self, stage: int, per_parameter: float) -> None:
        count = 7_500_000_000
        model = model_profile(parameters=count, trainable_parameters=count)
        config = TrainConfig.model_validate({"zero_stage": stage, "precision": "fp16", "micro_batch_size": 1})
        assert state_bytes(prediction(model, config, world_size=64)) == pytest.approx(per_parameter * count, rel=1e-6)

    @pytest.mark.parametrize(("config", "optimizer", "expected"), [
        ({"precision": "fp32"}, OptimizerConfig(), 4 + 4 + 8),
        ({"precision": "bf16"}, OptimizerConfig(), 2 + 2 + 12),
        ({"precision": "bf16", "gradient_accumulation_steps": 2}, OptimizerConfig(), 2 + 4 + 12),
        ({"precision": "bf16", "optimizer_precision": "compute"}, OptimizerConfig(), 2 + 2 + 4),
        ({"precision": "fp32"}, OptimizerConfig(name="sgd"), 4 + 4),
        ({"precision": "bf16"}, OptimizerConfig(name="sgd", momentum=0.9), 2 + 2 + 8),
        ({"precision": "fp32", "offload_optimizer_ratio": 1.0, "zero_stage": 1}, OptimizerConfig(), 4 + 4 + 12),
    ])
    def test_of_precisions_and_optimizers(self, config: dict[str, Any], optimizer: OptimizerConfig,
                                          expected: int) -> None:
        model = model_profile(parameters=1000, trainable_parameters=1000)
        predicted = prediction(model, TrainConfig.model_validate(config), world_size=1, optimizer=optimizer)
        assert state_bytes(predicted) == expected * 1000

    def test_frozen_parameters_need_neither_gradients_nor_states(self) -> None:
        model = model_profile(parameters=1000, trainable_parameters=100)
        predicted = prediction(model, TrainConfig.model_validate({}), world_size=1)
        assert [predicted.device_bytes[name] for name in STATES] == [4000, 400, 800]


def test_activations_grow_with_the_micro_batch_by_what_was_measured() -> None:
    one, four = (prediction(model_profile(), TrainConfig.model_validate({"micro_batch_size": size}),
                            device_type="cuda") for size in (1, 4))
    assert one.device_bytes["activations"] == 10 * MIB
    assert four.device_bytes["activations"] == 40 * MIB
    assert four.device_bytes["workspace"] == 4 * MIB


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_share_no_memory_gather_copies(stage: int) -> None:
    """At stage 3, of the parameters in use, in forward and in backward; at other stages all is as it was."""
    cost = Collective(latency_seconds=1e-4, bytes_per_second=1e9)
    calibrated = {"reduce_scatter": {"fp32": cost}, "all_reduce": {"fp32": cost}, "all_gather": cost}
    told, untold, apart = (
        prediction(model_profile(), TrainConfig(zero_stage=stage), shares_memory=shares, **calibrated)
        for shares in (True, None, False))
    assert told == untold
    more_seconds = apart.seconds["data_exchange"] - told.seconds["data_exchange"]
    if stage < 3:
        assert more_seconds == 0
        assert (told.device_bytes["gathered"], apart.device_bytes["gathered"]) == (0, 0)
    else:
        assert more_seconds == pytest.approx(2 * (4 * 4.3e6 / 1e9 + 5 * 1e-4))
        assert (told.device_bytes["gathered"], apart.device_bytes["gathered"]) == (0, 4 * 4_300_000)


def test_what_is_outside_of_unequal_blocks_is_gathered_with_two_blocks() -> None:
    sizes = (1_000_000, 1_000_000, 1_000_000, 2_000_000)
    model = model_profile(block_parameters=2_000_000, block_sizes=sizes, parameters=5_500_000)
    found = prediction(model, TrainConfig(zero_stage=3, overlap_comm=False), shares_memory=False)
    assert found.device_bytes["gathered"] == 4 * (500_000 + 2 * 2_000_000)


@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_cpu_sums_over_micro_batches_lie_where_they_are_reduced(overlap: bool) -> None:
    """Stage 0 needs nothing beside them; stage 1, one bucket at a time, its shards."""
    config = TrainConfig(zero_stage=0, gradient_accumulation_steps=2, overlap_comm=overlap)
    assert prediction(model_profile(), config).device_bytes["buckets"] == 0
    if not overlap:
        sharded = config.model_copy(update={"zero_stage": 1})
        assert prediction(model_profile(), sharded).device_bytes["buckets"] == 4 * 4_300_000 // 2


def test_on_a_cpu_the_scratch_memory_of_its_libraries_counts() -> None:
    large = model_profile(tokens_per_sample=1024, hidden=256)
    for precision, scratch in (("fp32", 0), ("bf16", 3 * MIB)):
        assert _workspace_of_a_cpu(large, TrainConfig.model_validate({"precision": precision})) == scratch


def test_on_a_cpu_small_activations_leave_gaps_in_the_heap() -> None:
    """From 256 KiB between blocks on, the C library gives each tensor back by itself."""
    model = model_profile(tokens_per_sample=64, hidden=256)
    for size, gaps in ((1, 5 * MIB), (2, 10 * MIB), (3, 15 * MIB), (4, 0), (8, 0)):
        assert _workspace_of_a_cpu(model, TrainConfig(micro_batch_size=size)) == gaps
    full = TrainConfig(micro_batch_size=2, activation_checkpointing="full")
    assert _workspace_of_a_cpu(model, full) == MIB


def _workspace_of_a_cpu(model: ModelProfile, config: TrainConfig) -> int:
    """Bytes beyond an accelerator's."""
    cpu, cuda = (prediction(model, config, world_size=1, device_type=kind).device_bytes["workspace"]
                 for kind in ("cpu", "cuda"))
    return cpu - cuda


def _timeline(*points: tuple[int, int, int]) -> ModelProfile:
    """(gradients, fixed, per sample) each; the model has 4 MiB parameters."""
    return model_profile(activations=(ActivationBytes(
        checkpointing="none", precision="fp32", saved_per_sample=4 * MIB, peak_per_sample=5 * MIB,
        backward=tuple(BackwardPoint(gradients=part * model_profile().trainable_parameters // 4, fixed=fixed * MIB,
                                     per_sample=each * MIB) for part, fixed, each in points)),))


def test_gradients_of_one_micro_batch_come_as_its_activations_go() -> None:
    model = _timeline((0, 0, 5), (2, 1, 2), (4, 3, 0))
    gradients = 4 * model.trainable_parameters

    def backward(size: int, steps: int) -> int:
        config = TrainConfig(micro_batch_size=size, gradient_accumulation_steps=steps)
        found = prediction(model, config, world_size=1, device_type="cuda").device_bytes
        return found["gradients"] + found["activations"] + found["workspace"]

    for size in (1, 2, 8):
        assert backward(size, 1) == max(5 * size * MIB, (1 + 2 * size) * MIB + gradients // 2, 3 * MIB + gradients)
        assert backward(size, 2) == gradients + max(5 * size * MIB, (1 + 2 * size) * MIB, 3 * MIB)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_gradient_is_left_out(kind: str, overlap: bool) -> None:
    """Those of one micro-batch may lie where they were reduced, and are counted there."""
    for model in (model_profile(), _timeline((0, 0, 5), (4, 3, 0))):
        config = TrainConfig(reduce_bucket_size=2**18, allgather_bucket_size=2**18, overlap_comm=overlap)
        found = prediction(model, config, device_type=kind)
        assert found.peak_device_bytes >= 4 * (model.parameters + 3 * model.trainable_parameters)


def test_counted_operators_cost_their_operations_and_bytes() -> None:
    """A product of 2 s, attention of 3 s and 5 s of everything else; full checkpointing does half of it again."""
    work = {"product": (2.0, 0.0), "attention": (0.0, 3.0), "other": (0.0, 5.0)}

    def done(share: float) -> dict[str, OperatorWork]:
        return {kind: OperatorWork(flops_per_sample=share * flops / 2, bytes_per_sample=0.0,
                                   bytes_fixed=share * moved, kernels=0.0) for kind, (flops, moved) in work.items()}

    model = model_profile(work=tuple(PassWork.model_validate(
        {"checkpointing": choice, "precision": "fp32", "operators": done(share)})
        for choice, share in (("none", 1.0), ("full", 1.5))))
    hardware = {"operators": {"fp32": dict.fromkeys(work, OperatorCost(seconds_per_flop=1.0, seconds_per_byte=1.0))}}
    config = TrainConfig(micro_batch_size=2, activation_checkpointing="full")
    found = prediction(model, config, world_size=1, **hardware)
    assert found.seconds["forward"] == pytest.approx(0.3 * 10)
    assert found.seconds["forward"] + found.seconds["backward"] == pytest.approx(10, rel=0.01)
    assert found.seconds["recompute"] == pytest.approx(5)


def test_for_a_small_model_with_large_buckets_stage_0_needs_least() -> None:
    """Communication buffers can cost more than sharding saves."""
    model = model_profile()
    config = {"micro_batch_size": 1, "reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
    peaks = [prediction(model, TrainConfig.model_validate({**config, "zero_stage": stage}),
                        optimizer=OptimizerConfig(name="sgd")).peak_device_bytes for stage in (0, 2)]
    assert peaks[0] < peaks[1]


def test_gradients_converted_on_the_host_need_nothing_on_the_device() -> None:
    """bf16 gradients of a step of one micro-batch become fp32 for the update, a bucket at a time."""
    model = model_profile(activations=(ActivationBytes(checkpointing="none", precision="bf16", saved_per_sample=0,
                                                       peak_per_sample=0),))
    none, half, whole = (prediction(model, TrainConfig.model_validate({
        "precision": "bf16", "offload_optimizer_ratio": ratio, "reduce_bucket_size": 2_000_000}), world_size=1,
        device_type="cuda").device_bytes["buckets"] for ratio in (0.0, 0.5, 1.0))
    assert (none, half, whole) == (2_000_000 * 4, 1_000_000 * 4, 0)


def test_buckets_are_never_larger_than_the_model() -> None:
    model = model_profile()
    small, large = (prediction(model, TrainConfig.model_validate({"zero_stage": 2, "reduce_bucket_size": size}))
                    for size in (model.parameters, 10**12))
    assert small == large


class TestTime:
    def test_one_rank_spends_none_on_communication(self) -> None:
        config = TrainConfig.model_validate({"micro_batch_size": 8})
        model = model_profile(flops_per_sample=1e9, parameter_tensors=0)
        hardware = {"matmul_flops_per_second": {"fp32": 8e9}, "copy_bytes_per_second": 1e18}
        assert prediction(model, config, world_size=1, **hardware).step_seconds == pytest.approx(1.0)

    @pytest.mark.parametrize("counted", [False, True])
    def test_without_repeated_blocks_all_work_counts(self, counted: bool) -> None:
        """An MLP takes as long as a model of as many operations in blocks, and longer with larger micro-batches."""
        kinds: tuple[OperatorClass, ...] = ("product", "attention", "other")
        work = OperatorWork(flops_per_sample=3e9, bytes_per_sample=2e6, bytes_fixed=1e7, kernels=10)
        cost = OperatorCost(seconds_per_flop=1e-11, seconds_per_byte=1e-10)
        changes: dict[str, Any] = {"work": (PassWork(
            checkpointing="none", precision="fp32", operators=dict.fromkeys(kinds, work)),)} if counted else {}
        hardware = {"operators": {"fp32": dict.fromkeys(kinds, cost)}}
        repeated = model_profile(hidden=256, **changes)
        plain = model_profile(hidden=256, block_class=None, block_count=0, block_parameters=0, **changes)
        for name in ("forward", "backward"):
            small, large = (prediction(plain, TrainConfig(micro_batch_size=size), **hardware).seconds[name]
                            for size in (1, 16))
            assert large > 5 * small > 0
            assert large == prediction(repeated, TrainConfig(micro_batch_size=16), **hardware).seconds[name]

    def test_full_checkpointing_repeats_the_forward_pass(self) -> None:
        none, full = (prediction(
            model_profile(), TrainConfig.model_validate({"activation_checkpointing": choice})).seconds
            for choice in ("none", "full"))
        assert none["recompute"] == 0
        assert full["recompute"] == pytest.approx(full["forward"])
        assert full["forward"] == none["forward"]

    def test_stage_2_communicates_per_micro_batch_and_stage_1_per_step(self) -> None:
        def seconds(stage: int, steps: int) -> float:
            config = TrainConfig.model_validate({
                "zero_stage": stage, "micro_batch_size": 8 // steps, "precision": "bf16", "overlap_comm": False,
                "gradient_accumulation_steps": steps})
            value = prediction(model_profile(), config).seconds["data_exchange"]
            assert isinstance(value, float)
            return value

        assert seconds(1, 8) == seconds(1, 1)
        assert seconds(2, 8) > 4 * seconds(2, 1)

    def test_a_precision_without_a_measured_rate_has_no_time(self) -> None:
        assert prediction(model_profile(), TrainConfig.model_validate({"precision": "bf16"}),
                          matmul_flops_per_second={"fp32": 1e9}).step_seconds is None


def test_an_unprobed_choice_is_an_error() -> None:
    with pytest.raises(KeyError, match="no activation profile for checkpointing none, precision fp32"):
        prediction(model_profile(activations=()), TrainConfig.model_validate({}))


def test_neither_prediction_nor_search_loads_torch() -> None:
    code = ("import autotune.predict, autotune.search.suggest, autotune.search.choose, autotune.export, sys; "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
