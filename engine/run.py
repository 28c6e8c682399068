"""`torchrun --nproc-per-node W -m engine.run FILE --steps N [--json]`: train from an engine export, print the losses.

The losses are those of the trial that the file comes from, bit for bit, on the same hardware and software.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigurationError
from engine.run_file import RunFile, load_run_file
from engine.spec import ALLOWED_TASKS_VARIABLE

if TYPE_CHECKING:
    from engine.ranks import RankContext


def main(arguments: list[str] | None = None) -> int:
    """The command's entry; returns its exit code."""
    options = _parse(arguments)
    if options.allow_tasks:
        os.environ[ALLOWED_TASKS_VARIABLE] = options.allow_tasks
    try:
        run_file = load_run_file(options.file)
        _require_ranks(run_file, options.file)
    except ConfigurationError as error:
        sys.stderr.write(f"engine.run: {error}\n")
        return 2
    losses, skipped = train(run_file, steps=options.steps, device_type=options.device, checkpoint=options.checkpoint)
    if int(os.environ.get("RANK", "0")) == 0:
        if options.json:
            sys.stdout.write(json.dumps({"losses": losses, "skipped_steps": skipped}) + "\n")
        else:
            sys.stdout.writelines(f"step {step}  loss {loss}\n" for step, loss in enumerate(losses))
    return 0


def train(
    run_file: RunFile, *, steps: int, device_type: str = "auto", checkpoint: Path | None = None
) -> tuple[list[float | None], int]:
    """Train for some steps in the calling processes, one per rank as torchrun starts them.

    Args:
        device_type: cpu, cuda, or auto: an accelerator where there is one.
        checkpoint: folder to save the result to.

    Returns:
        The loss of each step, mean over the global batch, None where not finite; and how many steps were skipped
        because gradients overflowed.
    """
    import torch.distributed as dist

    from engine.loop import TrainingLoop
    from engine.tasks.build import build_task

    context = _context(run_file.world_size, device_type)
    loop = TrainingLoop(build_task(run_file.model, seed=run_file.seed), run_file.config, run_file.optimizer,
                        seed=run_file.seed, context=context)
    results = [loop.step(step) for step in range(steps)]
    losses = loop.mean_losses([result.loss_sum for result in results])
    if checkpoint is not None:
        loop.trainer.save_checkpoint(checkpoint)
    loop.close()
    if dist.is_initialized():  # after a failure the group stays, lest the others end before this rank has told why
        dist.destroy_process_group()
    return list(losses), sum(not result.applied for result in results)


def _context(world_size: int, device_type: str) -> "RankContext":
    import torch
    import torch.distributed as dist

    from engine.failure import tell_at_exit
    from engine.ranks import RankContext, backend_for, control_group, default_device, set_threads

    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if device_type == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device_type = "cpu" if accelerator is None else accelerator.type
    device = default_device(device_type, local_rank)
    if device.type == "cpu":
        set_threads(1)  # as trials do: a device is a core
    if world_size > 1:
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(backend_for(device), device_id=None if device.type == "cpu" else device)
        tell_at_exit()
    return RankContext(rank=rank, world_size=world_size, device=device, control=control_group(world_size))


def _require_ranks(run_file: RunFile, path: Path) -> None:
    present = int(os.environ.get("WORLD_SIZE", "1"))
    if present != run_file.world_size:
        raise ConfigurationError(
            f"{path} is for {run_file.world_size} ranks, here are {present}: start it with "
            f"torchrun --nproc-per-node {run_file.world_size} -m engine.run {path}", fields=("world_size",))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.run", description="Train from an engine export and print the losses.")
    parser.add_argument("file", type=Path, help="the export, JSON")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--checkpoint", type=Path, help="folder to save the trained state to")
    parser.add_argument("--allow-tasks", metavar="PREFIXES", help="module prefixes that a file's own Python task may "
                        f"come from; as {ALLOWED_TASKS_VARIABLE}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    from torch.distributed.elastic.multiprocessing.errors import record

    sys.exit(record(main)())  # torchrun shows the first failing rank's exception
