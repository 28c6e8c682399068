"""A plan for hardware that nobody here has: a 7B decoder on 64 A100."""

from functools import cache
from typing import Any

from autotune.domain.request import StudyRequest
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.search.layouts import ClusterPlan, plan_cluster


def plan_request(*, degrees: Any = "auto", **hardware: Any) -> StudyRequest:
    return StudyRequest.model_validate({
        "name": "gpt-7b", "mode": "plan",
        "model": {"kind": "gpt", "layers": 32, "hidden": 4096, "heads": 32, "vocab": 50_304, "sequence_length": 2048},
        "training": {"global_batch_size": 512},
        "hardware": {"devices": 64, "cluster": "a100-80gb", "tensor_parallel": degrees, "pipeline_parallel": degrees,
                     **hardware},
        "search": {"space": {"zero_stage": [1, 3], "micro_batch_size": "auto", "precision": ["bf16"],
                             "activation_checkpointing": ["none", "full"], "offload_optimizer_ratio": [0, 1]}}})


@cache
def cluster_plan(degrees: str = "auto") -> ClusterPlan:
    """Of `plan_request`; made once, as it takes a moment."""
    return plan_cluster(plan_request(degrees=degrees if degrees == "auto" else int(degrees)), decoder_profile(Decoder(
        layers=32, hidden=4096, heads=32, vocab=50_304, sequence_length=2048)))
