"""The problems that samplers are compared on, and how a study of one is scored."""

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from autotune.domain.request import Sampler
from autotune.predict.parallel import Parallel
from benchmarks.replay import Group, Run
from benchmarks.report import Row
from benchmarks.search import grid, groups
from benchmarks.search.__main__ import main
from benchmarks.search.problems import Problem, Score, Truth, make_problem, make_trial, run_study, score, summary
from benchmarks.search.surfaces import PAIRS, Pair, large_surface, problem_before, surface
from benchmarks.search.targets import Target, missed
from benchmarks.search.warm import after_others
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import MIB, hardware_profile, model_profile, study_plan, study_request

SAMPLERS: tuple[Sampler, ...] = ("guided", "tpe", "random", "grid")


def small_problem(*, limit: int | None = None) -> Problem:
    """Stages 0 to 3 with micro-batches 1, 4 and 16; a step takes 1 s and 1 s more for every stage."""
    plan = study_plan(study_request(space={"zero_stage": "auto", "micro_batch_size": [1, 4, 16]},
                                    memory_limit_bytes=limit))
    return make_problem("small", plan, lambda config: Truth(
        step_seconds=1.0 + config.zero_stage, measured_seconds=1.0 + config.zero_stage,
        peak_device_bytes=MIB * config.micro_batch_size, peak_host_bytes=0))


class TestScores:
    def test_the_regret_falls_to_nothing_once_the_best_is_tried(self) -> None:
        for sampler in SAMPLERS:
            score = run_study(small_problem(), sampler, trials=20)
            assert len(score.regrets) == 12
            assert list(score.regrets) == sorted(score.regrets, reverse=True)
            assert score.regrets[0] in (0.0, 1.0, 2.0, 3.0)
            assert score.after(20) == 0.0
            assert score.trials_to_within() == score.regrets.index(0.0) + 1

    def test_trials_that_run_out_of_memory_are_counted_and_win_nothing(self) -> None:
        problem = small_problem()
        tight = make_problem("tight", problem.plan, lambda config: Truth(
            1.0, 1.0, problem.plan.limits.device_bytes + (1 if config.micro_batch_size > 1 else 0), 0))
        score = run_study(tight, "grid", trials=20)
        assert score.out_of_memory > 0
        assert score.regrets[-1] == 0.0
        assert run_study(tight, "grid", trials=1).regrets == (math.inf,)

    def test_trials_that_compute_something_else_are_measured_and_win_nothing(self) -> None:
        plan = small_problem().plan
        problem = make_problem("drift", plan, lambda config: Truth(
            1.0 + config.zero_stage, 1.0 + config.zero_stage, MIB, 0, fails=config.zero_stage == 0))
        assert problem.best_seconds == 2.0
        fails, works = (next(each.config for each in plan.candidates if each.config.zero_stage == stage)
                        for stage in (0, 1))
        drifted = make_trial(problem, 0, fails)
        assert drifted.outcome is Outcome.NUMERICS_DRIFT
        assert drifted.measurement is not None
        assert drifted.measurement.step_seconds == (1.0, 1.0)
        assert score(problem, [drifted, make_trial(problem, 1, works)]).regrets == (math.inf, 0.0)

    def test_a_trial_without_the_memory_cannot_compute_something_else(self) -> None:
        problem = small_problem()
        beyond = problem.plan.limits.device_bytes + 1
        tight = Problem("tight", problem.plan, lambda config: Truth(1.0, 1.0, beyond, 0, fails=True), 1.0)
        assert make_trial(tight, 0, problem.plan.baseline).outcome is Outcome.OOM_DEVICE

    def test_summaries_are_percent_and_take_the_ninth_of_ten(self) -> None:
        scores = [Score(regrets=(0.5, 0.01 * number), out_of_memory=number % 2) for number in range(10)]
        row = summary(scores)
        assert row["% after 5"] == pytest.approx(4.5)
        assert row["trials to 2 %, median"] == math.inf
        assert row["out of memory"] == row["share without"] == 0.5
        reached = [Score(regrets=(0.5,) * number + (0.0,), out_of_memory=0) for number in range(10)]
        assert summary(reached)["90th percentile"] == 9


