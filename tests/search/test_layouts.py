"""Plans for a cluster: layouts of tensor, pipeline and data parallelism, ranked together."""

from pathlib import Path
from typing import Any

import pytest

from autotune.domain.errors import InvalidRequestError
from autotune.domain.request import StudyRequest
from autotune.predict import predict
from autotune.predict.cluster import bundled_cluster
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.predict.parallel import Parallel
from autotune.search.layouts import ClusterPlan, check_layouts, plan_cluster
from engine.config import OptimizerConfig
from engine.profile import ModelProfile
from engine.spec import HuggingFaceSpec

SPACE: dict[str, Any] = {"zero_stage": [0, 1, 2], "micro_batch_size": "auto", "precision": ["bf16"]}
MODEL = decoder_profile(Decoder(layers=4, hidden=512, heads=8, vocab=50_304, sequence_length=512))


def plan_request(*, devices: int = 16, global_batch_size: int = 64, cluster: Any = "a100-80gb",
                 space: dict[str, Any] | None = SPACE, baseline: dict[str, Any] | None = None,
                 **hardware: Any) -> StudyRequest:
    return StudyRequest.model_validate({
        "name": "planned", "mode": "plan",
        "model": {"kind": "gpt", "layers": 4, "hidden": 512, "heads": 8, "vocab": 50_304, "sequence_length": 512},
        "training": {"global_batch_size": global_batch_size},
        "hardware": {"devices": devices, "cluster": cluster, **hardware},
        "search": {"space": space, "baseline": baseline}})


def planned(model: ModelProfile = MODEL, **changes: Any) -> ClusterPlan:
    return plan_cluster(plan_request(**changes), model)


def layouts_of(plan: ClusterPlan) -> set[tuple[int, int, int]]:
    return {(each.parallel.tensor, each.parallel.pipeline, each.space.world_size) for each in plan.plans}


