"""Published measurements of others, as configurations of ours with measured and predicted seconds.

Read from the folder that AUTOTUNE_REPLAY_DIR names, else `../shared/replay` beside the repository:

- `vtrain_*.csv`: Megatron-LM on A100s over tensor, data and pipeline parallelism and micro-batch
  (VIA-Research/vTrain). Rows that differ in nothing but the configuration are a group.
- `mpt_*.csv`: throughput of MPT models under FSDP (mosaicml/llm-foundry), one tuned configuration each.
"""

import csv
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autotune.domain.prediction import Prediction
from autotune.predict import predict
from autotune.predict.cluster import bundled_cluster
from autotune.predict.constants import FITTED, Constants
from autotune.predict.decoder import Decoder, decoder_profile
from autotune.predict.parallel import ALONE, Parallel
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile

MEGATRON_FILE = "vtrain_*.csv"
MPT_FILE = "mpt_*.csv"

MEGATRON_LAUNCH_SECONDS = 16e-6
"""The host's time per operation, of the machine and software behind `MEGATRON_FILE`. It is not published, but to be
found from the files, where micro-batches are so small that devices wait."""

_GPT2_VOCAB = 50_257
_MPT_VOCAB = 50_368
_MPT_DIMENSIONS = {  # layers, hidden, heads
    "125m": (12, 768, 12), "350m": (24, 1024, 16), "760m": (24, 1536, 12), "1b": (24, 2048, 16), "3b": (32, 2560, 20),
    "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56), "70b": (80, 8192, 64)}
_ADAMW = OptimizerConfig()
_NETWORK_SHARE = 0.9
"""Of the adapters' rate, what collectives reach, as in the bundled clusters."""
_PRECISIONS = {"bf16": "bf16", "amp_bf16": "bf16"}
_DEFAULT_FOLDER = Path(__file__).parents[2] / "shared" / "replay"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One measured configuration.

    Attributes:
        name: of the model.
        measured_seconds: of one optimizer step.
    """

    name: str
    model: ModelProfile
    hardware: HardwareProfile
    config: TrainConfig
    parallel: Parallel
    measured_seconds: float

    def predict(self, constants: Constants = FITTED) -> Prediction:
        return predict(self.model, self.hardware, _ADAMW, self.config, self.parallel, constants)

    @property
    def predicted_seconds(self) -> float:
        seconds = self.predict().step_seconds
        assert seconds is not None
        return seconds


@dataclass(frozen=True, kw_only=True)
class Group:
    """A search problem with a known answer: runs of one model and global batch on equally many devices."""

    devices: int
    global_batch_size: int
    name: str
    runs: tuple[Run, ...]


def folder() -> Path:
    """Where the files are, if they are anywhere."""
    return Path(os.environ.get("AUTOTUNE_REPLAY_DIR") or _DEFAULT_FOLDER)




def groups() -> tuple[Group, ...]:
    """Of files named as `MEGATRON_FILE`, in their order; none where there are none."""
    found: dict[tuple[int, int, str], list[Run]] = defaultdict(list)
    for row in _rows(MEGATRON_FILE):
        run = _megatron_run({name: int(value) for name, value in row.items() if "time" not in name},
                            float(row["iteration time (ms)"]) / 1000)
        found[run.hardware.world_size, int(row["global batch"]), run.name].append(run)
    return tuple(Group(devices=devices, global_batch_size=batch, name=name, runs=tuple(runs))
                 for (devices, batch, name), runs in found.items())


def tuned() -> tuple[Run, ...]:
    """Of files named as `MPT_FILE`, in their order, but for precisions that the engine lacks."""
    return tuple(_mpt_run(row) for row in _rows(MPT_FILE) if row["Precision"] in _PRECISIONS)


def _rows(pattern: str) -> Iterator[dict[str, str]]:
    for file in sorted(folder().glob(pattern)):
        with file.open(newline="") as lines:
            yield from csv.DictReader(lines)


def _megatron_run(row: dict[str, int], seconds: float) -> Run:
    """fp16 with fp32 masters, attention that writes out its scores, gradients reduced at once and not overlapped."""
    parallel = Parallel(tensor=row["tensor parallelism"], pipeline=row["pipeline parallelism"])
    layers, hidden, heads = row["# layers"], row["hidden size"], row["attention heads"]
    micro, data = row["micro batch"], row["data parallelism"]
    hardware = _hardware("a100-80gb", row["# GPUs"], None).model_copy(
        update={"launch_seconds": MEGATRON_LAUNCH_SECONDS})
    decoder = Decoder(layers=layers, hidden=hidden, heads=heads, vocab=_megatron_vocab(parallel.tensor),
                      fused_attention=False, dropout=True, sequence_length=row["sequence length"])
    return Run(
        name=f"{layers} layers of {hidden}, {heads} heads, {decoder.sequence_length} tokens",
        model=_model(decoder), hardware=hardware, parallel=parallel,
        config=TrainConfig.model_validate({
            "precision": "fp16", "micro_batch_size": micro, "overlap_comm": False, "reduce_bucket_size": 2**40,
            "gradient_accumulation_steps": row["global batch"] // (micro * data)}),
        measured_seconds=seconds)


def _megatron_vocab(tensor: int) -> int:
    """Not in the file. The times say that it is padded only where it is cut between devices: the product with an odd
    number of outputs is slow."""
    return _GPT2_VOCAB if tensor == 1 else -(-_GPT2_VOCAB // (128 * tensor)) * 128 * tensor


def _mpt_run(row: dict[str, str]) -> Run:
    layers, hidden, heads = _MPT_DIMENSIONS[row["Model"]]
    model = _model(Decoder(layers=layers, hidden=hidden, heads=heads, vocab=_MPT_VOCAB, fused_loss=True,
                           sequence_length=int(row["SeqLen (T)"])))
    adapters = re.search(r"(\d+) Gbps", row["section"])
    hardware = _hardware(row["GPU"].replace("_", "-"), int(row["# GPUs"]), int(adapters[1]) if adapters else None)
    config = TrainConfig.model_validate({
        "zero_stage": 3, "precision": _PRECISIONS[row["Precision"]], "micro_batch_size": int(row["MicroBatchSize"]),
        "gradient_accumulation_steps": int(row["GradAccum"]), "reduce_bucket_size": model.block_parameters,
        "activation_checkpointing": "full" if row["Activation Checkpointing"] == "True" else "none"})
    return Run(name=row["Model"], model=model, hardware=hardware, config=config, parallel=ALONE,
               measured_seconds=int(row["GlobalBatchSize (T)"]) / float(row["Throughput (T/s)"]))


@cache
def _model(decoder: Decoder) -> ModelProfile:
    return decoder_profile(decoder)


@cache
def _hardware(cluster: str, devices: int, node_gigabits: int | None) -> HardwareProfile:
    """So many devices of a bundled cluster, with its nodes joined by the adapters given."""
    described = bundled_cluster(cluster)
    if node_gigabits is not None:
        rate = _NETWORK_SHARE * node_gigabits * 1e9 / 8
        links = described.links.model_copy(update={"inter_bytes_per_second": rate})
        described = described.model_copy(update={"links": links})
    return described.hardware(devices)
