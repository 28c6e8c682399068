"""The repeated blocks of a model: what activations are checkpointed by, what is compiled, what stage 3 gathers by."""

from collections.abc import Sequence

from torch import nn

from engine.errors import ConfigurationError


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated modules of a model, in order; empty where nothing repeats.

    A repetition is an `nn.ModuleList` or `nn.Sequential` of at least two children of one class that has parameters and
    a forward: containers are looked into. Of nested repetitions the outermost counts. The class that holds most
    parameters is taken, with all its lists: a T5's encoder and decoder, all four stages of a ResNet.
    """
    lists: list[list[nn.Module]] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(dict.fromkeys(module))
        if (len(children) >= 2 and len({type(child) for child in children}) == 1 and _has_forward(children[0])
                and _parameter_count(children)):
            lists.append(children)
            inside.update(descendant for child in children for descendant in child.modules())
    by_class: dict[type[nn.Module], list[nn.Module]] = {}
    for children in lists:
        by_class.setdefault(type(children[0]), []).extend(children)
    return max(by_class.values(), key=_parameter_count, default=[])


def require_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Check blocks that the user names.

    Raises:
        ConfigurationError: one is not part of the model, is never called, or contains another.
    """
    modules = set(model.modules())
    seen: set[nn.Module] = set()
    for block in blocks:
        if block not in modules or block is model:
            raise ConfigurationError(f"blocks: {type(block).__name__} is not a submodule of the model; name modules "
                                     "that the model's forward calls", fields=("blocks",))
        if not _has_forward(block):
            raise ConfigurationError(f"blocks: {type(block).__name__} has no forward; name the modules in it that the "
                                     "model's forward calls", fields=("blocks",))
        if block in seen:
            raise ConfigurationError(f"blocks: {type(block).__name__} is given twice or lies inside another block; "
                                     "name each once, and no module inside another", fields=("blocks",))
        seen.update(block.modules())


def _has_forward(module: nn.Module) -> bool:
    """Containers have none: the model calls what is in them."""
    return type(module).forward is not nn.Module.forward


def _parameter_count(modules: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})
