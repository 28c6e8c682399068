"""How far predictions are from measurements: others' published ones, and configurations tried on this machine.

    python -m benchmarks.predict [--json FILE] [--only published|machine] [--seed N]

Published measurements are read from the folder that AUTOTUNE_REPLAY_DIR names, else `../shared/replay` beside the
repository; where it is missing, that part is left out.

- FSDP: the error of throughput of each model, with the constants fitted to the others; beside it that of constant
  utilisation, the others' median on the same device. And how many of the configurations, which all ran, should fit.
- Megatron-LM: the rank correlation of predicted and measured times inside groups, which differ in nothing but the
  configuration; with the constants as they are, and with those fitted to the other hidden sizes.
- This machine (two CPU ranks, some minutes): step seconds and peak bytes of configurations drawn by a seed.
- The time that predictions take.

Ends with 1 where predictions miss by more than the project promises.
"""

import asyncio
import math
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from itertools import islice, product
from statistics import fmean, median

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from autotune.predict import predict
from autotune.predict.cluster import bundled_cluster
from autotune.predict.constants import FITTED, Constants
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.predict.parallel import Parallel
from autotune.scheduler.launcher.local import LocalLauncher
from autotune.search.plan import device_bytes_to_allow
from benchmarks import machine, replay, report
from benchmarks.replay import Group, Run
from engine.config import OptimizerConfig, TrainConfig

FSDP_ERROR_PERCENT = 8.9
MEGATRON_CORRELATION = 0.93

FSDP_CONSTANTS = ("activation_traffic", "fused_attention_rate", "forward_share", "exposed_share")
"""What these runs say anything about; the others do not matter to them."""

MEGATRON_CONSTANTS = ("activation_traffic", "unaligned_rate", "host_norm")

MANY = 10
"""Configurations that make a group a search problem."""

TIMED = 10_000
STAGES = (0, 1, 2, 3)
_TOLERANCE = 0.05
"""Relative error beyond which least squares count it as an outlier: some published rows contradict their neighbours."""
_SPAN = math.log(2)
"""A constant that comes out as less than half or more than twice another's would not mean the same."""


def fit(runs: Sequence[Run], names: Collection[str], start: Constants = FITTED) -> Constants:
    """These constants changed so that predicted times come closest to measured ones, others kept."""
    assert set(names) <= {field.name for field in fields(Constants)}
    measured = np.log([run.measured_seconds for run in runs])

    def constants(logarithms: Iterable[float]) -> Constants:
        return replace(start, **dict(zip(names, map(float, np.exp(list(logarithms))), strict=True)))

    def errors(logarithms: Iterable[float]) -> object:
        tried = constants(logarithms)
        return np.log([_seconds(run, tried) for run in runs]) - measured

    begin = np.log([getattr(start, name) for name in names])
    found = least_squares(errors, begin, bounds=(begin - _SPAN, begin + _SPAN), loss="soft_l1", f_scale=_TOLERANCE)
    return constants(found.x)


def fsdp_rows(runs: Sequence[Run]) -> list[report.Row]:
    """A row for each model, and one for all; none without runs."""
    errors: dict[str, list[tuple[float, float, float]]] = {run.name: [] for run in runs}
    for name, found in errors.items():
        others = [run for run in runs if run.name != name]
        constants = fit(others, FSDP_CONSTANTS)
        found += [(_error_percent(run, _seconds(run, constants)),
                   _error_percent(run, constant_utilisation(run, others)),
                   100.0 * (device_bytes_to_allow(run.predict()) <= run.hardware.memory_bytes))
                  for run in runs if run.name == name]
    if errors:
        errors["all"] = [each for found in errors.values() for each in found]
    return [{"model": name, "configurations": len(found), "error %": fmean(error for error, _, _ in found),
             "constant utilisation %": fmean(simple for _, simple, _ in found),
             "should fit %": fmean(fits for _, _, fits in found)} for name, found in errors.items()]


def constant_utilisation(run: Run, others: Sequence[Run]) -> float:
    """Seconds, if the share of the device's peak is the median of the others' on the same device."""
    alike = [_ideal_seconds(other) / other.measured_seconds for other in others
             if other.hardware.device_name == run.hardware.device_name]
    return _ideal_seconds(run) / median(alike)


def _ideal_seconds(run: Run) -> float:
    """At the same rate on all devices, whatever it is; without recomputation."""
    return run.config.global_batch_size(run.hardware.world_size) * run.model.flops_per_sample / run.hardware.world_size


def _seconds(run: Run, constants: Constants) -> float:
    seconds = run.predict(constants).step_seconds
    assert seconds is not None
    return seconds


def _error_percent(run: Run, predicted: float) -> float:
    """Of throughput, relative to the measured one."""
    return 100 * abs(run.measured_seconds / predicted - 1)


