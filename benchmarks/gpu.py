"""The engine on one GPU: step time, utilisation, and peak bytes against their prediction.

    python -m benchmarks.gpu [--json FILE]

Trials of a GPT with 0.35 billion parameters as a study runs them, at world size 1, where nothing is sent and all else
is the same: one change at a time to stage 2 in bf16. `of matmul` is the model's operations per second, recomputation
left out, as a share of the best rate that a matrix product in the same precision reached on this device; TF32 is as
torch has it by default, off. The prediction is the one by which a study drops configurations before it tries them.
Ends with 1 where a trial fails other than by lack of memory.
"""

import asyncio
import sys
from contextlib import aclosing

from autotune.domain.errors import LaunchError
from autotune.domain.prediction import Prediction
from autotune.predict import predict
from autotune.scheduler.launcher.local import LocalLauncher
from benchmarks import report
from benchmarks.trials import reports, trial
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    MeasurePolicy,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialReport,
    WorkerRequest,
)
from engine.spec import GptSpec

MODEL = GptSpec(kind="gpt", layers=24, hidden=1024, heads=16, vocab=50304, sequence_length=1024)
BASE: dict[str, object] = {"zero_stage": 2, "precision": "bf16", "micro_batch_size": 8}
CHANGES: tuple[dict[str, object], ...] = (
    {}, {"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3},
    {"precision": "fp32"}, {"precision": "fp16"},
    {"offload_optimizer_ratio": 0.5}, {"offload_optimizer_ratio": 1.0},
    {"zero_stage": 3, "offload_optimizer_ratio": 1.0, "offload_param": True},
    {"activation_checkpointing": "selective"}, {"activation_checkpointing": "full"},
    {"compile": True}, {"compile": True, "activation_checkpointing": "selective"},
)
POLICY = MeasurePolicy(max_seconds=20)


def config_of(change: dict[str, object]) -> TrainConfig:
    return TrainConfig.model_validate({**BASE, **change})


async def measure(launcher: LocalLauncher, model: GptSpec, changes: tuple[dict[str, object], ...]) -> list[report.Row]:
    """A row for each change; outcomes are printed as they come.

    Raises:
        RuntimeError: the model could not be probed, or the device not be calibrated.
    """
    configs = [config_of(change) for change in changes]
    requests: list[WorkerRequest] = [ProbeRequest(model=model), CalibrateRequest(),
                                     *(trial(model, config, POLICY) for config in configs)]
    rows = []
    async with aclosing(reports(launcher, requests)) as arriving:
        probed, calibrated = await anext(arriving), await anext(arriving)
        if not isinstance(probed, ProbeReport) or not isinstance(calibrated, CalibrateReport):
            raise RuntimeError(f"nothing to compare trials with: {probed}, {calibrated}")
        for change, config in zip(changes, configs, strict=True):
            found = await anext(arriving)
            assert isinstance(found, TrialReport)
            print(f"{_name(change)}: {found.outcome} {found.detail}", flush=True)
            rows.append(row_of(change, found, config, probed.profile, calibrated.profile))
    return rows


def row_of(change: dict[str, object], found: TrialReport, config: TrainConfig, model: ModelProfile,
           hardware: HardwareProfile) -> report.Row:
    """One trial beside what was expected of it; no numbers where it yielded none."""
    expected: Prediction = predict(model, hardware, OptimizerConfig(), config)
    row: dict[str, report.Value] = {
        "change": _name(change), "outcome": found.outcome.value, "step ms": None, "TFLOP/s": None, "of matmul": None,
        "peak GiB": None, "predicted GiB": expected.peak_device_bytes / 2**30, "peak / predicted": None,
        "host GiB": None, "predicted host GiB": expected.peak_host_bytes / 2**30}
    if found.measurement is not None:
        seconds = sum(found.measurement.step_seconds) / len(found.measurement.step_seconds)
        rate = flops_per_second(model, config, step_seconds=seconds)
        best = hardware.matmul_flops_per_second.get(config.precision)
        peak = found.measurement.peak_device_bytes
        row |= {"step ms": 1e3 * seconds, "TFLOP/s": rate / 1e12,
                "of matmul": rate / best if best else None,
                "peak GiB": peak / 2**30, "peak / predicted": peak / expected.peak_device_bytes,
                "host GiB": found.measurement.peak_host_bytes / 2**30}
    return row


def flops_per_second(model: ModelProfile, config: TrainConfig, *, step_seconds: float) -> float:
    """The model's own operations, forward and backward, over the time of a step on one device."""
    return model.flops_per_sample * config.global_batch_size(1) / step_seconds


def _name(change: dict[str, object]) -> str:
    return " ".join(f"{field}={value}" for field, value in change.items()) or "none"


def main() -> int:
    options = report.parser(__doc__).parse_args()
    try:
        launcher = LocalLauncher(device_type="cuda")
    except LaunchError as error:
        print(f"skipped: {error}")
        return 0
    print(f"{launcher.device_name}; to each the change is made alone: {BASE}")
    rows = asyncio.run(measure(launcher, MODEL, CHANGES))
    print(report.table(rows))
    report.write(rows, options.json)
    expected = {Outcome.OK.value, Outcome.OOM_DEVICE.value, Outcome.OOM_HOST.value}
    return int(any(row["outcome"] not in expected for row in rows))


if __name__ == "__main__":
    sys.exit(main())
