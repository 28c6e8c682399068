"""Where a winner's memory and time go, as its study's page shows it: what was predicted beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.domain.explanation import Explanation, Memory, Time
from web.plan_view import Segment, segments
from web.words import MEASURED_PARTS

_PREDICTED_PARTS = {"optimizer": MEASURED_PARTS["step"], "host_transfer": MEASURED_PARTS["transfer"]}


@dataclass(frozen=True, kw_only=True)
class Held:
    """Bytes of one part, or of all; None: nothing was predicted."""

    label: str
    predicted: int | None
    measured: int


@dataclass(frozen=True, kw_only=True)
class WhyView:
    """
    Attributes:
        memory: the parts of the device and their sum, then those of the host where anything is offloaded.
        predicted_seconds: of a step, on one scale with `measured_seconds` and with the same pieces in the same places,
            so that these look alike; empty where no time was predicted.
    """

    explanation: Explanation
    memory: tuple[Held, ...]
    predicted_seconds: tuple[Segment, ...]
    measured_seconds: tuple[Segment, ...]


def why_view(explanation: Explanation) -> WhyView:
    """The page's view of the evidence."""
    predicted, measured = _seconds(explanation.time)
    return WhyView(explanation=explanation, memory=_memory(explanation.memory), predicted_seconds=predicted,
                   measured_seconds=measured)


def _memory(memory: Memory) -> tuple[Held, ...]:
    device = _parts(memory.predicted_bytes, memory.measured_bytes, rest="activations, buckets, workspace")
    peak = Held(label="peak", predicted=memory.predicted_peak_bytes if memory.predicted_bytes else None,
                measured=memory.measured_peak_bytes)
    host = _parts(memory.predicted_host_bytes, memory.measured_host_bytes, rest="buffers", where="on the host: ")
    return (*device, peak, *(part for part in host if part.predicted or part.measured))


def _parts(predicted: Mapping[str, int], measured: Mapping[str, int], *, rest: str, where: str = ""
           ) -> tuple[Held, ...]:
    """The parts that were measured; the terms that are predicted beyond them are their rest."""
    others = sum(count for name, count in predicted.items() if name not in measured)
    terms = {**predicted, "rest": others} if predicted else {}
    return tuple(Held(label=where + (rest if name == "rest" else name), predicted=terms.get(name), measured=count)
                 for name, count in measured.items())


def _seconds(time: Time) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    predicted = {_PREDICTED_PARTS.get(name, name.replace("_", " ")): seconds
                 for name, seconds in time.predicted_seconds.items() if seconds}
    measured = {MEASURED_PARTS[name]: seconds for name, seconds in time.measured_seconds.items() if seconds}
    scale = max(sum(predicted.values()), sum(measured.values()))
    labels = dict.fromkeys([*predicted, *measured], 0.0)
    return segments({**labels, **predicted}, scale=scale) if predicted else (), segments(
        {**labels, **measured}, scale=scale)