def megatron_rows(groups: Sequence[Group]) -> list[report.Row]:
    """A row for each number of devices, and one for all; none without groups."""
    if not groups:
        return []
    hidden = {run.model.hidden for group in groups for run in group.runs}
    others = {size: _without_hidden(groups, size) for size in hidden}
    as_it_is = {id(group): correlation(group, FITTED) for group in groups}
    left_out = {id(group): correlation(group, others[group.runs[0].model.hidden]) for group in groups}
    rows: list[report.Row] = []
    for devices in (*sorted({group.devices for group in groups}), None):
        chosen = [group for group in groups if devices in (None, group.devices)]
        large = [as_it_is[id(group)] for group in chosen if len(group.runs) >= MANY]
        rows.append({
            "devices": "all" if devices is None else devices, "groups": len(chosen),
            "configurations": sum(len(group.runs) for group in chosen),
            "correlation": fmean(as_it_is[id(group)] for group in chosen),
            f"of {MANY} or more": fmean(large) if large else None,
            "lowest of these": min(large, default=None),
            "left out": fmean(left_out[id(group)] for group in chosen)})
    return rows


def _without_hidden(groups: Sequence[Group], hidden: int) -> Constants:
    return fit([run for group in groups for run in group.runs if run.model.hidden != hidden], MEGATRON_CONSTANTS)


def correlation(group: Group, constants: Constants) -> float:
    """Of ranks by predicted and by measured time (Spearman)."""
    return float(spearmanr([_seconds(run, constants) for run in group.runs],
                           [run.measured_seconds for run in group.runs]).statistic)


def speed_rows() -> list[report.Row]:
    """Different configurations of a 7B model on 64 devices, by one process."""
    model = decoder_profile(Decoder(layers=32, hidden=4096, heads=32, vocab=50_304, sequence_length=2048))
    hardware, optimizer = bundled_cluster("a100-80gb").hardware(64), OptimizerConfig()
    choices = product(STAGES, range(1, 26), range(1, 11), ("none", "full"),
                      (Parallel(tensor=tensor, pipeline=pipeline) for tensor in (1, 2, 4, 8) for pipeline in (1, 2)))
    points = [(TrainConfig.model_validate({
        "zero_stage": stage, "micro_batch_size": micro, "gradient_accumulation_steps": steps, "precision": "bf16",
        "activation_checkpointing": checkpointing}), parallel)
        for stage, micro, steps, checkpointing, parallel in islice(choices, TIMED)]
    begun = time.perf_counter()
    for config, parallel in points:
        predict(model, hardware, optimizer, config, parallel)
    seconds = time.perf_counter() - begun
    return [{"configurations": len(points), "seconds": seconds, "microseconds each": seconds / len(points) * 1e6}]


def published() -> list[list[report.Row]]:
    """Tables of the published measurements; what is missing is said and left out."""
    runs, groups = replay.tuned(), replay.groups()
    for pattern, found in ((replay.MPT_FILE, runs), (replay.MEGATRON_FILE, groups)):
        if not found:
            print(f"no {pattern} in {replay.folder()}: that part is left out", flush=True)
    return [rows for rows in (fsdp_rows(runs), megatron_rows(groups)) if rows]


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--only", choices=("published", "machine"), help="leave the other part out")
    parser.add_argument("--seed", type=int, default=0, help="of the configurations of this machine (%(default)s)")
    options = parser.parse_args()
    tables, details = [] if options.only == "machine" else published(), []
    if options.only != "published":
        details = asyncio.run(machine.measure(LocalLauncher(device_type="cpu"), machine.MODELS,
                                              machine.drawn(machine.CONFIGURATIONS, seed=options.seed)))
        tables.append(machine.summaries(details))
    failed = any(missed(table) for table in tables)
    tables.append(speed_rows())
    print("\n\n".join(map(report.table, tables)))
    report.write([*(row for table in tables for row in table), *details], options.json)
    return int(failed)


def missed(table: Sequence[report.Row]) -> bool:
    """Whether rows of which the last is of all are worse than promised."""
    total = table[-1]
    most = (("error %", FSDP_ERROR_PERCENT), *machine.MOST.items())
    least = (("correlation", MEGATRON_CORRELATION), ("should fit %", 100.0))
    return (any(_number(total, name) > limit for name, limit in most)
            or any(_number(total, name, math.inf) < limit for name, limit in least)
            or any(_number(row, "step correlation", math.inf) < machine.LEAST_CORRELATION for row in table))


def _number(row: report.Row, name: str, absent: float = 0.0) -> float:
    value = row.get(name)
    assert value is None or isinstance(value, int | float)
    return absent if value is None else value


if __name__ == "__main__":
    sys.exit(main())
