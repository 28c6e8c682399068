"""What is not worth a trial: tried configurations, and those bound to run out of memory."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.search.plan import Candidate
from autotune.search.remaining import remaining
from engine.report import MAYBE_FROM_OUTSIDE, Outcome
from tests.search.support import finished, hardware_profile, study_plan, study_request

PLAN = study_plan(study_request(space={
    "zero_stage": "auto", "micro_batch_size": "auto", "precision": "auto", "offload_optimizer_ratio": "auto",
    "activation_checkpointing": "auto"}), hardware=hardware_profile(device_type="cuda"))
NUMBERS = st.integers(0, len(PLAN.candidates) - 1)
OUTCOMES = st.sampled_from([Outcome.OK, Outcome.OOM_DEVICE, Outcome.OOM_HOST, Outcome.CRASHED])


def needs_as_much(candidate: Candidate, lost: Candidate, outcome: Outcome) -> bool:
    """By every term of the memory that ran out."""
    mine, theirs = ((each.prediction.device_bytes if outcome is Outcome.OOM_DEVICE else each.prediction.host_bytes)
                    for each in (candidate, lost))
    return any(theirs.values()) and all(mine[term] >= theirs[term] for term in theirs)


@given(st.dictionaries(NUMBERS, OUTCOMES, max_size=4))
def test_exactly_what_needs_less_by_some_term_than_all_that_ran_out_is_left(ended: dict[int, Outcome]) -> None:
    trials = [finished(number, PLAN.candidates[point].config, outcome=outcome)
              for number, (point, outcome) in enumerate(ended.items())]
    expected = [candidate.config for point, candidate in enumerate(PLAN.candidates) if point not in ended and not any(
        outcome.is_out_of_memory and needs_as_much(candidate, PLAN.candidates[lost], outcome)
        for lost, outcome in ended.items())]
    assert [*remaining(PLAN, trials)] == expected


def test_a_kill_without_a_known_cause_rules_nothing_out_and_is_tried_once_more() -> None:
    lost = max(PLAN.candidates, key=lambda candidate: candidate.prediction.peak_host_bytes).config
    killed = [finished(number, lost, outcome=Outcome.OOM_HOST, detail=f"rank 0: {MAYBE_FROM_OUTSIDE}\n\nEnd of the log")
              for number in range(2)]
    everything = [candidate.config for candidate in PLAN.candidates]
    assert [*remaining(PLAN, killed[:1])] == everything
    assert [*remaining(PLAN, killed)] == [config for config in everything if config != lost]
    assert killed[0].is_killed_unexplained
    assert not finished(0, lost, outcome=Outcome.OOM_HOST, detail=f"rank 0\n{MAYBE_FROM_OUTSIDE}").is_killed_unexplained


@given(NUMBERS)
def test_a_larger_micro_batch_than_one_that_ran_out_is_not_left(point: int) -> None:
    lost = PLAN.candidates[point].config
    left = remaining(PLAN, [finished(0, lost, outcome=Outcome.OOM_DEVICE)])
    larger = [config for config in left if config.micro_batch_size > lost.micro_batch_size
              and config.model_copy(update={"micro_batch_size": lost.micro_batch_size, "gradient_accumulation_steps":
                                            lost.gradient_accumulation_steps}) == lost]
    # where accumulation ends, gradients are no longer summed in fp32: one term becomes smaller
    assert all(config.gradient_accumulation_steps == 1 for config in larger)
