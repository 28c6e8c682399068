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


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Shared memory that one process maps.

    Attributes:
        key: (device, inode) of the file behind it, the same in every process.
        path: as the kernel names it.
        proportional_bytes: resident pages, each divided by the number of mappings that show it: summed over all
            processes that map the segment, every resident page counts once.
        allocated_bytes: pages that the file holds, mapped or not; 0 where the system does not tell.
    """

    key: tuple[str, int]
    path: str
    proportional_bytes: int
    allocated_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class RankReady:
    """From a rank, after its equal steps.

    Attributes:
        losses: this rank's mean loss in each of them.
        heap_peak_bytes: most heap bytes held in those after the warm-up, less those held before the engine was set up.
        segments: shared memory mapped since this process began to connect to the others.
    """

    losses: tuple[float, ...]
    heap_peak_bytes: int
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
        heap_peak_bytes: of the rank that needs most.
        shared_bytes: an even share of all memory that the ranks share.
    """

    losses: tuple[float, ...]
    heap_peak_bytes: int
    shared_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What one rank takes at most."""
        return self.heap_peak_bytes + self.shared_bytes


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
