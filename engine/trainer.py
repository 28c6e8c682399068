"""The engine's face: `initialize` and the `Trainer` it returns."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.blocks import find_blocks, require_blocks
from engine.buckets import ManagedParameter
from engine.checkpoint import Progress, load_checkpoint, save_checkpoint
from engine.checkpointing import require_wrappable, unwrap, wrap_inside, wrap_outside
from engine.collectives import Ranks, connect
from engine.config import OptimizerConfig, TrainConfig
from engine.consolidate import TrainingState, consolidate
from engine.errors import RANK_FAILURES, ConfigurationError
from engine.model_file import save_model
from engine.norm import agree_on_used, gradient_norm
from engine.offload import HostMemory
from engine.optimizers import OptimizerFactory, make_optimizer
from engine.precision import DTYPES, LossScale, cast_floating, compute_dtypes, place_rest, require_precision, rest_of
from engine.report import StateBytes
from engine.requirements import require_same_model, require_trainable
from engine.stages import Stage, StageContext, make_stage
from engine.update import OwnedUpdate, storage_bytes
from engine.values import Precision


@dataclass(frozen=True)
class StepResult:
    """What one `Trainer.step` did.

    Attributes:
        applied: whether parameters were updated; False between boundaries and when gradients overflowed.
        grad_norm: global norm of the mean gradient before clipping, where something needs it (clipping, fp16) and it is
            finite; else None.
        loss_scale: that the step's gradients were computed with; 1 except in fp16.
        boundary: whether this was the last micro-batch of an optimizer step.
    """

    applied: bool
    grad_norm: float | None
    loss_scale: float
    boundary: bool


_ADAMW = OptimizerConfig()


def initialize(model: nn.Module, *, config: TrainConfig, optimizer: OptimizerConfig | OptimizerFactory = _ADAMW,
               blocks: Sequence[nn.Module] | None = None, device: torch.device | None = None) -> "Trainer":
    """Take over the training of a model.

    The model's parameters are laid out anew and converted in place: afterwards train through the trainer. The first
    rank's parameters and buffers become every rank's. Ranks are those of the caller's default process group, else of
    one made from torchrun's environment variables, else this process alone.

    Args:
        model: on any device; every rank builds the same one.
        optimizer: a stock one, or a factory that is given the trainable parameters and returns a torch optimizer over
            them, in its own groups.
        blocks: repeated modules to checkpoint, compile and gather by; found by `find_blocks` when None.
        device: to train on; this rank's accelerator when None, the CPU where there is none.

    Raises:
        ConfigurationError: the model, the optimizer and the configuration cannot be trained together; names the field.
    """
    _require_kinds(config, optimizer)
    device = device or _default_device()
    require_precision(config, device)
    _require_not_in_training(model)
    require_trainable(model)
    if blocks is None:
        blocks = find_blocks(model)
    require_blocks(model, blocks)
    require_wrappable(blocks, config)
    torch_optimizer = make_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad], device)
    ranks = connect(device)
    require_same_model(model, config, ranks)
    compute = DTYPES[config.precision]
    dtypes = compute_dtypes(model, compute)
    managed = [ManagedParameter(index, name, parameter, dtypes[parameter]) for index, (name, parameter) in
               enumerate((name, parameter) for name, parameter in model.named_parameters() if parameter in dtypes)]
    place_rest(model, managed, device=device, compute=compute)
    for tensor in rest_of(model, managed):
        ranks.broadcast(tensor)
    host = HostMemory(device)
    wrap_inside(blocks, config)
    stage = make_stage(StageContext(model, managed, blocks, ranks, config, device, host))
    update = OwnedUpdate(torch_optimizer, stage, host_ratio=config.offload_optimizer_ratio, host=host, device=device)
    wrap_outside(blocks, config)
    return Trainer(model, config, stage=stage, update=update, ranks=ranks, host=host)


class Trainer:
    """A model in training on this rank, together with the other ranks. Made by `initialize`.

    Attributes:
        module: the model; its parameters are the engine's, in the compute dtype. What is changed of them in place, on
            every rank alike, the next step or save takes over; at stage 3, where they are gathered when something
            reads them, it is refused. A forked child must not change them: their memory may be shared.
        optimizer: the torch optimizer, over this rank's 1-D slices of parameters; learning-rate schedulers attach here.
        config: as given.
        device: computing on.
        rank, data_parallel_size: of this process, and of all.
        steps: optimizer steps applied.
        skipped_steps: optimizer steps not applied because gradients overflowed.
        loss_scale: the present one.
    """

    def __init__(self, module: nn.Module, config: TrainConfig, *, stage: Stage, update: OwnedUpdate, ranks: Ranks,
                 host: HostMemory) -> None:
        self.module, self.config, self.optimizer = module, config, update.optimizer
        self.device, self.rank, self.data_parallel_size = ranks.device, ranks.rank, ranks.size
        self.skipped_steps = 0
        self.steps = 0
        self._stage, self._update, self._ranks, self._host = stage, update, ranks, host
        self._scale = LossScale(config)
        self._micro_batch = 0
        self._no_sync = False
        self._closed = False
        # A micro-batch whose backward ran and which no step has ended; whether it ran inside of no_sync.
        self._uncounted = self._no_sync_uncounted = False
        self._may_read_state_dict = config.zero_stage < 3
        self._frozen = [(name, parameter) for name, parameter in module.named_parameters()
                        if not parameter.requires_grad]
        own = partial(_OwnHook, require_copyable=partial(_require_copyable, config))
        self._hooks = (
            module.register_state_dict_pre_hook(own(self._before_state_dict)),  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(own(_refuse_load_state_dict)),  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(own(self._before_forward), prepend=True, with_kwargs=True))

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        """The module's forward; floating-point tensors among the arguments are cast to the compute dtype."""
        return self.module(*inputs, **keywords)

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Differentiate a micro-batch's mean loss, unscaled and not divided by anything.

        Collective: every rank calls it as often as the others. Gradients are taken from the parameters as they come;
        `parameter.grad` stays None. When it fails on all ranks, gradients that no step has used yet are dropped, and
        training may go on with the first micro-batch of another step.

        Args:
            loss: scalar.
            retain_graph: keep the graph for another backward call; the gradients of all calls add up.

        Raises:
            ValueError: the loss is no scalar, or depends on no trainable parameter.
            RuntimeError: a parameter that was frozen when the model was laid out has become trainable.
        """
        self._require_open()
        if loss.numel() != 1:
            raise ValueError(f"loss must be a scalar, not of shape {tuple(loss.shape)}: reduce it, as by mean()")
        if not loss.requires_grad:
            raise ValueError("loss depends on no trainable parameter; where a rank has nothing to learn from, give it "
                             "zero times an output")
        self._require_still_frozen()
        last = self._micro_batch + 1 >= self.config.gradient_accumulation_steps
        try:
            with self._stage.backward(reduce=last and not self._no_sync):
                torch.autograd.backward(self._scale.apply(loss), retain_graph=retain_graph)
        except BaseException:
            self._drop_after_failure()
            raise
        self._uncounted, self._no_sync_uncounted = True, self._no_sync

    def step(self) -> StepResult:
        """End a micro-batch; at the last of an optimizer step, update the parameters. Collective.

        When it fails on all ranks, the gradients of the step are dropped.

        Raises:
            RuntimeError: there was no backward since the last call; the ranks do different things, parameters were
                changed in place at stage 3, or gradients came after their reduction.
            FloatingPointError: fp16 gradients overflow in step after step, and the loss scale cannot fall.
        """
        self._require_open()
        if not self._uncounted:
            raise RuntimeError("step() ends a micro-batch, and there is none: call trainer.backward(loss) before it, "
                               "in place of loss.backward()")
        scale = self._scale.value
        self._end_micro_batch()
        if self._micro_batch < self.config.gradient_accumulation_steps:
            return StepResult(applied=False, grad_norm=None, loss_scale=scale, boundary=False)
        self._micro_batch = 0
        try:
            overflow, norm = self._reduce_and_update(scale)
        except BaseException:
            self._drop_after_failure()
            raise
        self._stage.gradients.start_window()
        self._scale.update(overflow=overflow)
        return StepResult(applied=not overflow, grad_norm=norm if norm is not None and math.isfinite(norm) else None,
                          loss_scale=scale, boundary=True)

    def prepare(self) -> bool:
        """Make optimizer states now that the first step would make, so that it takes no longer than the next.

        Returns:
            Whether all are there: those of Adam and AdamW, and of optimizers that make them when they are made.
        """
        return self._update.prepare()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches inside are not reduced, for as long as the stage can hold their gradients: 0 and 1.

        `step` may be called after them or left out: a backward inside counts as a micro-batch all the same.
        """
        previous, self._no_sync = self._no_sync, True
        try:
            yield
        finally:
            self._no_sync = previous

    def train(self, mode: bool = True) -> "Trainer":
        self.module.train(mode)
        return self

    def eval(self) -> "Trainer":
        return self.train(False)

    @property
    def loss_scale(self) -> float:
        return self._scale.value

    @property
    def collective_counts(self) -> dict[str, int]:
        """Collectives issued so far, by kind."""
        return dict(self._ranks.counts)

    @property
    def communicated_bytes(self) -> int:
        """Bytes this rank sent so far."""
        return self._ranks.sent_bytes

    @property
    def shared_bytes(self) -> int:
        """This rank's part of the memory that ranks of one host share: parameters and gradients on their way."""
        return self._ranks.shared_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of offloaded state and its buffers held on the host."""
        return self._host.bytes + self._update.host_state_bytes()

    @property
    def peak_host_bytes(self) -> int:
        """The most `host_bytes` has been."""
        return max(self._host.peak_bytes, self.host_bytes)

    @property
    def offload_seconds(self) -> tuple[float, float]:
        """In all steps so far: of the host's optimizer, and of the transfers that it waited for; 0 without offload."""
        return self._update.host_seconds, self._update.transfer_seconds

    @property
    def host_is_pageable(self) -> bool:
        """Whether page-locked memory was asked for and refused, so that transfers are slower."""
        return self.device.type != "cpu" and not self._host.can_pin

    def state_bytes(self) -> StateBytes:
        """Bytes really held, summed over distinct storages.

        Gradients live from backward to step: counted is the most held at once in the present window, or in the last one
        between windows, with the buckets that were being reduced.
        """
        device_states = storage_bytes(self._update.state_tensors(on_host=False))
        host_states = storage_bytes(self._update.state_tensors(on_host=True))
        return StateBytes(parameters=self._stage.parameter_bytes(), gradients=self._stage.gradients.peak_bytes,
                          optimizer=device_states + host_states,
                          host=host_states + self._stage.host_parameter_bytes())

    def consolidated_state_dict(self) -> dict[str, Any]:
        """The whole model with plain names, on every rank, parameters in fp32 from the masters. Collective.

        Loads into the plain module with strict=True. Tied parameters share memory as they do in the module's own.
        """
        self._update.take_changed()
        with self._reading_state_dict():
            return consolidate(self._training_state())

    def save_model(self, path: str | os.PathLike[str], *, precision: Precision = "fp32") -> None:
        """Write the model to one safetensors file, as `model.safetensors`. Collective, atomic.

        It has what `consolidated_state_dict` gives, one copy of parameters that are tied, and no optimizer states.
        `engine.load_model` and `safetensors.torch.load_model` load it into the plain module. The first rank writes it,
        one bucket at a time, so that no rank holds the whole model for it.

        Args:
            path: the first rank's counts; folders to it are made.
            precision: of the floating-point parameters in the file; fp32 is what the masters have.

        Raises:
            ConfigurationError: it cannot be written there; names `path`. The same on every rank.
        """
        self._update.take_changed()
        with self._reading_state_dict():
            save_model(self._training_state(), Path(path), DTYPES[precision])

    def save_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Save parameters, optimizer and loss scale, each rank its part. Collective, atomic.

        It loads at another world size, stage or precision, into a trainer of the same model and kind of optimizer.
        Learning-rate schedulers, the data's place and random states are the caller's to save, as are gradients that no
        step has used yet: save after a step that was a boundary.

        The folder is the checkpoint's alone: what else lies in it goes with the previous one.
        Whenever a save is cut off, by a kill or a loss of power, the previous checkpoint or the new one is there.

        Args:
            path: a directory to make, or an earlier checkpoint to replace; seen by all ranks. The first rank's counts.

        Raises:
            ConfigurationError: something else is there, or nothing can be written there; names `path`. The same on
                every rank.
        """
        self._update.take_changed()
        progress = Progress(steps=self.steps, skipped_steps=self.skipped_steps, loss_scale=self._scale.state())
        save_checkpoint(self._training_state(), progress, Path(path))

    def load_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Go on from a checkpoint; gradients that no step has used yet are dropped. Collective.

        Load only checkpoints that you trust: torch.distributed.checkpoint unpickles what it finds its data by.

        Raises:
            ConfigurationError: there is none, it is damaged, or it is of another model or kind of optimizer; names
                `path`. The same on every rank. Nothing was changed, unless damage came to light while it was read.
        """
        progress = load_checkpoint(self._training_state(), Path(path), before_change=self._before_load)
        self.steps, self.skipped_steps = progress.steps, progress.skipped_steps
        self._scale.load_state(progress.loss_scale)

    def close(self) -> None:
        """Remove all hooks and free all buffers. The module keeps its parameters at stages 0 to 2."""
        if self._closed:
            return
        self._closed = True
        for hook in self._hooks:
            hook.remove()
        self._update.close()
        self._stage.close()
        unwrap(self.module.modules())
        self._ranks.close()

    @contextmanager
    def _reading_state_dict(self) -> Iterator[None]:
        """Inside, the module's state dict may be asked for its names at stage 3 too."""
        self._may_read_state_dict = True
        try:
            yield
        finally:
            self._may_read_state_dict = self.config.zero_stage < 3

    def _training_state(self) -> TrainingState:
        return TrainingState(self.module, self._stage, self._update, self._ranks)

    def _before_forward(self, module: nn.Module, inputs: tuple[Any, ...],
                        keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self._uncounted and self._no_sync_uncounted and module.training and torch.is_grad_enabled():
            self._end_micro_batch()
        compute = DTYPES[self.config.precision]
        return cast_floating(inputs, compute), cast_floating(keywords, compute)

    def _before_load(self) -> None:
        self._drop_gradients()
        with suppress(RuntimeError):  # what cannot be taken over, the load puts right
            self._update.take_changed()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)  # forwards under way may still be copying offloaded parameters

    def _before_state_dict(self, _module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if not self._may_read_state_dict:
            raise RuntimeError("at zero_stage 3 a module holds no whole parameters: call "
                               "trainer.consolidated_state_dict() on every rank")

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the trainer is closed: call initialize again to train on")

    def _require_still_frozen(self) -> None:
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(f"parameter {name} was frozen when the engine laid it out, and cannot be trained "
                                   "now: initialize with it trainable, and freeze it until its time has come")

    def _reduce_and_update(self, scale: float) -> tuple[bool, float | None]:
        """The end of an optimizer step: (whether gradients overflowed, their norm where something needs it)."""
        self._stage.finish_reductions()
        self._update.take_changed()
        divisor = self.config.gradient_accumulation_steps * self.data_parallel_size * scale
        used = agree_on_used(self._stage, self._ranks)
        norm = self._norm(divisor)
        overflow = self._scale.checks_overflow and norm is not None and not math.isfinite(norm)
        if overflow:
            self._stage.gradients.discard()
            self.skipped_steps += 1
        else:
            self._update.step(used=used, divisor=self._clipped(divisor, norm))
            self.steps += 1
        return overflow, norm

    def _drop_gradients(self) -> None:
        self._micro_batch = 0
        self._uncounted = False
        try:
            self._stage.gradients.discard()
        finally:
            self._stage.gradients.start_window()

    def _drop_after_failure(self) -> None:
        with suppress(*RANK_FAILURES):  # where others failed too: this rank's own error tells more
            self._drop_gradients()

    def _end_micro_batch(self) -> None:
        self._micro_batch += 1
        self._uncounted = False

    def _norm(self, divisor: float) -> float | None:
        """Norm of the mean gradient, where something depends on it."""
        if self.config.gradient_clipping or self._scale.checks_overflow:
            return gradient_norm(self._stage, self._ranks) / divisor
        return None

    def _clipped(self, divisor: float, norm: float | None) -> float:
        """The divisor with clipping as `torch.nn.utils.clip_grad_norm_` does it; gradients are divided once."""
        if not self.config.gradient_clipping or norm is None:
            return divisor
        factor = self.config.gradient_clipping / (norm + 1e-6)
        if factor == 0:  # infinite norm: finite gradients become 0, infinite ones nan, as there
            return math.inf
        return divisor / factor if not factor > 1 else divisor


class _OwnHook:
    """A hook that a copy of the module does not have: averages of weights, for one, start from a plain copy."""

    def __init__(self, call: Callable[..., Any], require_copyable: Callable[[], None]) -> None:
        self._call, self._require_copyable = call, require_copyable

    def __call__(self, *inputs: Any, **keywords: Any) -> Any:
        return self._call(*inputs, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        self._require_copyable()
        return _OwnHook, (_nothing, _nothing)


def _require_kinds(config: object, optimizer: object) -> None:
    if not isinstance(config, TrainConfig):
        raise ConfigurationError(f"config must be an engine.TrainConfig, not {type(config).__name__}: give "
                                 "engine.TrainConfig(zero_stage=...)", fields=("config",))
    if isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError("optimizer must be made by the engine's parameters, not by the model's: give a "
                                 f"factory, lambda every: {type(optimizer).__name__}(every, ...)",
                                 fields=("optimizer",))


def _require_not_in_training(model: nn.Module) -> None:
    if any(isinstance(hook, _OwnHook) for hook in model._forward_pre_hooks.values()):
        raise ConfigurationError("the model is in training by another trainer: close that one first", fields=("model",))


def _nothing(*_: Any) -> None:
    pass


def _require_copyable(config: TrainConfig) -> None:
    """Where the forward of modules is replaced, that of a copy would run the original's."""
    if config.zero_stage == 3 or config.compile or config.activation_checkpointing != "none":
        raise RuntimeError("a module in training cannot be copied at zero_stage 3, nor with compile or activation "
                           "checkpointing: copy the model before initialize, and load consolidated_state_dict() into "
                           "the copy")


def _refuse_load_state_dict(*_: Any) -> None:
    raise RuntimeError("the engine holds this module's weights, and its next step would undo what is loaded here: load "
                       "before initialize, or call trainer.load_checkpoint()")


def _default_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    if "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
