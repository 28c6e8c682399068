"""Who wins: throughput at the fixed global batch, with its interval; and who cannot."""

from random import Random

import pytest

from autotune.domain.study import TrialRole
from autotune.domain.throughput import shown_gain, throughput
from autotune.search.choose import choose, finalists, first_configs, why_no_winner
from engine.config import TrainConfig
from engine.report import Outcome
from tests.search.support import MIB, finished, measurement, running, study_plan, study_request


def config(**fields: object) -> TrainConfig:
    return TrainConfig.model_validate(fields)


class TestFirst:
    def test_the_default_is_the_baseline_where_the_user_gave_none(self) -> None:
        plan = study_plan(study_request(space={"zero_stage": "auto"}))
        assert first_configs(plan) == [(TrialRole.BASELINE, plan.default)]

    def test_the_default_follows_the_user_s_own_baseline(self) -> None:
        plan = study_plan(study_request(space={"zero_stage": "auto"}, baseline={"zero_stage": 2}))
        assert [(role, each.zero_stage) for role, each in first_configs(plan)] == [
            (TrialRole.BASELINE, 2), (TrialRole.DEFAULT, 0)]

    def test_a_baseline_equal_to_the_default_is_tried_once(self) -> None:
        plan = study_plan(study_request(space={"zero_stage": "auto"}, baseline={"zero_stage": 0}))
        assert [role for role, _ in first_configs(plan)] == [TrialRole.BASELINE]


class TestThroughput:
    def test_its_units(self) -> None:
        """Steps of 0.5 s, micro-batch 2 on 2 ranks without accumulation: 8 samples/s."""
        rate = throughput(finished(0, None, measurement(0.5, 0.5, 0.5, samples_per_step=4, tokens_per_step=4 * 128)))
        assert rate is not None
        assert rate.samples_per_second == pytest.approx(8.0)
        assert rate.tokens_per_second == pytest.approx(8.0 * 128)
        assert rate.step_seconds == pytest.approx(0.5)

    def test_pools_the_steps_of_all_repeats(self) -> None:
        rate = throughput(finished(0, None, measurement(1.0, 1.0), measurement(2.0, 2.0), measurement(3.0, 3.0)))
        assert rate is not None
        assert rate.tokens_per_second == pytest.approx(4096 / 2)
        assert rate.interval[0] < rate.tokens_per_second < rate.interval[1]

    def test_more_steps_narrow_the_interval(self) -> None:
        few, many = (throughput(finished(0, None, measurement(*[0.9, 1.1] * count))) for count in (2, 20))
        assert few is not None
        assert many is not None
        assert many.relative_error < few.relative_error / 2

    @pytest.mark.parametrize("drift", [0.0, 0.03, 0.1])
    def test_the_interval_holds_what_it_says_although_the_machine_drifts(self, drift: float) -> None:
        """Three measurements of ten steps whose true mean is 1 s: pooled steps alone would hold it in 4 to 6 of 10."""
        random, covered = Random(0), 0
        for _ in range(300):
            centres = [1 + random.gauss(0, drift) for _ in range(3)]
            rate = throughput(finished(0, None, *(
                measurement(*(random.gauss(centre, 0.03) for _ in range(10))) for centre in centres)))
            assert rate is not None
            covered += rate.interval[0] <= 4096 <= rate.interval[1]
        assert covered >= 0.92 * 300

    def test_a_contended_measurement_does_not_count_beside_a_clean_one(self) -> None:
        rate = throughput(finished(0, None, measurement(9.0, 9.0, contended=True), measurement(1.0, 1.0)))
        assert rate is not None
        assert rate.step_seconds == 1.0
        assert throughput(finished(0, None, measurement(1.0, 1.0, contended=True))) is None

    def test_a_clean_trial_is_not_compared_with_a_contended_baseline(self) -> None:
        clean, contended = (finished(0, None, measurement(1.0, 1.0, contended=flag)) for flag in (False, True))
        assert shown_gain(clean, contended) is None
        assert shown_gain(contended, clean) is None
        assert shown_gain(clean, clean) == shown_gain(contended, contended) == 1.0

    def test_one_step_alone_falls_back_on_the_worker_s_own_interval(self) -> None:
        rate = throughput(finished(0, None, measurement(1.0)))
        assert rate is not None
        assert rate.interval == pytest.approx((4096 * 0.97, 4096 * 1.03))


