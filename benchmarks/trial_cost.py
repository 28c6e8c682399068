"""What a trial costs beside the steps that it measures: in warm workers, in a group of its own, and relaunched.

    python -m benchmarks.trial_cost [--json FILE] [--rounds N]

The same trials of the benchmark GPT on two CPU ranks, in turns:

- warm: in one group that stays, as a study runs them;
- fresh: in a group of the same launcher that is started for each and closed after it;
- relaunched: as many steps under `torchrun`, whose ranks import, join, build and train, and measure nothing: the least
  that a tuner pays which starts the user's own command for each trial.

Outside seconds are the wall time from the order to the result, less the measured steps: set-up, warm-up steps and all
that goes between processes; start and end of what is started. Those of a relaunch are less the steps that the fresh
trial measured, as it times none. The suggestion, which `benchmarks.search` times, comes on top. The first trial in the
warm group is left out.

Ends with 1 where the median is 1.5 s or more, or a fresh group costs less than 5 times as much: that a relaunch costs
more does not make up for it.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from autotune.scheduler.launcher.base import Report
from autotune.scheduler.launcher.local import LocalLauncher
from benchmarks import report
from benchmarks.trials import DEADLINE_SECONDS, trial
from engine.config import TrainConfig
from engine.report import MeasurePolicy, TrialReport, TrialRequest
from engine.run_file import RunFile
from engine.spec import GptSpec

MODEL = GptSpec(kind="gpt", layers=6, hidden=512, heads=8, vocab=8192, sequence_length=256)
CONFIGS = tuple(TrainConfig(zero_stage=stage, micro_batch_size=2, precision=precision)
                for stage in (0, 1, 3) for precision in ("fp32", "bf16"))
POLICY = MeasurePolicy(max_steps=8)
DEVICES = 2
MOST_SECONDS = 1.5
LEAST_FACTOR = 5.0


async def cost(*, configs: Sequence[TrainConfig], rounds: int,
               model: GptSpec = MODEL, policy: MeasurePolicy = POLICY) -> list[report.Row]:
    """A row for each configuration and round: warm, fresh and relaunched in turns.

    Raises:
        RuntimeError: a trial or torchrun did not end well.
    """
    requests = [trial(model, config, policy, devices=DEVICES) for config in configs]
    stays, starts = (LocalLauncher(device_type="cpu") for _ in range(2))  # one alone would not share its devices
    devices = stays.devices()[:DEVICES]
    warm = await stays.start(devices)
    rows: list[report.Row] = []
    try:
        await warm.run(requests[0], deadline_seconds=DEADLINE_SECONDS)
        for number in range(rounds):
            for request in requests:
                begun = time.perf_counter()
                found = await warm.run(request, deadline_seconds=DEADLINE_SECONDS)
                in_warm = _outside(found, request, time.perf_counter() - begun)
                begun = time.perf_counter()
                group = await starts.start(devices)
                try:
                    found = await group.run(request, deadline_seconds=DEADLINE_SECONDS)
                finally:
                    await group.close()
                in_fresh = _outside(found, request, time.perf_counter() - begun)
                begun = time.perf_counter()
                await _relaunch(request, steps=_steps(found))
                relaunched = _outside(found, request, time.perf_counter() - begun)
                rows.append({"round": number, "stage": request.config.zero_stage,
                             "precision": request.config.precision, "warm s": in_warm, "fresh s": in_fresh,
                             "relaunched s": relaunched, "fresh / warm": in_fresh / in_warm,
                             "relaunched / warm": relaunched / in_warm})
    finally:
        await warm.close()
    return rows


async def _relaunch(request: TrialRequest, *, steps: int) -> None:
    """Take as many steps under torchrun."""
    run_file = RunFile(model=request.model, optimizer=request.optimizer, config=request.config, world_size=DEVICES,
                       global_batch_size=request.global_batch_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        path.write_text(run_file.model_dump_json())
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(DEVICES),
            "-m", "engine.run", str(path), "--steps", str(steps), "--device", "cpu",
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=asyncio.subprocess.DEVNULL)
        if await process.wait():
            raise RuntimeError(f"torchrun ended with {process.returncode}")


def _steps(found: Report) -> int:
    assert isinstance(found, TrialReport)
    assert found.measurement is not None
    return len(found.measurement.losses)


def _outside(found: Report, request: TrialRequest, wall: float) -> float:
    if not isinstance(found, TrialReport) or found.measurement is None:
        raise RuntimeError(f"a trial of {request.config} did not end well: {found}")
    return wall - sum(found.measurement.step_seconds)


def summary(rows: Sequence[report.Row]) -> report.Row:
    """Medians over all."""
    return {name: median(float(row[name] or 0.0) for row in rows) for name in rows[0] if name.endswith((" s", "warm"))}


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each configuration (default: %(default)s)")
    options = parser.parse_args()
    rows = asyncio.run(cost(configs=CONFIGS, rounds=options.rounds))
    print(report.table(rows))
    found = summary(rows)
    print(f"\nmedian: {found['warm s']:.2f} s in warm workers, at most {MOST_SECONDS:g} s; {found['fresh s']:.2f} s "
          f"with a group of its own, {found['fresh / warm']:.1f} times as much, at least {LEAST_FACTOR:g} times; "
          f"{found['relaunched s']:.2f} s relaunched, {found['relaunched / warm']:.1f} times as much")
    report.write(rows, options.json)
    return int(float(found["warm s"] or 0) >= MOST_SECONDS or float(found["fresh / warm"] or 0) < LEAST_FACTOR)


if __name__ == "__main__":
    sys.exit(main())
