"""Where a winner's memory and time go, as rows and pieces of bars."""

import pytest

from autotune.domain.explanation import Explanation, Memory, Time
from engine.config import TrainConfig
from web.why import Held, why_view


def explanation(*, predicted: bool = True, on_host: int = 0) -> Explanation:
    memory = Memory(
        predicted_bytes={"parameters": 10, "gradients": 11, "optimizer": 12, "buckets": 3, "activations": 4}
        if predicted else {}, predicted_peak_bytes=40 if predicted else 0,
        measured_bytes={"parameters": 10, "gradients": 9, "optimizer": 12, "rest": 11}, measured_peak_bytes=42,
        predicted_host_bytes={"parameters": 0, "optimizer": on_host, "buckets": 0} if predicted else {},
        measured_host_bytes={"parameters": 0, "optimizer": on_host, "rest": 0}, measured_peak_host_bytes=on_host,
        limit_bytes=100)
    time = Time(predicted_seconds={"forward": 1.0, "recompute": 0.0, "optimizer": 2.0} if predicted else {},
                predicted_step_seconds=3.0 if predicted else None,
                measured_seconds={"data": 0.0, "forward": 1.5, "backward": 1.0, "step": 0.5, "host_step": 2.0},
                measured_step_seconds=5.0)
    return Explanation(trial_number=1, config=TrainConfig(), memory=memory, time=time, binding="", knobs=())


def test_what_is_predicted_beside_states_stands_beside_the_rest() -> None:
    assert why_view(explanation()).memory == (
        Held(label="parameters", predicted=10, measured=10), Held(label="gradients", predicted=11, measured=9),
        Held(label="optimizer", predicted=12, measured=12),
        Held(label="activations, buckets, workspace", predicted=7, measured=11),
        Held(label="peak", predicted=40, measured=42))


def test_the_host_is_told_where_something_lies_there() -> None:
    assert why_view(explanation(on_host=5)).memory[5:] == (
        Held(label="on the host: optimizer", predicted=5, measured=5),)


def test_without_a_prediction_only_measurements_are_told() -> None:
    view = why_view(explanation(predicted=False))
    assert [(part.predicted, part.measured) for part in view.memory] == [
        (None, 10), (None, 9), (None, 12), (None, 11), (None, 42)]
    assert view.predicted_seconds == ()
    assert sum(piece.length for piece in view.measured_seconds) == pytest.approx(100)


def test_both_bars_have_one_scale_and_their_pieces_in_the_same_places() -> None:
    view = why_view(explanation())
    assert {piece.label: piece.length for piece in view.predicted_seconds} == pytest.approx(
        {"forward": 20, "optimizer step": 40, "host optimizer": 0, "backward": 0})
    assert {piece.label: piece.length for piece in view.measured_seconds} == pytest.approx(
        {"forward": 30, "optimizer step": 10, "host optimizer": 40, "backward": 20})
    assert [piece.label for piece in view.predicted_seconds] == [piece.label for piece in view.measured_seconds]
