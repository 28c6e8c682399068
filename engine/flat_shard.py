"""Flat shards for torch.distributed.checkpoint: pieces of a flattened tensor, cut anywhere.

What is saved knows nothing of ranks, stages or buckets: a 1-D tensor per parameter or state, whose pieces are put
together again, in other pieces, on loading.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

PIECE = 2**21
"""Elements of the largest piece. A load reads whole pieces, as they were saved: this bounds its memory."""


class FlatShard:
    """This rank's pieces of a tensor (numel,).

    Not a dataclass: torch.distributed.checkpoint takes those apart.
    """

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self._pieces: dict[int, Tensor] = {}

    def add(self, start: int, values: Tensor) -> None:
        """Hold `values` (n,) as elements [start, start + n), cut at multiples of `PIECE` of the whole tensor.

        Pieces of any two layouts so share their borders, and no piece is read twice for want of that.
        """
        stop = start + values.numel()
        edges = [start, *range((start // PIECE + 1) * PIECE, stop, PIECE), stop]
        for first, last in pairwise(edges):
            self._pieces[first] = values[first - start:last - start]

    def size(self) -> torch.Size:
        return torch.Size([self.numel])

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        return [WriteItem(index=MetadataIndex(name, torch.Size([start])), type=WriteItemType.SHARD,
                          tensor_data=TensorWriteData(chunk=_chunk(start, piece),
                                                      properties=TensorProperties(dtype=piece.dtype), size=self.size()))
                for start, piece in self._pieces.items()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(start, piece) for start, piece in self._pieces.items()]

    def piece_at(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._pieces[index.offset[0]]


def _chunk(start: int, piece: Tensor) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size([start]), sizes=torch.Size([piece.numel()]))


class FlatSavePlanner(DefaultSavePlanner):
    """The default planner, for flat shards beside tensors; what ranks hold alike is written once."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return found.piece_at(index) if isinstance(found, FlatShard) else super().lookup_object(index)


class FlatLoadPlanner(DefaultLoadPlanner):
    """The default planner, for flat shards beside tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None,
                       is_coordinator: bool = False) -> None:
        # Not the default's, which makes meta tensors real and drops whatever is no tensor while at it.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return found.piece_at(index) if isinstance(found, FlatShard) else super().lookup_tensor(index)
