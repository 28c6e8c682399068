"""What the driver and the ranks say to each other, and what an engine measured, all ranks together. Loads no torch."""

from dataclasses import dataclass

from benchmarks.peers.plan import Scenario


@dataclass(frozen=True, kw_only=True)
class Job:
    """To a rank, once: what to train, and by which adapter."""

    adapter: str
    scenario: Scenario
    rank: int
    world_size: int


Key = tuple[str, int]
"""Device and inode of a file, the same in every process."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Shared memory that one process maps.

    Attributes:
        key: of the file behind it.
        path: as the kernel names it.
        proportional_bytes: resident pages, each divided by the number of mappings that show it: summed over all
            processes that map the segment, every resident page counts once.
        is_open: whether the process also has the file open.
    """

    key: Key
    path: str
    proportional_bytes: int
    is_open: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryPeaks:
    """The most that a rank has held at one time.

    Attributes:
        heap_bytes: of the heap.
        shared_bytes: of its even share of the memory that ranks share.
        together_bytes: of both at once, which is no more than the sum of the others.
    """

    heap_bytes: int = 0
    shared_bytes: int = 0
    together_bytes: int = 0

    def with_interval(self, *, heap_bytes: int, shared_bytes: int) -> "MemoryPeaks":
        """With a further stretch of time, in which these were the most."""
        return MemoryPeaks(heap_bytes=max(self.heap_bytes, heap_bytes),
                           shared_bytes=max(self.shared_bytes, shared_bytes),
                           together_bytes=max(self.together_bytes, heap_bytes + shared_bytes))


@dataclass(frozen=True, kw_only=True)
class RankReady:
    """From a rank, after its equal steps.

    Attributes:
        losses: this rank's mean loss in each of them.
        peaks: in those after the warm-up, above what was there before the engine was set up.
        segments: shared memory mapped after them, and not before this process began to connect to the others.
    """

    losses: tuple[float, ...]
    peaks: MemoryPeaks
    segments: tuple[Segment, ...]


@dataclass(frozen=True, kw_only=True)
class RankTurn:
    """From a rank, after a turn: seconds of each step by the clock, and of all together on the processor."""

    step_seconds: tuple[float, ...]
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Ready:
    """An engine after its equal steps.

    Attributes:
        losses: of the global batch, step by step.
        peaks: each of the rank that needs most.
    """

    losses: tuple[float, ...]
    peaks: MemoryPeaks


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps in a row.

    Attributes:
        step_seconds: of each step, by the slowest rank.
        cpu_seconds: on the processor, per step and rank.
        foreign_cores: cores that others kept busy meanwhile, on average.
    """

    step_seconds: tuple[float, ...]
    cpu_seconds: float
    foreign_cores: float
