"""Tensor and pipeline parallelism as terms: what always holds, and the papers' formulas."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.domain.prediction import Prediction
from autotune.predict import predict
from autotune.predict.cluster import bundled_cluster
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.predict.parallel import ALONE, Parallel, part_of
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from tests.predict.test_predict import STATES, configs, models
from tests.search.support import model_profile

GPT = decoder_profile(Decoder(layers=24, hidden=2048, heads=16, vocab=51_200, sequence_length=1024))
BF16: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 4, "gradient_accumulation_steps": 8}

shapes = st.builds(Parallel, tensor=st.sampled_from([1, 2, 4, 8]), pipeline=st.sampled_from([1, 2, 3, 4]))


def planned(config: TrainConfig | dict[str, Any], parallel: Parallel = ALONE, *, model: ModelProfile = GPT,
            devices: int = 64) -> Prediction:
    return predict(model, cluster(devices), OptimizerConfig(), TrainConfig.model_validate(config), parallel)


def cluster(devices: int) -> HardwareProfile:
    return bundled_cluster("a100-80gb").hardware(devices)


def fits(model: ModelProfile, parallel: Parallel) -> bool:
    return parallel.pipeline <= max(model.block_count, 1)


class TestProperties:
    @given(models(), configs(), shapes, st.sampled_from([1, 2, 8]))
    @settings(max_examples=200, deadline=None)
    def test_terms_are_not_negative_and_sum_to_the_totals(self, model: ModelProfile, config: TrainConfig,
                                                          parallel: Parallel, copies: int) -> None:
        if not fits(model, parallel):
            return
        found = planned(config, parallel, model=model, devices=copies * parallel.tensor * parallel.pipeline)
        assert min(*found.device_bytes.values(), *found.host_bytes.values(), *found.seconds.values()) >= 0
        assert found.peak_device_bytes == sum(found.device_bytes.values())
        assert found.step_seconds == pytest.approx(sum(found.seconds.values()))

    @given(models(), configs(), shapes, st.sampled_from([1, 2, 8]))
    @settings(max_examples=200, deadline=None)
    def test_parts_of_all_devices_are_at_least_one_full_copy(self, model: ModelProfile, config: TrainConfig,
                                                             parallel: Parallel, copies: int) -> None:
        if not fits(model, parallel):
            return
        devices = copies * parallel.tensor * parallel.pipeline
        alone = planned(config.model_copy(update={"zero_stage": 0, "offload_param": False}), model=model, devices=1)
        part = planned(config, parallel, model=model, devices=devices)
        for name in STATES:
            held = devices * (part.device_bytes[name] + part.host_bytes.get(name, 0))
            # rounding of the offloaded share to whole elements, on every device
            assert held + 16 * devices >= alone.device_bytes[name] + alone.host_bytes.get(name, 0)

    @given(models(), configs(), shapes, st.sampled_from([(0, 1), (1, 2), (2, 3)]))
    @settings(max_examples=200, deadline=None)
    def test_a_higher_stage_and_a_larger_degree_never_hold_more_state(
            self, model: ModelProfile, config: TrainConfig, parallel: Parallel, stages: tuple[int, int]) -> None:
        def held(stage: int, shape: Parallel) -> int:
            found = planned(config.model_copy(update={"zero_stage": stage, "offload_param": False}), shape,
                            model=model, devices=2 * shape.tensor * shape.pipeline)
            return sum(found.device_bytes[name] + found.host_bytes.get(name, 0) for name in STATES)

        if not fits(model, parallel):
            return
        lower, higher = stages
        assert held(higher, parallel) <= held(lower, parallel)
        assert held(lower, parallel) <= held(lower, ALONE)

    @given(models(), configs(), st.sampled_from([8, 16, 64, 512]))
    @settings(max_examples=100, deadline=None)
    def test_degrees_of_one_are_no_parallelism(self, model: ModelProfile, config: TrainConfig, devices: int) -> None:
        found = planned(config, Parallel(tensor=1, pipeline=1), model=model, devices=devices)
        assert found == predict(model, cluster(devices), OptimizerConfig(), config)
        assert (found.seconds["tensor_exchange"], found.seconds["pipeline_bubble"],
                found.seconds["pipeline_transfer"]) == (0, 0, 0)

    @given(configs(), shapes)
    @settings(max_examples=100, deadline=None)
    def test_more_work_takes_longer(self, config: TrainConfig, parallel: Parallel) -> None:
        less, more = (planned(config.model_copy(update={"gradient_accumulation_steps": steps}), parallel,
                              devices=2 * parallel.tensor * parallel.pipeline).step_seconds for steps in (2, 3))
        assert less is not None
        assert more is not None
        assert less < more


class TestPart:
    def test_a_stage_holds_its_blocks_and_what_is_outside(self) -> None:
        model = model_profile()  # 4 blocks of 790,000 of 4,300,000 parameters
        part = part_of(model, Parallel(pipeline=2))
        assert (part.parameters, part.block_count) == (4_300_000 - 2 * 790_000, 2)
        assert part_of(model, Parallel(pipeline=3)).block_count == 2
        assert part_of(model, Parallel(tensor=4)).parameters == 4_300_000 // 4

    def test_of_unequal_blocks_the_largest_run_decides(self) -> None:
        """Four stages of a Swin: 1 M outside, blocks of 1, 1, 4, 4, 4, 4, 16 and 16 M."""
        sizes = [size * 10**6 for size in (1, 1, 4, 4, 4, 4, 16, 16)]
        model = model_profile(parameters=51 * 10**6, trainable_parameters=51 * 10**6, block_count=8,
                              block_parameters=16 * 10**6, block_sizes=sizes)
        held = {stages: part_of(model, Parallel(pipeline=stages)).parameters for stages in (1, 2, 4, 8)}
        assert held == {1: 51 * 10**6, 2: 41 * 10**6, 4: 33 * 10**6, 8: 17 * 10**6}
        middle = part_of(model.model_copy(update={"block_sizes": (*sizes[:3], *sizes[5:], *sizes[3:5])}),
                         Parallel(tensor=2, pipeline=4))
        assert (middle.parameters, middle.block_sizes) == (33 * 10**6 // 2, (8 * 10**6, 8 * 10**6))

    @given(models(), st.sampled_from([1, 2, 4]))
    @settings(max_examples=100, deadline=None)
    def test_more_stages_never_hold_more_each_nor_less_than_the_model_together(self, model: ModelProfile,
                                                                               tensor: int) -> None:
        before = part_of(model, Parallel(tensor=tensor))
        for stages in range(2, model.block_count + 1):
            part = part_of(model, Parallel(tensor=tensor, pipeline=stages))
            for name in ("parameters", "trainable_parameters", "block_count"):
                assert 0 < getattr(part, name) <= getattr(before, name)
                assert tensor * stages * getattr(part, name) >= getattr(model, name)
            before = part

    def test_more_stages_than_blocks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="5 pipeline stages need as many blocks; the model has 4"):
            part_of(model_profile(), Parallel(pipeline=5))

    def test_devices_are_a_multiple_of_a_copys(self) -> None:
        with pytest.raises(ValueError, match="12 devices are not a multiple of tensor 4 x pipeline 2"):
            planned(BF16, Parallel(tensor=4, pipeline=2), devices=12)


class TestMemory:
    def test_tensor_parallelism_cuts_24_of_34_bytes_of_activations(self) -> None:
        """arXiv 2205.05198, equation 2, with dropout and without the matrix of scores: s b h (10 + 24 / t) a layer."""
        decoder = Decoder(layers=4, hidden=1024, heads=16, vocab=1, sequence_length=512, dropout=True)
        one, eight = (planned(BF16, Parallel(tensor=tensor), model=decoder_profile(decoder)).device_bytes["activations"]
                      for tensor in (1, 8))
        assert one == pytest.approx(4 * 4 * 512 * 1024 * 34, rel=1e-3)
        assert eight == pytest.approx(4 * 4 * 512 * 1024 * (10 + 24 / 8), rel=1e-3)

    def test_without_repeated_blocks_each_device_of_a_tensor_group_has_its_part_of_all(self) -> None:
        """Of activations, time and parameter tensors alike."""
        model = model_profile(block_class=None, block_count=0, block_parameters=0)
        one, four = (planned(BF16, Parallel(tensor=tensor), model=model) for tensor in (1, 4))
        assert four.device_bytes["activations"] == one.device_bytes["activations"] // 4 > 0
        assert one.seconds["forward"] > four.seconds["forward"] > one.seconds["forward"] / 8
        assert part_of(model, Parallel(tensor=4)).parameter_tensors == model.parameter_tensors

    def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages(self) -> None:
        decoder = decoder_profile(Decoder(layers=8, hidden=1024, heads=16, vocab=1, sequence_length=512))
        kept = [planned({**BF16, "gradient_accumulation_steps": steps}, Parallel(pipeline=4),
                        model=decoder).device_bytes["activations"] for steps in (1, 2, 4, 8)]
        assert kept[1] == pytest.approx(2 * kept[0], rel=1e-3)
        assert kept[2] == pytest.approx(4 * kept[0], rel=1e-3)
        assert kept[3] == kept[2]


class TestTime:
    def test_the_bubble_is_p_minus_1_turns(self) -> None:
        """arXiv 2104.04473, section 2.2: (p - 1) / m of the ideal time, where stages are equal."""
        body = GPT.model_copy(update={"vocab": 0})  # nothing after the last block
        for stages, steps in ((2, 4), (4, 8), (8, 8)):
            found = planned({**BF16, "gradient_accumulation_steps": steps}, Parallel(pipeline=stages), model=body)
            ideal = sum(found.seconds[name] for name in ("forward", "backward", "pipeline_transfer"))
            assert found.seconds["pipeline_bubble"] == pytest.approx((stages - 1) / steps * ideal)

    def test_tensor_parallelism_reduces_four_activations_a_block(self) -> None:
        """arXiv 1909.08053, figure 4; and two outside of blocks."""
        tokens, steps = 4 * 1024, 8
        size = tokens * 2048 * 2
        each = 2 * 7 / 8 * size / 230e9 + 3 * 5e-5
        assert planned(BF16, Parallel(tensor=8)).seconds["tensor_exchange"] == pytest.approx(
            steps * (4 * 24 + 2) * each)
        full = planned({**BF16, "activation_checkpointing": "full"}, Parallel(tensor=8))
        assert full.seconds["tensor_exchange"] == pytest.approx(steps * (6 * 24 + 2) * each)

    def test_tensor_parallelism_across_nodes_is_far_slower(self) -> None:
        inside, across = (planned(BF16, Parallel(tensor=tensor)).seconds["tensor_exchange"] for tensor in (8, 16))
        assert across > 1.1 * inside

    def test_groups_side_by_side_share_the_network(self) -> None:
        """With 8 groups of data parallelism in each node, each has an eighth of the adapters, for an eighth of it."""
        config = {**BF16, "overlap_comm": False, "reduce_bucket_size": 10**10}
        alone, side_by_side = (planned(config, Parallel(tensor=tensor)).seconds["data_exchange"] for tensor in (1, 8))
        shares = (63 / 64, 7 / 8)
        assert (side_by_side - 3e-4) / shares[1] == pytest.approx((alone - 6e-4) / shares[0], rel=1e-3)

    def test_small_products_are_less_efficient(self) -> None:
        """Twice the samples in a micro-batch take less than twice the time."""
        one, two = (planned({**BF16, "micro_batch_size": size}).seconds["forward"] for size in (1, 2))
        assert one < two < 2 * one

    def test_an_odd_vocabulary_is_slow_on_an_accelerator(self) -> None:
        odd, even = (planned(BF16, model=decoder_profile(Decoder(
            layers=1, hidden=1024, heads=16, vocab=vocab, sequence_length=1024))).seconds["forward"]
            for vocab in (50_257, 50_304))
        assert odd > 1.2 * even

    def test_hidden_communication_still_costs_something(self) -> None:
        plain, beside = (planned({**BF16, "zero_stage": 1, "overlap_comm": overlap}).seconds["data_exchange"]
                         for overlap in (False, True))
        assert 0 < beside <= plain / 2


class TestCluster:
    @pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100-80gb", "h200-141gb", "v100-32gb"])
    def test_bundled_ones_stay_under_the_data_sheets_peak_and_say_where_figures_are_from(self, name: str) -> None:
        described = bundled_cluster(name)
        assert described.name == name
        for precision, rate in described.matmul_flops_per_second.items():
            assert 0.7 < rate / described.matmul_peak_flops_per_second[precision] < 0.95
        assert set(described.sources) >= {"memory_bytes", "matmul_flops_per_second", "copy_bytes_per_second"}

    @pytest.mark.parametrize(("name", "peak"), [
        ("a100-40gb", 19.5e12), ("a100-80gb", 19.5e12), ("h100-80gb", 67e12), ("h200-141gb", 67e12),
        ("v100-32gb", 15.7e12)])
    def test_fp32_is_not_tf32(self, name: str, peak: float) -> None:
        """As torch computes matrix products unless it is told otherwise, which the engine does not."""
        described = bundled_cluster(name)
        assert described.matmul_peak_flops_per_second["fp32"] == peak
        assert "fp32 without tensor cores" in described.sources["matmul_peak_flops_per_second"]

    def test_an_fp32_step_takes_as_long_as_its_products_without_tensor_cores(self) -> None:
        found = planned({**BF16, "precision": "fp32"}, devices=1).seconds
        products = 8 * 4 * GPT.flops_per_sample / 19.5e12
        assert products < found["forward"] + found["backward"] < 1.4 * products

    def test_nodes_fill_one_by_one(self) -> None:
        half, two = (bundled_cluster("h100-80gb").hardware(devices) for devices in (4, 16))
        assert (half.world_size, two.world_size) == (4, 16)
        assert two.host_memory_bytes == 2 * half.host_memory_bytes
        assert half.fingerprint != two.fingerprint

    def test_an_unknown_one_is_an_error_that_names_the_others(self) -> None:
        with pytest.raises(KeyError, match="no bundled cluster x; there are a100-40gb, a100-80gb"):
            bundled_cluster("x")


def test_a_decoders_profile_is_that_of_the_papers_formulas() -> None:
    """GPT-3: 175 billion parameters; operations per token of arXiv 2104.04473, equation 3, without recomputation."""
    layers, hidden, vocab, length = 96, 12_288, 51_200, 2048
    model = decoder_profile(Decoder(layers=layers, hidden=hidden, heads=96, vocab=vocab, sequence_length=length))
    assert model.parameters == pytest.approx(175e9, rel=0.01)
    assert model.flops_per_sample == pytest.approx(
        72 * length * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * hidden * layers)), rel=1e-9)