class TestWinner:
    def test_throughput_wins_not_the_shorter_pass(self) -> None:
        """16 samples in 443 ms beat 8 samples in 233 ms."""
        large = finished(0, config(micro_batch_size=16), measurement(0.443, 0.443, samples_per_step=16,
                                                                     tokens_per_step=16 * 128))
        small = finished(1, config(micro_batch_size=8), measurement(0.233, 0.233, samples_per_step=8,
                                                                    tokens_per_step=8 * 128))
        assert finalists([small, large], 2) == [0, 1]
        choice = choose([small, large])
        assert choice is not None
        assert choice.trial_number == 0

    def test_the_fastest_wins_and_a_tie_is_declared(self) -> None:
        trials = [finished(0, config(zero_stage=0), measurement(2.0, 2.01)),
                  finished(1, config(zero_stage=1), measurement(1.00, 1.02, 0.98, peak_device_bytes=300 * MIB)),
                  finished(2, config(zero_stage=2), measurement(1.01, 1.03, 0.99, peak_device_bytes=200 * MIB))]
        choice = choose(trials)
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (1, (2,))

    def test_among_equally_fast_ones_less_memory_wins(self) -> None:
        trials = [finished(0, config(zero_stage=0), measurement(1.0, 1.02, peak_device_bytes=300 * MIB)),
                  finished(1, config(zero_stage=1), measurement(1.0, 1.02, peak_device_bytes=200 * MIB))]
        choice = choose(trials)
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (1, (0,))

    def test_a_clear_lead_is_no_tie(self) -> None:
        trials = [finished(0, config(), measurement(2.0, 2.01, 1.99, peak_device_bytes=MIB)),
                  finished(1, config(zero_stage=1), measurement(1.0, 1.01, 0.99))]
        choice = choose(trials)
        assert choice is not None
        assert (choice.trial_number, choice.tie_with) == (1, ())
        assert choice.speedup == pytest.approx(2.0)
        assert choice.speedup_interval is not None
        assert 1.8 < choice.speedup_interval[0] < 2.0 < choice.speedup_interval[1] < 2.2
        assert choice.baseline_peak_device_bytes == MIB

    def test_only_ok_and_uncontended_trials_win(self) -> None:
        slow = finished(0, config(), measurement(2.0, 2.0))
        others = [finished(number, config(zero_stage=1), measurement(0.1, 0.1), outcome=outcome)
                  for number, outcome in enumerate(Outcome, start=1) if outcome is not Outcome.OK]
        contended = finished(50, config(zero_stage=2), measurement(0.1, 0.1, contended=True))
        trials = [slow, *others, contended, running(51, config(zero_stage=3))]
        choice = choose(trials)
        assert choice is not None
        assert choice.trial_number == 0
        assert choice.speedup == 1.0
        assert finalists(trials, 5) == [0, 50]

    def test_a_diverged_trial_is_never_best_however_fast(self) -> None:
        diverged = finished(0, config(), measurement(0.1, 0.1, losses=(1.0, None)), outcome=Outcome.NON_FINITE)
        assert choose([diverged]) is None

    def test_among_the_finalists_only_those_measured_again_can_win(self) -> None:
        trials = [finished(0, config(), measurement(1.5, 1.5, 1.5)),
                  finished(1, config(zero_stage=1), measurement(0.9, 0.9, 0.9)),
                  finished(2, config(zero_stage=2), measurement(1.0, 1.0, 1.0), measurement(1.0, 1.0, 1.0))]
        choice = choose(trials, among=[2])
        assert choice is not None
        assert (choice.trial_number, choice.confirmed) == (2, True)

    def test_without_a_valid_baseline_there_is_no_speedup(self) -> None:
        trials = [finished(0, config(), outcome=Outcome.OOM_DEVICE),
                  finished(1, config(zero_stage=1), measurement(1.0, 1.1))]
        choice = choose(trials)
        assert choice is not None
        assert (choice.speedup, choice.speedup_interval, choice.baseline_trial_number) == (None, None, 0)


class TestNoWinner:
    def test_without_trials(self) -> None:
        assert choose([]) is None
        assert finalists([], 3) == []
        assert why_no_winner([]) == "no trial has finished yet"

    def test_out_of_memory_down_to_one_sample(self) -> None:
        trials = [finished(number, config(micro_batch_size=size), outcome=Outcome.OOM_DEVICE)
                  for number, size in enumerate((4, 2, 1))]
        assert choose(trials) is None
        assert why_no_winner(trials) == ("no feasible micro-batch: even micro_batch_size 1 ran out of memory "
                                         "(3 x oom_device)")

    def test_counts_by_outcome_and_the_first_cause(self) -> None:
        trials = [finished(0, config(), outcome=Outcome.OOM_HOST, detail="killed"),
                  finished(1, config(), outcome=Outcome.CRASHED, detail="ValueError: bad arg"),
                  finished(2, config(), outcome=Outcome.CRASHED, detail="ValueError: bad arg")]
        assert why_no_winner(trials) == ("no trial gave a valid measurement (2 x crashed, 1 x oom_host); "
                                         "trial 1: ValueError: bad arg")
