"""Stock optimizers by name, the user's own by factory, and the check that they can be sharded."""

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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


class StepHooks:
    """Has hooks that the user registered for the optimizer's step run once, although it steps in rounds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before, self._after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks

    @contextmanager
    def in_round(self, *, first: bool, last: bool) -> Iterator[None]:
        """Surrounds one round's step."""
        self._optimizer._optimizer_step_pre_hooks = self._before if first else OrderedDict()
        self._optimizer._optimizer_step_post_hooks = self._after if last else OrderedDict()
        try:
            yield
        finally:
            self._optimizer._optimizer_step_pre_hooks = self._before
            self._optimizer._optimizer_step_post_hooks = self._after


def prepare_state(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor], group: dict[str, Any]) -> None:
    """Give tensors that step for the first time the state which a fused kernel expects to find.

    Fused SGD takes all momentum buffers or none; zeros are what its first step starts from.
    """
    if isinstance(optimizer, torch.optim.SGD) and group.get("fused") and group["momentum"] and not group["dampening"]:
        for tensor in tensors:
            state = optimizer.state[tensor]
            if tensor.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(tensor)


def first_state(optimizer: torch.optim.Optimizer, tensor: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    """What the first step of a fused Adam or AdamW would give a tensor: zeros. {} of others, which make their own."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or not group["fused"] or group["amsgrad"]:
        return {}
    return {"step": torch.zeros((), dtype=torch.float32, device=tensor.device),
            "exp_avg": torch.zeros_like(tensor), "exp_avg_sq": torch.zeros_like(tensor)}


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
    reason = next((_REFUSED[base.__name__] for base in type(optimizer).__mro__ if base.__name__ in _REFUSED), None)
    if reason is None and any(group.get("differentiable") for group in optimizer.param_groups):
        reason = "its option differentiable asks for updates that are part of a graph, and a slice is part of none"
    if reason is None and not is_stock(optimizer):
        reasons = (_reason_of_example(optimizer, group) for group in optimizer.param_groups)
        reason = next((found for found in reasons if found is not None), None)
    if reason is not None:
        raise ConfigurationError(f"optimizer {type(optimizer).__name__} cannot be sharded: {reason}; use an "
                                 "element-wise one, such as AdamW", fields=("optimizer",))


def _reason_of_example(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> str | None:
    """Why not, from trying whether two flat slices of a matrix, of unequal size, are updated as the matrix is."""
    values = torch.linspace(-1.0, 2.0, 24)
    gradients = [torch.sin(values * frequency + 1) * 3 for frequency in (2, 5, 11)]
    try:
        whole = _example_steps(optimizer, group, [values.view(4, 6)], [[each.view(4, 6)] for each in gradients])
    except _STEP_ERRORS as error:
        return f"it cannot step with a parameter and its gradient alone ({type(error).__name__}: {error})"
    try:
        # Each by an optimizer of its own, as ranks have: what is computed over all parameters would differ.
        slices = torch.cat([_example_steps(optimizer, group, [values[cut]], [[each[cut]] for each in gradients])
                            for cut in (slice(7), slice(7, None))])
    except _STEP_ERRORS:
        slices = None
    if slices is None or not torch.allclose(whole, slices, rtol=1e-5, atol=1e-7, equal_nan=True):
        return "it does not update a flat slice of a parameter, by itself, as it updates the whole"
    return None


_STEP_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError)
"""What code that expects something else raises."""


def _example_steps(optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Sequence[Tensor],
                   gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """All values after a step with each of the gradients, by an optimizer like this with a group like this."""
    own = {id(parameter): parameter for each in optimizer.param_groups for parameter in each["params"]}
    own |= {id(value): value for state in optimizer.state.values() for value in state.values()}
    parameters = [nn.Parameter(value.clone()) for value in values]
    example = object.__new__(type(optimizer))  # a copy would lack what a subclass keeps beside states and groups
    example.__dict__.update({name: copy.deepcopy(value, dict(own)) for name, value in vars(optimizer).items()
                             if name not in ("state", "param_groups", "step") and not name.endswith("_hooks")})
    example._optimizer_step_pre_hooks, example._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    # A rate of its own: of a tiny one, or of 0 as at the start of a schedule, nothing could be seen.
    other = {name: value for name, value in {"lr": 0.1, "capturable": False}.items() if name in group}
    example.param_groups = [{**group, "params": parameters, **other}]
    example.state = defaultdict(dict)
    model = next((parameter for parameter in group["params"] if parameter.dim() and parameter.numel()), None)
    if model is not None and model in optimizer.state:
        example.state.update((parameter, _state_like(optimizer.state[model], parameter, of=model))
                             for parameter in parameters)
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(example)
    return torch.cat([parameter.detach().flatten() for parameter in parameters])


def _state_like(state: dict[str, Any], parameter: Tensor, *, of: Tensor) -> dict[str, Any]:
    """What an optimizer made for a parameter on construction, for another parameter."""
    return {name: torch.full_like(parameter, value.flatten()[0].item(), requires_grad=False)
            if isinstance(value, Tensor) and value.shape == of.shape else copy.deepcopy(value)
            for name, value in state.items()}
