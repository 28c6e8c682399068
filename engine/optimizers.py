"""Stock optimizers by name, the user's own by factory, and the check that they can be sharded."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.config import OptimizerConfig
from engine.errors import ConfigurationError

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""Given the model's trainable parameters, whole, makes an optimizer over them, in whatever groups it likes."""

_REFUSED = {
    "LBFGS": "it evaluates a closure and keeps directions over all parameters",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors the second moment of whole matrices",
    "SparseAdam": "it takes sparse gradients only",
}

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def make_optimizer(choice: OptimizerConfig | OptimizerFactory, parameters: Sequence[nn.Parameter],
                   device: torch.device) -> torch.optim.Optimizer:
    """The optimizer over whole parameters, checked.

    Raises:
        ConfigurationError: it is not element-wise, or trains something that the model does not have.
    """
    if isinstance(choice, OptimizerConfig):
        return _stock(choice, parameters, fused=device.type in _FUSED_DEVICES)
    optimizer = choice(list(parameters))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigurationError(f"optimizer: the factory returned {type(optimizer).__name__}; return a "
                                 "torch.optim.Optimizer over the parameters it is given", fields=("optimizer",))
    _require_element_wise(optimizer)
    return optimizer


def is_stock(optimizer: torch.optim.Optimizer) -> bool:
    """Whether all of its state is per parameter, so that it may step a few parameters at a time."""
    return type(optimizer).__module__.startswith("torch.optim.")


def scales_in_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its kernel divides gradients by `optimizer.grad_scale` for free."""
    return all(group.get("fused") for group in optimizer.param_groups) and bool(
        getattr(optimizer, "_step_supports_amp_scaling", False))


def prepare_state(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], group: dict[str, Any]) -> None:
    """Give tensors that step for the first time the state which a fused kernel expects to find.

    Fused SGD takes all momentum buffers or none; zeros are what its first step starts from.
    """
    if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and group["momentum"] and not group["dampening"]:
        for tensor in tensors:
            state = optimizer.state[tensor]
            if tensor.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(tensor)


def _stock(config: OptimizerConfig, parameters: Sequence[nn.Parameter], *, fused: bool) -> torch.optim.Optimizer:
    lr, decay, eps = config.lr, config.weight_decay, config.eps
    match config.name:
        case "adamw":
            return torch.optim.AdamW(parameters, lr, config.betas, eps, decay, fused=fused)
        case "adam":
            return torch.optim.Adam(parameters, lr, config.betas, eps, decay, fused=fused)
        case "sgd":
            return torch.optim.SGD(parameters, lr, config.momentum, weight_decay=decay, fused=fused)
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr, weight_decay=decay, eps=eps)
        case "radam":
            return torch.optim.RAdam(parameters, lr, config.betas, eps, decay)
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr, eps=eps, weight_decay=decay, momentum=config.momentum)


def _require_element_wise(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    reason = next((_REFUSED[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _REFUSED), None)
    if reason is None and not is_stock(optimizer) and not _steps_slices_alike(optimizer):
        reason = "it does not update a flat slice of a parameter as it updates the whole"
    if reason is not None:
        raise ConfigurationError(f"optimizer {name} cannot be sharded: {reason}; use an element-wise one, "
                                 "such as AdamW", fields=("optimizer",))


def _steps_slices_alike(optimizer: torch.optim.Optimizer) -> bool:
    """Whether two flat halves of a matrix are updated as the matrix is, tried on an example."""
    values, gradient = torch.linspace(-1, 1, 24), torch.linspace(2, -1, 24).sin()
    try:
        whole = _example_step(optimizer, [values.view(4, 6)], [gradient.view(4, 6)])
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return True  # needs more than a parameter and a gradient: nothing to tell it by
    try:
        halves = _example_step(optimizer, [*values.view(2, 12)], [*gradient.view(2, 12)])
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, AssertionError, IndexError):
        return False
    return torch.allclose(whole, halves, rtol=1e-5, atol=1e-7)


def _example_step(optimizer: torch.optim.Optimizer, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    example = copy.copy(optimizer)
    example.state = defaultdict(dict)
    parameters = [nn.Parameter(value.clone()) for value in values]
    example.param_groups = [{**optimizer.param_groups[0], "params": parameters}]
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        example.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
