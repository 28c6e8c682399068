"""How values look in a terminal."""

from io import StringIO

import pytest
from rich.console import Console

from autotune.cli.output import measured_text, rate_text, winner_lines
from autotune.cli.screen import StudyScreen
from autotune.domain.study import Trial, TrialRole, TrialState
from engine.config import TrainConfig
from engine.report import Outcome
from tests.support.samples import START, sample_best, sample_measurement
from tests.web.values import study


@pytest.mark.parametrize(("outcome", "speed"), [(Outcome.OK, "641 tok/s"), (Outcome.NON_FINITE, "1,280 tok/s")])
def test_a_trial_shows_all_its_measurements_where_they_count(outcome: Outcome, speed: str) -> None:
    first, again = sample_measurement(0.1), sample_measurement(0.3, peak_device_bytes=3 * 2**20)
    trial = Trial(study_id="0" * 32, number=1, role=TrialRole.SUGGESTED, state=TrialState.FINISHED, outcome=outcome,
                  config=TrainConfig(micro_batch_size=8), measurement=first, repeats=(again,), started_at=START)
    assert measured_text(trial) == (speed, "3.0 MiB")


def test_each_run_is_told_once_with_its_own_rate() -> None:
    """A repeat that came between two looks is not lost, and none is told as the mean of all."""
    first, again = sample_measurement(0.1), sample_measurement(0.2)
    trial = Trial(study_id="0" * 32, number=1, role=TrialRole.SUGGESTED, state=TrialState.FINISHED, outcome=Outcome.OK,
                  config=TrainConfig(), measurement=first, repeats=(again,), started_at=START)
    console = Console(file=StringIO(), width=200)
    with StudyScreen(console) as screen:
        screen.show(study(), {1: trial.model_copy(update={"repeats": ()})})
        screen.show(study(), {1: trial})
        later = (again, sample_measurement(0.4, contended=True), first)
        screen.show(study(), {1: trial.model_copy(update={"repeats": later})})
    assert isinstance(console.file, StringIO)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("trial")]
    assert [line.split()[3] for line in lines] == ["1,280", "640", "320", "1,280"]
    assert [line.rpartition("  ")[2] for line in lines[1:]] == [f"(measured again, {run})" for run in (1, 2, 3)]
    assert ["(contended: does not count)" in line for line in lines] == [False, False, True, False]


def test_a_task_without_tokens_is_told_in_samples() -> None:
    assert rate_text(sample_measurement(0.1, tokens_per_sample=1)) == "80.00 samples/s"
    assert rate_text(sample_measurement(0.1, tokens_per_sample=1), 123.4) == "123 samples/s"


@pytest.mark.parametrize(("speedup", "line"), [
    (1.25, "speed-up: 1.25x (1.20 to 1.30)"), (1.28, "speed-up: 1.28x (1.20 to 1.30), in the same rounds")])
def test_a_gain_that_is_not_the_ratio_of_the_rates_says_where_it_is_from(speedup: float, line: str) -> None:
    lines = winner_lines(sample_best(speedup=speedup), {})
    assert "baseline: 800 tok/s" in lines
    assert line in lines


def test_what_is_not_told_apart_stands_with_its_own_rate_and_how_often_it_was_measured() -> None:
    trial = Trial(study_id="0" * 32, number=4, role=TrialRole.SUGGESTED, state=TrialState.FINISHED, outcome=Outcome.OK,
                  config=TrainConfig(), measurement=sample_measurement(0.1), started_at=START)
    again = trial.model_copy(update={"number": 5, "repeats": (
        sample_measurement(0.1), sample_measurement(0.3, contended=True))})
    lines = winner_lines(sample_best(tie_with=(4, 5)), {4: trial, 5: again})
    assert lines[-1] == ("not told apart from the fastest: trial 4 (1,280 tok/s, measured once), "
                         "trial 5 (1,280 tok/s, measured 2 times)")
