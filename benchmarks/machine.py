"""Configurations tried on this machine beside what was predicted of them; part of `benchmarks.predict`."""

import random
from contextlib import aclosing
from itertools import product
from statistics import median

import numpy as np
from scipy.stats import spearmanr

from autotune.domain.prediction import Prediction
from autotune.predict import predict
from autotune.scheduler.launcher.local import LocalLauncher
from autotune.search.plan import device_bytes_to_allow
from benchmarks import report
from benchmarks.trials import reports, trial
from engine.config import OptimizerConfig, TrainConfig
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    MeasurePolicy,
    ProbeReport,
    ProbeRequest,
    TrialReport,
    WorkerRequest,
)
from engine.spec import GptSpec, HuggingFaceSpec, ModelSpec, VitSpec

MODELS: dict[str, ModelSpec] = {
    "gpt": GptSpec(kind="gpt", layers=6, hidden=512, heads=8, vocab=8192, sequence_length=64),
    "vit": VitSpec(kind="vit", layers=6, hidden=512, heads=8, image_size=64, patch_size=8, classes=100),
    "llama": HuggingFaceSpec(kind="huggingface", sequence_length=64, config={
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8192, "hidden_size": 512,
        "intermediate_size": 1376, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
        "max_position_embeddings": 64, "tie_word_embeddings": True}),
}
DEVICES = 2
SAMPLES = 8
"""Per rank and step, in every configuration, so that step times can be compared."""
CONFIGURATIONS = 22
"""Of each model."""
MOST = {"failed": 0.0, "median peak error %": 3.0, "95th percentile %": 8.0, "over the limit %": 3.0}
"""Of all configurations together."""
LEAST_CORRELATION = 0.9
"""Of predicted and measured step times of each model."""
POLICY = MeasurePolicy(max_warmup_steps=3, max_steps=4)


def drawn(count: int, *, seed: int = 0) -> list[TrainConfig]:
    """Different configurations of the same global batch, the same ones for the same seed."""
    space = list(product((0, 1, 2, 3), (1, 2, 4, 8), ("fp32", "bf16"), ("none", "selective", "full"),
                         (500_000, 2_000_000, 10_000_000), (False, True), (0.0, 1.0)))
    chosen = random.Random(seed).sample(space, count)
    return [TrainConfig.model_validate({
        "zero_stage": stage, "micro_batch_size": micro, "gradient_accumulation_steps": SAMPLES // micro,
        "precision": precision, "activation_checkpointing": checkpointing, "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket, "overlap_comm": overlap, "offload_optimizer_ratio": offload,
    }) for stage, micro, precision, checkpointing, bucket, overlap, offload in chosen]


async def measure(launcher: LocalLauncher, models: dict[str, ModelSpec], configs: list[TrainConfig]
                  ) -> list[report.Row]:
    """A row for each configuration of each model, all in one warm group.

    Raises:
        RuntimeError: the hardware could not be calibrated, or a model not be probed.
    """
    requests: list[WorkerRequest] = [CalibrateRequest()]
    for spec in models.values():
        requests += [ProbeRequest(model=spec), *(trial(spec, config, POLICY, devices=DEVICES) for config in configs)]
    rows: list[report.Row] = []
    async with aclosing(reports(launcher, requests, devices=DEVICES)) as arriving:
        calibrated = await anext(arriving)
        if not isinstance(calibrated, CalibrateReport):
            raise RuntimeError(f"the hardware could not be calibrated: {calibrated}")
        for name in models:
            probed = await anext(arriving)
            if not isinstance(probed, ProbeReport):
                raise RuntimeError(f"{name} could not be probed: {probed}")
            for config in configs:
                found = await anext(arriving)
                assert isinstance(found, TrialReport)
                expected = predict(probed.profile, calibrated.profile, OptimizerConfig(), config)
                rows.append(row_of(name, config, found, expected))
    return rows


def row_of(model: str, config: TrainConfig, found: TrialReport, expected: Prediction) -> report.Row:
    """One configuration; no measured values where its trial did not end well."""
    measured = found.measurement
    return {
        "part": "machine", "model": model, "outcome": found.outcome.value, "stage": config.zero_stage,
        "micro-batch": config.micro_batch_size, "precision": config.precision,
        "checkpointing": config.activation_checkpointing, "bucket": config.reduce_bucket_size,
        "overlap": config.overlap_comm, "offload": config.offload_optimizer_ratio,
        "step ms": None if measured is None else 1000 * median(measured.step_seconds),
        "predicted ms": None if expected.step_seconds is None else 1000 * expected.step_seconds,
        "peak MiB": None if measured is None else report.mib(measured.peak_device_bytes),
        "predicted MiB": report.mib(expected.peak_device_bytes),
        "lowest limit MiB": report.mib(device_bytes_to_allow(expected))}


def summaries(rows: list[report.Row]) -> list[report.Row]:
    """Of each model and of all: how well step times are ordered, and how far peaks are off.

    `over the limit` is by how much the worst peak exceeds the lowest limit under which a study would call its
    configuration feasible.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    return [_summary(str(name or "all"), [row for row in rows if name in (None, row["model"])])
            for name in (*models, None)]


def _summary(name: str, rows: list[report.Row]) -> report.Row:
    timed = [row for row in rows if row["step ms"] is not None and row["predicted ms"] is not None]
    peaks, predicted, limits = (np.array([row[name] for row in timed], float) for name in (
        "peak MiB", "predicted MiB", "lowest limit MiB"))
    errors, over = abs(predicted / peaks - 1), peaks / limits
    return {"model": name, "configurations": len(timed), "failed": len(rows) - len(timed),
            "step correlation": _correlation(timed) if name != "all" else None,
            "median peak error %": float(100 * np.median(errors)),
            "95th percentile %": float(100 * np.percentile(errors, 95)),
            "over the limit %": float(100 * max(over.max() - 1, 0.0))}


def _correlation(rows: list[report.Row]) -> float:
    return float(spearmanr([row["predicted ms"] for row in rows], [row["step ms"] for row in rows]).statistic)
