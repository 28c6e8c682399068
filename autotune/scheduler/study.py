"""One study from claim to winner. `StudyRun.run` is the main path; read it first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

from autotune.domain.earlier import EarlierStudy
from autotune.domain.errors import InvalidRequestError, LaunchError, UnreadableError
from autotune.domain.study import BestConfig, Study, StudyPhase, StudyState, Trial, TrialRole
from autotune.scheduler.fingerprints import calibration_key, probe_key
from autotune.scheduler.gates import gated, improves_reference, judged_again, reference_configs, set_aside
from autotune.scheduler.group import GroupKeeper
from autotune.scheduler.launcher.base import Launcher
from autotune.scheduler.lease import SchedulerPolicy
from autotune.scheduler.record import Record, in_thread
from autotune.scheduler.suggester import Suggester
from autotune.scheduler.telling import telling
from autotune.scheduler.verdict import (
    StudyFailedError,
    Verdict,
    best_config,
    budget_spent,
    contenders,
    hopeless_step_seconds,
    next_repeat,
    progress_of,
    risk_of,
    rivals_among,
    why_hopeless,
)
from autotune.search.choose import Choice, choose, first_configs, why_no_winner
from autotune.search.earlier import earlier_note, predicted_anew
from autotune.search.layouts import plan_cluster
from autotune.search.plan import Plan, make_plan
from autotune.search.remaining import remaining
from autotune.search.reuse import Reused, reusable, reused_note
from autotune.search.space import parse_space
from autotune.search.stopping import why_nothing
from autotune.store import Clock, Transaction, utc_now
from engine.config import TrainConfig
from engine.profile import HardwareProfile, ModelProfile
from engine.report import (
    CalibrateReport,
    CalibrateRequest,
    FailureReport,
    Outcome,
    ProbeReport,
    ProbeRequest,
    TrialReport,
    TrialRequest,
)

PREPARE_SECONDS = 120.0
"""Deadline of probing and of calibrating, unless a trial's is longer; both should take seconds."""