class TestTargets:
    MET: ClassVar[tuple[Row, ...]] = (
        {"part": "a", "sampler": "guided", "% after 10": 1.0, "90th percentile": 15, "share without": 0.9},
        {"part": "b", "sampler": "rule: most data parallelism", "mean % after 3": 5.4, "mean % after 5": 5.4},
        {"part": "b", "sampler": "guided", "mean % after 3": 2.0, "mean % after 5": 0.5},
        {"part": "c", "sampler": "guided", "trials to 3 %": 8}, {"part": "c", "sampler": "grid", "trials to 3 %": 20},
        {"part": "d", "sampler": "guided", "trials": 100, "ms": 400.0},
        {"part": "d", "sampler": "guided", "trials": 1000, "ms": 99.0},
        {"part": "d", "sampler": "guided after three studies", "trials": 1000, "ms": 400.0},
        {"part": "e", "begins with": "nothing", "% after 10": 3.0})

    def test_what_is_just_reached_is_not_missed(self) -> None:
        assert missed(self.MET, default_studies=True) == []
        assert missed((), default_studies=True) == [], "nothing was run"

    @pytest.mark.parametrize(("place", "worse", "says"), [
        (0, {"% after 10": 1.01}, "(a) guided: % after 10: 1.01, promised at most 1"),
        (0, {"90th percentile": None}, "(a) guided: 90th percentile: not reached, promised at most 15"),
        (0, {"share without": 0.88}, "(a) guided: share without: 0.88, promised at least 0.9"),
        (2, {"mean % after 3": 2.1}, "(b) guided: mean % after 3: 2.1, promised at most 2"),
        (2, {"mean % after 5": 0.6}, "(b) guided: mean % after 5: 0.6, promised at most 0.5"),
        (3, {"trials to 3 %": 9}, "(c) guided: trials to 3 %: 9, promised at most 8"),
        (6, {"ms": 101.0}, "(d) guided after 1000 trials: ms: 101, promised at most 100")])
    def test_what_is_worse_is_told(self, place: int, worse: Row, says: str) -> None:
        rows = [{**row, **worse} if number == place else row for number, row in enumerate(self.MET)]
        assert missed(rows, default_studies=True) == [says]
        assert missed(rows, default_studies=False) == ([] if place == 0 else [says]), "other surfaces may be harder"

    def test_the_command_ends_with_1(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.setattr("sys.argv", ["search", "--parts", "c", "--samplers", "guided"])
        assert main() == 0
        monkeypatch.setattr("benchmarks.search.targets.TARGETS", (Target("c", "trials to 3 %", 0.0),))
        assert main() == 1
        assert "promised at most 0" in capsys.readouterr().out


class TestSurfaces:
    def test_a_seed_names_a_surface(self) -> None:
        one, again, other = surface(0), surface(0), surface(2)
        config = one.plan.candidates[100].config
        assert one.truth(config) == again.truth(config) != other.truth(config)

    @pytest.mark.parametrize("seed", [0, 1])
    def test_predictions_are_off_by_about_what_is_said(self, seed: int) -> None:
        problem = surface(seed)
        assert len(problem.plan.candidates) > 3000
        ratios = [problem.truth(candidate.config).step_seconds / (candidate.prediction.step_seconds or math.nan)
                  for candidate in problem.plan.candidates[::50]]
        assert 1 / 6 < min(ratios) < max(ratios) < 6
        assert max(ratios) / min(ratios) > 1.2

    def test_the_best_is_one_that_fits(self) -> None:
        problem = surface(1)
        truths = [problem.truth(candidate.config) for candidate in problem.plan.candidates]
        limit = problem.plan.limits.device_bytes
        assert problem.best_seconds == min(true.step_seconds for true in truths if true.peak_device_bytes <= limit)
        assert any(true.peak_device_bytes > limit for true in truths)

    def test_the_large_one_is_as_large_as_suggestions_are_timed_on(self) -> None:
        assert len(large_surface().plan.candidates) >= 5000


class TestPairs:
    @pytest.mark.parametrize("seed", [0, 1])
    @pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
    def test_what_is_off_in_one_is_off_in_the_other_as_far_as_the_pair_says(self, pair: Pair, seed: int) -> None:
        before, later = problem_before(pair, seed), surface(seed)
        assert (before.plan.model == later.plan.model) == pair.same_model
        assert (before.plan.hardware == later.plan.hardware) == pair.same_hardware
        off = [[_log_off(problem, config) for config in _common(before, later)] for problem in (before, later)]
        likeness = float(np.corrcoef(off)[0, 1])
        if pair.model == pair.hardware:  # else it lies between
            assert likeness < -0.7 if pair.model < 0 else abs(likeness) < 0.8
        else:
            assert likeness > 0.3

    def test_the_earlier_study_is_told(self) -> None:
        found = after_others([PAIRS[1]], 0, trials=3, told=8)
        assert len(found.regrets) == 3
        assert found.regrets[-1] < run_study(surface(0), "guided", trials=3).regrets[-1]


def _common(before: Problem, later: Problem) -> list[TrainConfig]:
    """Of the later problem, as the earlier one's devices accumulate."""
    share = before.plan.hardware.world_size // later.plan.hardware.world_size
    found = [candidate.config for candidate in later.plan.candidates[::40]]
    return [config for config in found if config.gradient_accumulation_steps % share == 0]


def _log_off(problem: Problem, config: TrainConfig) -> float:
    return math.log(problem.truth(config).step_seconds / (problem.plan.predict(config).step_seconds or math.nan))


def group() -> Group:
    """Two devices side by side or one model cut in two, each with micro-batches 1 to 8; measured as predicted."""
    runs = []
    for parallel in (Parallel(), Parallel(tensor=2)):
        for size in (1, 2, 4, 8):
            config = TrainConfig.model_validate({
                "micro_batch_size": size, "gradient_accumulation_steps": 16 // (size * parallel.data(2))})
            run = Run(name="small", model=model_profile(hidden=256, heads=4, vocab=4096), hardware=hardware_profile(
                device_type="cuda"), config=config, parallel=parallel, measured_seconds=1.0)
            runs.append(Run(name=run.name, model=run.model, hardware=run.hardware, config=config, parallel=parallel,
                            measured_seconds=run.predicted_seconds))
    return Group(devices=2, global_batch_size=16, name="small", runs=tuple(runs))


class TestGroups:
    def test_guided_begins_with_the_best_prediction(self) -> None:
        assert groups.regrets(group(), "guided") == [0.0] * groups.TRIALS

    def test_others_come_closer_with_every_trial(self) -> None:
        for sampler in ("tpe", "random", "grid"):
            found = groups.regrets(group(), sampler)  # type: ignore[arg-type]
            assert found == sorted(found, reverse=True)
            assert found[0] > 0

    def test_the_rule_takes_most_data_parallelism_and_then_the_largest_micro_batch(self) -> None:
        found = group()
        picked = next(run for run in found.runs if run.parallel == Parallel() and run.config.micro_batch_size == 8)
        best = min(run.measured_seconds for run in found.runs)
        assert groups.rule_regret(found) == picked.measured_seconds / best - 1


class TestGrid:
    def test_without_its_file_there_is_no_problem(self, tmp_path: Path) -> None:
        assert grid.stored_problem(tmp_path / "missing.json") is None

    def test_the_one_that_is_kept_is_whole(self) -> None:
        problem = grid.stored_problem()
        assert problem is not None
        assert len(problem.plan.candidates) == 128
        assert all(problem.truth(each.config).step_seconds < math.inf for each in problem.plan.candidates)

    def test_it_is_searched_as_it_was_measured(self, tmp_path: Path) -> None:
        """Every configuration measured twice: a trial sees the first, the mean of both is true."""
        plan = study_plan(grid.REQUEST)
        assert len(plan.candidates) >= 96
        measured = [grid.Measured(config=candidate.config, outcomes=(Outcome.OK,) * 2, peak_host_bytes=(0, 0),
                                  step_seconds=(1.0 + place, 2.0 + place), peak_device_bytes=(MIB, 2 * MIB))
                    for place, candidate in enumerate(plan.candidates)]
        measured[0] = measured[0].model_copy(update={"outcomes": (Outcome.OOM_DEVICE,), "step_seconds": ()})
        stored = grid.Grid(request=grid.REQUEST, model=plan.model, hardware=plan.hardware, measured=tuple(measured))
        file = tmp_path / "grid.json"
        file.write_text(stored.model_dump_json())
        problem = grid.stored_problem(file)
        assert problem is not None
        assert problem.best_seconds == 2.5
        assert problem.truth(plan.candidates[3].config) == Truth(4.5, 4.0, 2 * MIB, 0)
        assert problem.truth(plan.candidates[0].config).peak_device_bytes > plan.limits.device_bytes

    def test_a_file_of_another_space_is_refused(self, tmp_path: Path) -> None:
        plan = study_plan(grid.REQUEST)
        file = tmp_path / "grid.json"
        file.write_text(grid.Grid(request=grid.REQUEST, model=plan.model, hardware=plan.hardware,
                                  measured=()).model_dump_json())
        with pytest.raises(ValueError, match="measure it again"):
            grid.stored_problem(file)
