"""Neighbouring slices that step as one tensor, so that a step costs the same however many parameters there are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.buckets import ALIGNMENT
from engine.optimizers import first_state
from engine.owned import Part, Slice


class Chunk:
    """Slices of one part and one group, with nothing but padding between and behind them.

    As long as all of them have a gradient, one tensor over all of them steps, and their states are views of its states;
    those that are one for a whole tensor, as a step count, they share. Once one of them was left out they step one by
    one. Padding has gradients and values of zero.

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
        self._given: dict[str, Any] | None = None  # the first slice's states, as made of the whole's
        self._joins, self._apart = joins, False

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the states that the first step would make, where it is known what they are."""
        state = first_state(optimizer, self._tensor, optimizer.param_groups[self.group])
        if state and self._joins and not any(optimizer.state.get(piece.tensor) for piece in self.slices):
            self._states = state
            self._share(optimizer)

    def begin(self, optimizer: torch.optim.Optimizer, gradient: Tensor, used: set[int] | None) -> list[Tensor]:
        """The tensors that are to step, with their gradients.

        Args:
            gradient: of the whole part.
            used: indices of parameters that have one; None: all.
        """
        if self._states is not None and optimizer.state.get(self.slices[0].tensor) is not self._given:
            self.reset()
        complete = used is None or all(piece.managed.index in used for piece in self.slices)
        if self._states is None and complete and self._joins and not self._apart:
            self._join(optimizer)
        elif self._states is not None and not complete:
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

    def reset(self) -> None:
        """Their states were replaced from outside."""
        self._states, self._apart = None, False

    def _join(self, optimizer: torch.optim.Optimizer) -> None:
        """Make their states views of states of the whole, unless they differ in what is to be one for all."""
        states = [optimizer.state.get(piece.tensor, {}) for piece in self.slices]
        wholes = [key for key in states[0] if all(
            _is_element_wise(state.get(key), piece) for state, piece in zip(states, self.slices, strict=True))]
        rests = [{key: value for key, value in state.items() if key not in wholes} for state in states]
        if any(rest.keys() != rests[0].keys() or not all(_is_same(rest[key], rests[0][key]) for key in rest)
               for rest in rests[1:]):
            self._apart = True
            return
        self._states = dict(rests[0])
        for key in wholes:
            whole = self._states[key] = torch.zeros_like(self._tensor, dtype=states[0][key].dtype)
            for state, piece in zip(states, self.slices, strict=True):
                self._view(whole, piece).copy_(state[key])
        self._share(optimizer)

    def _share(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the slices' states of the whole's."""
        assert self._states is not None
        self._shared = dict(self._states)
        for piece in self.slices:
            optimizer.state[piece.tensor] = {
                key: self._view(value, piece) if self._is_whole(value) else value
                for key, value in self._states.items()}
        self._given = optimizer.state[self.slices[0].tensor]

    def _split(self, optimizer: torch.optim.Optimizer) -> None:
        """Give each a count of its own."""
        assert self._states is not None
        for piece in self.slices:
            optimizer.state[piece.tensor].update({
                key: value.clone() for key, value in self._states.items()
                if isinstance(value, Tensor) and not self._is_whole(value)})
        self._states, self._apart = None, True

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
