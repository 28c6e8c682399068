"""Neighbouring slices that step as one tensor, so that a step costs the same however many parameters there are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.buckets import ALIGNMENT
from engine.owned import Part, Slice


class Chunk:
    """Slices of one part and one group, with nothing but padding between and behind them.

    In their first step they step one by one, which makes their states. From then on, as long as all of them have a
    gradient, one tensor over all of them steps, and their states are views of its states; those that are one for a
    whole tensor, as a step count, they share. Padding has gradients and values of zero.

    Args:
        joins: False for optimizers that may know tensors by more than `state`: slices always step one by one.
    """

    def __init__(self, part: Part, slices: Sequence[Slice], *, joins: bool) -> None:
        end = min(_aligned(slices[-1].place.stop), part.master.numel())
        self.slices, self.group = tuple(slices), slices[0].group
        self._place = slice(slices[0].place.start, end)
        self._tensor = part.master[self._place]
        self._states: dict[str, Any] | None = None
        self._shared: dict[str, Any] = {}  # what the slices' states were last made of
        self._joins, self._was_split, self._complete = joins, False, False

    def begin(self, optimizer: torch.optim.Optimizer, gradient: Tensor, used: set[int] | None) -> list[Tensor]:
        """The tensors that are to step, with their gradients.

        Args:
            gradient: of the whole part.
            used: indices of parameters that have one; None: all.
        """
        self._complete = used is None or all(piece.managed.index in used for piece in self.slices)
        if self._states is not None and not self._complete:
            self._split(optimizer)
        if self._states is not None:
            self._tensor.grad = gradient[self._place]
            optimizer.state[self._tensor] = self._states
            return [self._tensor]
        for piece in self.slices:
            if used is None or piece.managed.index in used:
                piece.tensor.grad = gradient[piece.place]
        return [piece.tensor for piece in self.slices]

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """They have stepped."""
        if self._states is not None:
            self._tensor.grad = None
            self._states = optimizer.state.pop(self._tensor)
            if list(map(id, self._states.values())) != list(map(id, self._shared.values())):
                self._share(optimizer)
            return
        for piece in self.slices:
            piece.tensor.grad = None
        if self._joins and self._complete and not self._was_split:
            self._join(optimizer)

    def reset(self) -> None:
        """Their states were replaced from outside."""
        self._states, self._was_split = None, False

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        """Make their states views of states of the whole, where they agree in everything else."""
        first, *others = [optimizer.state.get(piece.tensor, {}) for piece in self.slices]
        if any(state.keys() != first.keys() for state in others):
            return
        joined: dict[str, Any] = {}
        for key, value in first.items():
            values = [value, *(state[key] for state in others)]
            if all(_is_element_wise(own, piece) for own, piece in zip(values, self.slices, strict=True)):
                whole = joined[key] = torch.zeros_like(self._tensor, dtype=value.dtype)
                for own, piece in zip(values, self.slices, strict=True):
                    self._view(whole, piece).copy_(own)
            elif all(_is_same(value, other) for other in values[1:]):
                joined[key] = value
            else:
                return
        self._states = joined
        self._share(optimizer)

    def _share(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the slices' states of the whole's."""
        assert self._states is not None
        self._shared = dict(self._states)
        for piece in self.slices:
            optimizer.state[piece.tensor] = {
                key: self._view(value, piece) if self._is_whole(value) else value
                for key, value in self._states.items()}

    def _split(self, optimizer: torch.optim.Optimizer) -> None:
        """From now on each has a count of its own."""
        assert self._states is not None
        for piece in self.slices:
            optimizer.state[piece.tensor].update({
                key: value.clone() for key, value in self._states.items()
                if isinstance(value, Tensor) and not self._is_whole(value)})
        self._states, self._was_split = None, True

    def _is_whole(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self._tensor.shape

    def _view(self, whole: Tensor, piece: Slice) -> Tensor:
        start = piece.place.start - self._place.start
        return whole[start:start + piece.tensor.numel()]


def chunks_of(part: Part, *, joins: bool) -> list[Chunk]:
    """The part's slices in as few chunks as can be."""
    runs: list[list[Slice]] = []
    for piece in part.slices:
        last = runs[-1][-1] if runs else None
        if last and last.group == piece.group and _aligned(last.place.stop) == piece.place.start:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return [Chunk(part, run, joins=joins) for run in runs]


def _aligned(place: int) -> int:
    return -(-place // ALIGNMENT) * ALIGNMENT


def _is_element_wise(value: Any, piece: Slice) -> bool:
    return isinstance(value, Tensor) and value.shape == piece.tensor.shape


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)
