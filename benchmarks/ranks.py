"""A function on several ranks: fresh processes, one thread each, in a gloo group of their own; and what they train."""

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import spawn

from engine.config import OptimizerConfig, TrainConfig
from engine.loop import TrainingLoop
from engine.ranks import RankContext
from engine.spec import GptSpec
from engine.tasks.build import build_task

MODEL = GptSpec(kind="gpt", layers=12, hidden=128, heads=4, vocab=512, sequence_length=32)
"""2.4 million parameters in tensors of at most 65,536."""


def on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run `function(*arguments)` on every rank.

    Args:
        function: of a module's top level, as it is pickled; so are arguments and results.

    Returns:
        The ranks' results, in rank order.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank raised; carries its traceback.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        spawn(_rank, (world_size, folder, function, arguments), nprocs=world_size)  # type: ignore[no-untyped-call]
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def training_loop(config: TrainConfig, model: GptSpec = MODEL) -> TrainingLoop:
    """A GPT with AdamW under the engine, on this rank."""
    context = RankContext(rank=dist.get_rank(), world_size=dist.get_world_size(), device=torch.device("cpu"))
    return TrainingLoop(build_task(model), config, OptimizerConfig(), seed=0, context=context)


def _rank(rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(*arguments)))
    dist.destroy_process_group()