_CONTENDED_NOTE = ("other processes used the devices during every measurement: the result is not kept as the model's "
                   "best configuration")


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a study is run with.

    Attributes:
        record: the study in the store, under this scheduler's lease.
        group: the worker group on the study's devices.
    """

    record: Record
    group: GroupKeeper
    launcher: Launcher
    suggester: Suggester
    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    clock: Clock = utc_now


class StudyRun:
    """Runs a study that was just claimed, from wherever the store says it stands.

    Everything that must survive is in the store as soon as it is known: profiles, plan, finished trials, repeats. What
    is decided from these (the plan, the finalists) is decided again after a restart, with the same result.
    """

    def __init__(self, study: Study, workplace: Workplace) -> None:
        self._study = study
        self._request = study.request
        self._at = workplace
        self._record = workplace.record
        self._key = (study.id, workplace.record.epoch)
        self._started_at = monotonic()
        self._best = study.best
        self._reused: list[Reused] = []
        self._earlier: tuple[EarlierStudy, ...] = ()

    async def run(self) -> Verdict:
        """Work until the study ends; the worker group is closed in any case.

        Raises:
            LeaseLostError: another scheduler has the study.
            StoreUnavailableError: the database cannot be reached; the study can be claimed again.
            asyncio.CancelledError: interrupted; what was recorded so far stays.
        """
        try:
            await self._record.write(lambda tx: tx.trials.discard_running(*self._key))
            model = await self._probe()
            if self._request.mode == "plan":
                return await self._plan_cluster(model)
            hardware = await self._calibrate()
            plan = await self._plan(model, hardware)
            ended_by = await self._search(plan)
            await self._confirm(plan)
            return await self._conclude(plan, ended_by)
        except (StudyFailedError, LaunchError, InvalidRequestError, UnreadableError) as error:
            return Verdict(state=StudyState.FAILED, error=str(error))
        finally:
            await self._at.group.close()

    # Phases

    async def _probe(self) -> ModelProfile:
        """What the model needs, from the store where it was probed before."""
        key = probe_key(self._request.model)
        known = await self._record.read(lambda tx: tx.profiles.model(key)) if key else None
        if known is None:
            await self._enter(StudyPhase.PROBING)
            report, _ = await self._at.group.run(ProbeRequest(model=self._request.model),
                                                 deadline_seconds=self._prepare_seconds())
            if isinstance(report, FailureReport):
                raise StudyFailedError(f"the model could not be probed: {_with_tail(report)}")
            assert isinstance(report, ProbeReport), report
            known = report.profile
        profile = known

        def keep(tx: Transaction) -> None:
            tx.studies.set_fingerprints(*self._key, model=profile.fingerprint)
            tx.profiles.put_model(profile, key=key)

        await self._record.write(keep)
        return profile

    async def _calibrate(self) -> HardwareProfile:
        """What the devices can do, from the store where they were calibrated before beside nothing else."""
        key = calibration_key(self._at.launcher, self._request.hardware.devices)
        known = await self._record.read(lambda tx: tx.profiles.hardware(key))
        if known is None or known.contended:
            await self._enter(StudyPhase.CALIBRATING)
            report, _ = await self._at.group.run(CalibrateRequest(), deadline_seconds=self._prepare_seconds())
            if isinstance(report, FailureReport):
                raise StudyFailedError(f"the devices could not be calibrated: {_with_tail(report)}")
            assert isinstance(report, CalibrateReport), report
            known = report.profile
            await self._record.write(lambda tx: tx.profiles.put_hardware(report.profile, key=key))
        profile = known
        await self._record.write(lambda tx: tx.studies.set_fingerprints(*self._key, hardware=profile.fingerprint))
        return profile

    async def _plan_cluster(self, model: ModelProfile) -> Verdict:
        """Rank configurations for a described cluster; nothing is tried.

        Raises:
            StudyFailedError: nothing should fit.
        """
        found = await in_thread(lambda: plan_cluster(self._request, model))
        hardware, summary = found.plans[0].hardware, found.summary

        def keep(tx: Transaction) -> None:
            tx.studies.set_fingerprints(*self._key, hardware=hardware.fingerprint)
            tx.studies.set_plan(*self._key, summary)

        await self._record.write(keep)
        if found.why_empty is not None:
            raise StudyFailedError(found.why_empty)
        return Verdict(state=StudyState.SUCCEEDED, note=found.note)

    async def _plan(self, model: ModelProfile, hardware: HardwareProfile) -> Plan:
        """What may be tried, with predictions.

        Raises:
            StudyFailedError: nothing.
        """
        def plan_all() -> Plan:
            return make_plan(self._request, parse_space(self._request), model, hardware)

        plan = await in_thread(plan_all)
        await self._record.write(lambda tx: tx.studies.set_plan(*self._key, plan.summary()))
        if not plan.candidates:
            raise StudyFailedError(plan.why_empty())
        return plan

    async def _search(self, plan: Plan) -> str:
        """Try configurations until the budget or the space is used up; says which."""
        await self._enter(StudyPhase.SEARCHING)
        first = await self._first(plan)
        total = min(self._request.budget.max_trials, _distinct(plan, [config for _, config in first]))
        while True:
            trials = await self._trials()
            if (hopeless := why_hopeless(trials)) is not None:
                raise StudyFailedError(hopeless)
            if (spent := budget_spent(self._request, trials, self._elapsed())) is not None:
                return spent
            tried = {plan.canonical(trial.config) for trial in trials}
            role, config = next(((role, config) for role, config in first if plan.canonical(config) not in tried and (
                role is not TrialRole.REFERENCE or improves_reference(config, trials))), (TrialRole.SUGGESTED, None))
            if config is None:
                config = await self._at.suggester.suggest(plan, trials, self._request.search, self._earlier)
                if config is None:
                    return why_nothing(plan, trials, self._request.search)
                assert config in remaining(plan, trials), config
            await self._try(plan, role, config, total=total)

    async def _first(self, plan: Plan) -> list[tuple[TrialRole, TrainConfig]]:
        """What is tried before the sampler is asked, in order."""
        first = first_configs(plan)
        first += [(TrialRole.REFERENCE, config) for config in reference_configs(plan)]
        if self._request.search.sampler == "guided":
            known = await self._record.read(lambda tx: tx.best.of_fingerprint(plan.model.fingerprint))
            earlier = await self._record.read(
                lambda tx: tx.earlier.of(plan.model, plan.hardware, besides=self._study.id))
            self._earlier = tuple(map(predicted_anew, earlier))
            self._reused = reusable(plan, known)
            first += [(TrialRole.SUGGESTED, reused.config) for reused in self._reused]
        return first

    async def _confirm(self, plan: Plan) -> None:
        """Measure the fastest again, turn by turn."""
        rivals = rivals_among(await self._trials(), plan)
        if next_repeat(self._request, rivals) is not None:
            await self._enter(StudyPhase.CONFIRMING)
        while (trial := next_repeat(self._request, rivals)) is not None:
            if self._elapsed() >= self._request.most_seconds:
                return
            await self._repeat(plan, trial)
            rivals = rivals_among(await self._trials(), plan)

    async def _conclude(self, plan: Plan, ended_by: str) -> Verdict:
        """Name the winner and keep it.

        Raises:
            StudyFailedError: there is none.
        """
        trials = await self._trials()
        rivals = rivals_among(trials, plan)
        measured_again = contenders(self._request, rivals)
        choice, clean = _choice(rivals, among=measured_again)
        if choice is None:
            raise StudyFailedError(why_no_winner(rivals))
        best = best_config(self._study, plan, choice, created_at=self._at.clock())

        def keep(tx: Transaction) -> None:
            tx.studies.set_best(*self._key, best)
            tx.studies.set_progress(*self._key, progress_of(
                self._request, trials, trials_total=len(trials), elapsed_seconds=self._elapsed(),
                measured_again=measured_again).model_copy(update={"predicted_rest_seconds": 0.0}))
            if clean:
                tx.best.put(best)

        await self._record.write(keep)
        tried = {plan.canonical(trial.config) for trial in trials}
        reused = [each for each in self._reused if each.config in tried]
        notes = [ended_by, None if clean else _CONTENDED_NOTE, risk_of(choice.config), set_aside(trials),
                 reused_note(reused, plan), earlier_note(plan, self._earlier)]
        return Verdict(state=StudyState.SUCCEEDED, note="; ".join(note for note in notes if note))

    # One measurement

    async def _try(self, plan: Plan, role: TrialRole, config: TrainConfig, *, total: int) -> None:
        """Run one trial and record it, with what it means for progress and best so far."""
        trial = await self._record.write(lambda tx: tx.trials.start(
            *self._key, role=role, config=config, prediction=plan.predict_or_none(config)))
        report, log = await self._measure(plan, trial)

        def keep(tx: Transaction) -> None:
            tx.trials.finish(*self._key, trial.number, report, log=log)
            for judged in judged_again(tx.trials.list(self._study.id)):
                tx.trials.judge(*self._key, judged)
            self._keep_standing(tx, plan, total=total, confirming=False)

        await self._record.write(keep)

    async def _repeat(self, plan: Plan, trial: Trial) -> None:
        """Measure a finalist again and record it."""
        await self._record.write(lambda tx: tx.trials.announce_repeat(*self._key, trial.number))
        report, log = await self._measure(plan, trial)

        def keep(tx: Transaction) -> None:
            if report.outcome is Outcome.OK and report.measurement is not None:
                tx.trials.add_repeat(*self._key, trial.number, report.measurement, log=log)
            else:
                tx.trials.fail_repeat(*self._key, trial.number, report, log=log)
            self._keep_standing(tx, plan, total=0, confirming=True)

        await self._record.write(keep)

    async def _measure(self, plan: Plan, trial: Trial) -> tuple[TrialReport, str]:
        """Measure a configuration; once more where others used the devices meanwhile."""
        trials = await self._trials()
        hopeless = hopeless_step_seconds(self._request, trial, rivals_among(trials, plan))
        report, log = await self._measure_once(trial, hopeless)
        if (report.outcome in (Outcome.OK, Outcome.PRUNED) and report.measurement is not None
                and report.measurement.contended):
            again, second_log = await self._measure_once(trial, hopeless)
            log += second_log
            if again.outcome in (Outcome.OK, Outcome.PRUNED):  # a disturbed measurement says more than a failure
                report = again
        return gated(report, trial.config, plan, trials), log

    async def _measure_once(self, trial: Trial, hopeless: float | None) -> tuple[TrialReport, str]:
        training, budget = self._request.training, self._request.budget
        request = TrialRequest(
            model=self._request.model, optimizer=training.optimizer, config=trial.config,
            global_batch_size=training.global_batch_size, seed=training.seed, policy=self._request.search.policy,
            memory_limit_bytes=self._request.hardware.memory_limit_bytes, hopeless_step_seconds=hopeless)
        async with telling(self._record, trial.number, interval_seconds=self._at.policy.progress) as listen:
            report, log = await self._at.group.run(request, deadline_seconds=budget.trial_timeout_seconds,
                                                   on_progress=listen)
        assert isinstance(report, TrialReport), report
        return report, log

    # Bookkeeping

    def _keep_standing(self, tx: Transaction, plan: Plan, *, total: int, confirming: bool) -> None:
        """Store progress and, where it changed, the best so far; in the transaction that recorded a measurement."""
        trials = tx.trials.list(self._study.id)
        rivals = rivals_among(trials, plan)
        measured_again = contenders(self._request, rivals) if confirming else None
        tx.studies.set_progress(*self._key, progress_of(
            self._request, trials, trials_total=total, elapsed_seconds=self._elapsed(), measured_again=measured_again))
        choice, _ = _choice(rivals, among=measured_again)
        if not _is_known(choice, self._best):
            self._best = None if choice is None else best_config(self._study, plan, choice, created_at=self._at.clock())
            tx.studies.set_best(*self._key, self._best)

    async def _enter(self, phase: StudyPhase) -> None:
        await self._record.write(lambda tx: tx.studies.set_phase(*self._key, phase))

    async def _trials(self) -> tuple[Trial, ...]:
        return await self._record.read(lambda tx: tx.trials.list(self._study.id))

    def _prepare_seconds(self) -> float:
        return max(PREPARE_SECONDS, self._request.budget.trial_timeout_seconds)

    def _elapsed(self) -> float:
        """Seconds of work on this study, earlier schedulers' included; waiting for a restart does not count."""
        return self._study.progress.elapsed_seconds + monotonic() - self._started_at


