"""What passes between the launcher and one rank: JSON lines over a socket, each one of these values. Torch-free."""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from engine.report import TrialProgress, WorkerReport, WorkerRequest
from engine.values import Value


class WorkerSettings(Value):
    """How a rank is to set itself up, given to it on its command line."""

    rank: int
    world_size: int
    device_type: str
    device_index: int = Field(description="on CPU the number of the core")
    parent_pid: int = Field(description="the rank dies with this process")
    control_fd: int = Field(description="inherited socket to the launcher")
    rendezvous_file: str
    threads: int = Field(description="computing threads")
    host_devices: int = Field(description="devices of this kind on the host, which share its memory on CPU")


class Command(Value):
    """Launcher to rank: do this next. A closed socket means: stop."""

    request: WorkerRequest
    deadline_seconds: float


class RankReady(Value):
    """Rank to launcher: started, in the group, warm."""

    kind: Literal["ready"] = "ready"
    baseline_bytes: int = Field(description="resident bytes before the first trial")


class RankBaseline(Value):
    """Rank to launcher: what it holds as a trial starts, for the guard over its memory."""

    kind: Literal["baseline"] = "baseline"
    resident_bytes: int


class RankVerdict(Value):
    """Rank to launcher: how the request ended here.

    Attributes:
        report: None where this rank has nothing to add to the first rank's.
        clean: the rank can serve another request: nothing failed and its memory is back where it was.
        secondary: the failure only shows that another rank is gone; that rank's own failure is the cause.
        at_seconds: CLOCK_MONOTONIC, the same clock for all ranks of a machine.
    """

    kind: Literal["verdict"] = "verdict"
    report: WorkerReport | None
    clean: bool
    secondary: bool = False
    at_seconds: float


RankMessage = Annotated[RankReady | RankBaseline | RankVerdict | TrialProgress, Field(discriminator="kind")]

_MESSAGES: TypeAdapter[RankMessage] = TypeAdapter(RankMessage)


def encode(value: Value) -> bytes:
    """One line."""
    return value.model_dump_json().encode() + b"\n"


def decode_message(line: bytes) -> RankMessage:
    """One message of a rank.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return _MESSAGES.validate_json(line)
