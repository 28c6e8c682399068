"""One small adapter for each engine: connect, set up, then step after step. All train with the same fused AdamW."""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import engine
from benchmarks.peers.plan import REFERENCE
from benchmarks.peers.values import Job
from engine.tasks.base import Batch
from engine.tasks.gpt import GptTask

_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_BUCKET_BYTES = 25 * 2**20
"""DDP's default. DeepSpeed's own would put the whole model into one bucket and overlap nothing."""


class Adapter:
    """One engine on one rank.

    Args:
        job: what to train, and which rank this is.
        task: makes the model and the loss.
    """

    def __init__(self, job: Job, task: GptTask) -> None:
        self.job = job
        self.task = task
        self.is_bf16 = job.scenario.precision == "bf16"

    def connect(self) -> None:
        """Join the other ranks, and load what is loaded once; its heap does not count."""
        if self.job.world_size > 1:
            dist.init_process_group("gloo")

    def set_up(self) -> None:
        """Build the model and everything around it; from here on memory counts."""
        raise NotImplementedError

    def step(self, micro_batches: Sequence[Batch]) -> float:
        """One optimizer step; returns this rank's mean loss."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what outlives the process."""


class PlainLoop(Adapter):
    """The loop of torch's own engines, and by itself the reference: one process, nothing distributed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def set_up(self) -> None:
        self.model = self.task.build_model()
        self.optimizer = _adamw(self.model.parameters())

    def step(self, micro_batches: Sequence[Batch]) -> float:
        losses: list[Tensor] = []
        for number, batch in enumerate(micro_batches, start=1):
            with self.window(is_last=number == len(micro_batches)):
                with self.compute():
                    loss = self.task.loss(self.model, batch)
                (loss / len(micro_batches)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean().item()

    def window(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Around each micro-batch: gradients are reduced after the last one alone."""
        return nullcontext()

    def compute(self) -> AbstractContextManager[Any]:
        """Around each forward pass."""
        return torch.autocast("cpu", torch.bfloat16) if self.is_bf16 else nullcontext()


class Ddp(PlainLoop):
    model: DistributedDataParallel

    def set_up(self) -> None:
        self.model = DistributedDataParallel(self.task.build_model(), gradient_as_bucket_view=True)
        if self.is_bf16:
            self.model.register_comm_hook(self.job.world_size, _average_in_bf16)
        self.optimizer = self.make_optimizer()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return _adamw(self.model.parameters())

    def window(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last else self.model.no_sync()


class ZeroRedundancy(Ddp):
    def connect(self) -> None:
        super().connect()
        from torch.distributed.optim import ZeroRedundancyOptimizer  # large, and warns: not for all

        self.shard = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.shard(self.model.parameters(), fused=True, **_ADAMW)


class Fsdp2(PlainLoop):
    """Args:
        reshard: free gathered parameters after the forward pass, and gather them again for the backward pass.
    """

    def __init__(self, job: Job, task: GptTask, *, reshard: bool) -> None:
        super().__init__(job, task)
        self.reshard = reshard

    def set_up(self) -> None:
        mesh = init_device_mesh("cpu", (self.job.world_size,))
        dtype = torch.bfloat16 if self.is_bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        self.model = self.task.build_model()
        for module in (*self.task.blocks(self.model), self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=policy)
        self.optimizer = _adamw(self.model.parameters())

    def compute(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def window(self, *, is_last: bool) -> AbstractContextManager[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)
        return nullcontext()


class DeepSpeed(Adapter):
    def __init__(self, job: Job, task: GptTask, *, stage: int) -> None:
        super().__init__(job, task)
        self.stage = stage

    def connect(self) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        deepspeed.utils.logger.setLevel(logging.ERROR)
        deepspeed.init_distributed(dist_backend="gloo")

    def set_up(self) -> None:
        import deepspeed

        model = self.task.build_model()
        optimizer = _adamw(model.parameters())
        self.trainer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config())

    def step(self, micro_batches: Sequence[Batch]) -> float:
        losses: list[Tensor] = []
        for batch in micro_batches:
            loss = self.task.loss(self.trainer, batch)
            self.trainer.backward(loss)
            self.trainer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def _config(self) -> dict[str, Any]:
        sharding: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": _BUCKET_BYTES // (2 if self.is_bf16 else 4),
            "overlap_comm": False,  # its overlap is one of CUDA streams
        }
        if self.stage == 3:
            # By default the model, small as it is, would stay whole.
            sharding |= {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 5_000_000}
        return {
            "train_micro_batch_size_per_gpu": self.job.scenario.micro_batch,
            "gradient_accumulation_steps": self.job.scenario.accumulation,
            "zero_optimization": sharding,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.is_bf16},
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        }


class OwnEngine(Adapter):
    def __init__(self, job: Job, task: GptTask, *, stage: int) -> None:
        super().__init__(job, task)
        self.stage = stage

    def connect(self) -> None:
        super().connect()
        _ = engine.initialize  # its import loads the engine's inside

    def set_up(self) -> None:
        scenario = self.job.scenario
        config = engine.TrainConfig.model_validate({
            "zero_stage": self.stage, "micro_batch_size": scenario.micro_batch,
            "gradient_accumulation_steps": scenario.accumulation, "precision": scenario.precision})
        self.trainer = engine.initialize(self.task.build_model(), config=config,
                                         optimizer=engine.OptimizerConfig(name="adamw", **_ADAMW))

    def step(self, micro_batches: Sequence[Batch]) -> float:
        losses: list[Tensor] = []
        for batch in micro_batches:
            loss = self.task.loss(self.trainer, batch)
            self.trainer.backward(loss)
            self.trainer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean().item()

    def close(self) -> None:
        self.trainer.close()


ADAPTERS: Mapping[str, Callable[[Job, GptTask], Adapter]] = {
    REFERENCE: PlainLoop,
    "ddp": Ddp,
    "zero_redundancy": ZeroRedundancy,
    "fsdp2": partial(Fsdp2, reshard=True),
    "fsdp2_keep": partial(Fsdp2, reshard=False),
    **{f"deepspeed{stage}": partial(DeepSpeed, stage=stage) for stage in range(4)},
    **{f"engine{stage}": partial(OwnEngine, stage=stage) for stage in range(4)},
}
"""By the names of `plan.ENGINES`, and the reference."""


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, fused=True, **_ADAMW)


def _average_in_bf16(ranks: int, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """torch's own hook for bf16 wants CUDA and NCCL: the same by hand."""
    compressed = bucket.buffer().to(torch.bfloat16).div_(ranks)
    work = dist.all_reduce(compressed, async_op=True)
    assert work is not None
    averaged: torch.futures.Future[Tensor] = work.get_future().then(
        lambda done: bucket.buffer().copy_(done.value()[0]))
    return averaged