def _distinct(plan: Plan, configs: Sequence[TrainConfig]) -> int:
    """How many different configurations can be tried: the candidates, and these."""
    return len(plan.index.keys() | {plan.canonical(config) for config in configs})


def _is_known(choice: Choice | None, best: BestConfig | None) -> bool:
    if choice is None or best is None:
        return choice is None and best is None
    return (choice.trial_number, choice.throughput.tokens_per_second, choice.confirmed) == (
        best.trial_number, best.tokens_per_second, best.confirmed)


def _choice(trials: Sequence[Trial], *, among: Sequence[int] | None) -> tuple[Choice | None, bool]:
    """The winner, and whether it was measured without contention; where nothing was, the best guess that there is."""
    choice = choose(trials, among=among)
    if choice is not None:
        return choice, True
    guess = choose(_as_if_alone(trials), among=among)
    return guess and guess.model_copy(update={"confirmed": False}), False


def _as_if_alone(trials: Sequence[Trial]) -> list[Trial]:
    """The trials with their measurements no longer marked as contended: better than no answer, and said so."""
    return [trial.model_copy(update={
        "measurement": trial.measurement and trial.measurement.model_copy(update={"contended": False}),
        "repeats": tuple(repeat.model_copy(update={"contended": False}) for repeat in trial.repeats)})
        for trial in trials]


def _with_tail(report: FailureReport) -> str:
    return f"{report.detail}\n\nEnd of the log:\n{report.log_tail}" if report.log_tail.strip() else report.detail