class TestWhich:
    def test_only_data_parallelism_unless_more_is_asked_for(self) -> None:
        assert layouts_of(planned()) == {(1, 1, 16)}

    def test_auto_is_all_that_divide_heads_within_a_node_blocks_and_devices(self) -> None:
        plan = planned(tensor_parallel="auto", pipeline_parallel="auto")
        assert layouts_of(plan) == {(tensor, pipeline, 16 // (tensor * pipeline)) for tensor in (1, 2, 4, 8)
                                    for pipeline in (1, 2, 4) if tensor * pipeline <= 16}
        assert plan.left_out == {}, "what nobody named is not told of"

    def test_three_heads_have_no_even_degree(self) -> None:
        model = MODEL.model_copy(update={"heads": 6})
        assert layouts_of(planned(model, tensor_parallel="auto")) == {(1, 1, 16), (2, 1, 8)}

    def test_named_degrees_that_cannot_be_are_left_out_with_the_reason(self) -> None:
        plan = planned(tensor_parallel=[1, 3, 16], pipeline_parallel=[1, 3])
        assert layouts_of(plan) == {(1, 1, 16)}
        assert plan.left_out == {"tensor_parallel 3 does not stay inside a node of 8 devices": 2,
                                 "tensor_parallel 16 does not stay inside a node of 8 devices": 2,
                                 "pipeline_parallel 3 does not divide the model's 4 blocks": 1}
        assert plan.summary.rejections.items() >= plan.left_out.items()

    def test_a_batch_smaller_than_the_devices_is_planned_with_fewer_copies(self) -> None:
        plan = planned(global_batch_size=4, tensor_parallel="auto")
        assert layouts_of(plan) == {(4, 1, 4), (8, 1, 2)}
        with pytest.raises(InvalidRequestError, match="4 not divisible by 16"):
            planned(global_batch_size=4)

    def test_a_baselines_accumulation_follows_the_layout(self) -> None:
        plan = planned(tensor_parallel=[1, 4], baseline={"micro_batch_size": 2, "gradient_accumulation_steps": 2},
                       space={"zero_stage": [1]})
        assert {(each.parallel.tensor, candidate.config.gradient_accumulation_steps) for each in plan.plans
                for candidate in each.candidates} == {(1, 2), (4, 8)}

    def test_before_the_model_is_known_what_can_be_checked_is(self) -> None:
        check_layouts(plan_request(tensor_parallel="auto", global_batch_size=2))
        for changes, field, text in (
                ({"tensor_parallel": 16}, "hardware.tensor_parallel", "node of 8"),
                ({"pipeline_parallel": [3]}, "hardware.pipeline_parallel", "4 blocks"),
                ({"global_batch_size": 3, "tensor_parallel": [1, 2]}, "training.global_batch_size", "3 not divisible")):
            with pytest.raises(InvalidRequestError, match=text) as raised:
                check_layouts(plan_request(**changes))
            assert [error.field for error in raised.value.errors] == [field]

    @pytest.mark.parametrize("devices", [64, 128, 256, 512])
    def test_the_example_can_be_planned_on_more_devices_too(self, devices: int) -> None:
        example = Path(__file__).parents[2] / "examples" / "plan.json"
        request = StudyRequest.model_validate_json(example.read_text())
        check_layouts(request.model_copy(update={
            "hardware": request.hardware.model_copy(update={"devices": devices})}))

    def test_all_layouts_together_have_a_bounded_number_of_points(self) -> None:
        # 11 layouts of at most 11,000 points: each alone may be planned
        space = {"zero_stage": [0], "precision": ["bf16"], "reduce_bucket_size": [*range(1_000, 12_000)]}
        asked = {"space": space, "tensor_parallel": "auto", "pipeline_parallel": "auto"}
        check_layouts(plan_request(**asked | {"tensor_parallel": 1}))
        for refuse in (lambda: check_layouts(plan_request(**asked)), lambda: planned(**asked)):
            with pytest.raises(InvalidRequestError, match="more than 100,000 configurations over all") as raised:
                refuse()
            assert [error.field for error in raised.value.errors] == [
                "search.space", "hardware.tensor_parallel", "hardware.pipeline_parallel"]


class TestRanking:
    def test_every_row_is_what_the_predictor_says_of_its_degrees(self) -> None:
        plan = planned(tensor_parallel="auto", pipeline_parallel="auto")
        hardware = bundled_cluster("a100-80gb").hardware(16)
        for point in plan.summary.rows:
            assert point.tensor_parallel * point.pipeline_parallel * (point.data_parallel or 0) == 16
            batch = point.config.micro_batch_size * point.config.gradient_accumulation_steps
            assert batch * (point.data_parallel or 0) == 64
            assert point.prediction == predict(
                MODEL, hardware, OptimizerConfig(), point.config,
                Parallel(tensor=point.tensor_parallel, pipeline=point.pipeline_parallel))

    def test_all_layouts_are_ranked_together_and_the_best_of_each_beside(self) -> None:
        summary = planned(tensor_parallel=[1, 8], pipeline_parallel=[1, 2]).summary
        seconds = [point.prediction.step_seconds or 0.0 for point in summary.fastest]
        assert seconds == sorted(seconds)
        assert len(seconds) == 20
        assert summary.layouts[0] == summary.fastest[0]
        assert {(point.tensor_parallel, point.pipeline_parallel) for point in summary.layouts} == {
            (1, 1), (1, 2), (8, 1), (8, 2)}
        assert summary.first_exportable is not None
        assert summary.rows[summary.first_exportable - 1].runs_here

    def test_rows_that_differ_in_buckets_and_overlap_only_are_one_the_best(self) -> None:
        plan = planned(space=None, devices=8)
        kept = [point.config.model_dump(exclude={"reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size",
                                                 "overlap_comm"}) for point in plan.summary.fastest]
        assert len(kept) == 20
        assert all(kept.count(config) == 1 for config in kept)
        fastest = min(candidate.prediction.step_seconds or 0.0 for candidate in plan.plans[0].candidates)
        assert plan.summary.fastest[0].prediction.step_seconds == fastest

    def test_utilization_is_of_the_data_sheets_peak(self) -> None:
        point = planned().summary.fastest[0]
        assert point.prediction.step_seconds is not None
        assert point.samples_per_second == pytest.approx(64 / point.prediction.step_seconds)
        assert point.tokens_per_second == pytest.approx(512 * 64 / point.prediction.step_seconds)
        assert point.model_flops_utilization == pytest.approx(
            MODEL.flops_per_sample * 64 / point.prediction.step_seconds / 16 / 312e12)

    def test_pipelines_go_with_stages_0_and_1(self) -> None:
        plan = planned(pipeline_parallel=[2])
        assert {candidate.config.zero_stage for candidate in plan.plans[0].candidates} == {0, 1}
        assert any(reason.startswith("zero_stage 2 does not go with pipeline_parallel")
                   for reason in plan.summary.rejections)

    def test_memory_is_held_against_the_clusters_or_the_requests_limit(self) -> None:
        assert planned().summary.device_limit_bytes == 85_000_000_000
        small = planned(memory_limit_bytes=10**8)
        assert small.summary.device_limit_bytes == 10**8
        assert small.why_empty is not None
        assert 'hardware.tensor_parallel and pipeline_parallel "auto" share one copy' in small.why_empty


class TestCluster:
    def test_one_of_the_users_own_is_planned_with_its_figures(self) -> None:
        own = bundled_cluster("a100-80gb").model_dump(mode="json")
        own |= {"name": "lab", "memory_bytes": 10**9, "links": own["links"] | {"devices_per_node": 4}}
        plan = planned(cluster=own, tensor_parallel="auto")
        assert plan.summary.device_limit_bytes == 10**9
        assert max(each.parallel.tensor for each in plan.plans) == 4

    def test_dimensions_are_those_of_the_probe(self) -> None:
        assert planned().plans[0].model == MODEL
        assert "attention" not in planned().note
        unseen = MODEL.model_copy(update={"heads": 0, "hidden": 0, "vocab": 0})
        plan = planned(unseen)
        assert plan.plans[0].model == unseen
        assert "saw no attention" in plan.note
        assert "matrix products 513 wide" in plan.note  # guessed from a block's parameters

    def test_degrees_that_do_not_divide_named_heads_are_refused_before_the_probe(self) -> None:
        request = plan_request(tensor_parallel=2)
        for name, heads, allowed in (("n_head", 3, False), ("num_attention_heads", 4, True), ("other", 3, True)):
            spec = HuggingFaceSpec(kind="huggingface", config={"model_type": "gpt2", name: heads})
            asked = request.model_copy(update={"model": spec})
            if allowed:
                check_layouts(asked)
            else:
                with pytest.raises(InvalidRequestError, match="3 attention heads"):
                    check_layouts(asked)
