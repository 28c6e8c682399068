"""Studies told through the store, step by step, as a scheduler would: for tests and for looking at the pages."""

import random
from dataclasses import dataclass, field
from typing import Any

from autotune.domain.prediction import Prediction
from autotune.domain.request import StudyRequest
from autotune.domain.study import PlanSummary, Progress, Study, StudyPhase, StudyState, Trial, TrialRole
from autotune.search.layouts import ClusterPlan
from autotune.store import Database
from engine.config import TrainConfig
from engine.report import Measurement, Outcome, PhaseSeconds, StateBytes, TrialProgress, TrialReport
from engine.statistics import robust_interval
from tests.support.plans import cluster_plan
from tests.support.samples import sample_best, sample_hardware_profile

MIB = 2**20
HARDWARE = {"fingerprint": "hw-1", "device_type": "cpu", "device_name": "AMD EPYC 7B13", "world_size": 2,
            "memory_bytes": 8 * 2**30, "host_memory_bytes": 16 * 2**30, "allreduce_bytes_per_second": 1.9e9,
            "allreduce_latency_seconds": 5.4e-5, "matmul_flops_per_second": {"fp32": 61e9, "bf16": 38e9},
            "copy_bytes_per_second": 9.1e9, "software": {"torch": "2.13.0", "python": "3.11.9"}}
TOKENS_PER_STEP = 32 * 128


def request(name: str = "gpt-tiny", **changes: Any) -> StudyRequest:
    """A study of a small language model on two CPU devices."""
    body: dict[str, Any] = {
        "name": name,
        "model": {"kind": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 4096, "sequence_length": 128},
        "training": {"global_batch_size": 32, "optimizer": {"name": "adamw", "lr": 3e-4}, "gradient_clipping": 1.0},
        "hardware": {"device": "cpu", "devices": 2, "memory_limit_bytes": 600 * MIB},
        "search": {"sampler": "tpe", "space": {"zero_stage": [0, 1, 2, 3], "precision": ["fp32", "bf16"]}},
        "budget": {"max_trials": 14, "max_seconds": 600}}
    return StudyRequest.model_validate({**body, **changes})


def measurement(step_seconds: float, *, peak_mib: float, host_mib: float = 0.0, seed: int = 0,
                **changes: Any) -> Measurement:
    """Twelve steps that scatter by one percent around a mean."""
    chance = random.Random(seed)
    steps = tuple(step_seconds * chance.gauss(1.0, 0.012) for _ in range(12))
    mean = sum(steps) / len(steps)
    low, high = robust_interval(steps)
    values: dict[str, Any] = {
        "step_seconds": steps, "warmup_seconds": (2.6 * step_seconds, 1.2 * step_seconds, 1.05 * step_seconds),
        "tokens_per_second": TOKENS_PER_STEP / mean,
        "tokens_per_second_interval": (TOKENS_PER_STEP / high, TOKENS_PER_STEP / low),
        "samples_per_second": 32 / mean, "peak_device_bytes": round(peak_mib * MIB),
        "peak_host_bytes": round(host_mib * MIB),
        "phases": PhaseSeconds(data=0.01 * mean, forward=0.34 * mean, backward=0.49 * mean, step=0.16 * mean),
        "losses": tuple(8.32 - 0.11 * step + chance.gauss(0, 0.02) for step in range(15)),
        "state_bytes": StateBytes(parameters=18 * MIB, gradients=18 * MIB, optimizer=36 * MIB, host=0),
        "world_size": 2, "threads_per_rank": 1, "setup_seconds": 0.31, "compute_dtype": "fp32"}
    return Measurement.model_validate({**values, **changes})


def prediction(peak_mib: float, step_seconds: float | None = None) -> Prediction:
    """The usual terms, in fixed shares."""
    shares = {"parameters": 0.12, "gradients": 0.12, "optimizer": 0.2, "buckets": 0.06, "gathered": 0.0,
              "activations": 0.46, "workspace": 0.04}
    terms = {name: round(share * peak_mib * MIB) for name, share in shares.items()}
    return Prediction(device_bytes=terms, host_bytes={}, peak_device_bytes=sum(terms.values()), peak_host_bytes=0,
                      step_seconds=step_seconds)


@dataclass
class Story:
    """One study under way. Every method is one transaction, as the scheduler's."""

    database: Database
    study: Study
    finished: int = 0
    numbers: list[int] = field(default_factory=list)

    @classmethod
    def submit(cls, database: Database, wanted: StudyRequest) -> "Story":
        with database.begin() as tx:
            return cls(database, tx.studies.add(wanted))

    @classmethod
    def adopt(cls, database: Database, study_id: str) -> "Story":
        """Go on with a study that was submitted in another way."""
        with database.read() as tx:
            return cls(database, tx.studies.get(study_id))

    def claim(self) -> None:
        """Begin to work on the study; whatever waits before it is put out of the way."""
        while True:
            with self.database.begin() as tx:
                claimed = tx.studies.claim("story", lease_seconds=3600, max_devices=64)
                assert claimed is not None
                if claimed.id == self.study.id:
                    self.study = claimed
                    return
                tx.studies.finish(claimed.id, claimed.lease_epoch, StudyState.CANCELLED)

    def phase(self, phase: StudyPhase) -> None:
        with self.database.begin() as tx:
            tx.studies.set_phase(self.study.id, self.study.lease_epoch, phase)

    def plan(self, *, points: int = 96, feasible: int = 61, total: int = 14) -> None:
        plan = PlanSummary(
            space={"zero_stage": [0, 1, 2, 3], "precision": ["fp32", "bf16"], "micro_batch_size": [1, 2, 4, 8, 16],
                   "activation_checkpointing": ["none", "full"]},
            points=points, feasible=feasible,
            rejections={"predicted 712 MiB or more, over the limit of 600 MiB": 29,
                        "bf16 does not run on this device": points - feasible - 29})
        with self.database.begin() as tx:
            tx.studies.set_plan(self.study.id, self.study.lease_epoch, plan)
            tx.studies.set_progress(self.study.id, self.study.lease_epoch, Progress(trials_total=total))

    def start(self, role: TrialRole = TrialRole.SUGGESTED, *, peak_mib: float = 400, step_seconds: float = 0.3,
              **knobs: Any) -> Trial:
        with self.database.begin() as tx:
            return tx.trials.start(self.study.id, self.study.lease_epoch, role=role, config=TrainConfig(**knobs),
                                   prediction=prediction(peak_mib * 1.04, step_seconds * 0.9))

    def progress_of(self, trial: Trial, step: int) -> None:
        report = TrialProgress(phase="measuring", step=step, step_seconds=0.123)
        with self.database.begin() as tx:
            tx.trials.tell_progress(self.study.id, self.study.lease_epoch, trial.number, report)

    def finish(self, trial: Trial, report: TrialReport, log: str = "", total: int = 14) -> None:
        self.finished += 1
        with self.database.begin() as tx:
            tx.trials.finish(self.study.id, self.study.lease_epoch, trial.number, report, log=log)
            tx.studies.set_progress(self.study.id, self.study.lease_epoch, Progress(
                trials_finished=self.finished, trials_total=total, elapsed_seconds=6.0 * self.finished,
                predicted_rest_seconds=6.0 * (total - self.finished)))

    def ok(self, step_seconds: float, peak_mib: float, *, role: TrialRole = TrialRole.SUGGESTED, host_mib: float = 0.0,
           log: str = "", **knobs: Any) -> Trial:
        """A trial from start to a good end."""
        trial = self.start(role, peak_mib=peak_mib, step_seconds=step_seconds, **knobs)
        run = measurement(step_seconds, peak_mib=peak_mib, host_mib=host_mib, seed=trial.number)
        self.finish(trial, TrialReport(outcome=Outcome.OK, measurement=run), log)
        return trial

    def failed(self, outcome: Outcome, detail: str, *, log: str = "", **knobs: Any) -> Trial:
        trial = self.start(peak_mib=590, **knobs)
        self.finish(trial, TrialReport(outcome=outcome, detail=detail), log)
        return trial

    def repeat(self, number: int, step_seconds: float, peak_mib: float, seed: int) -> None:
        with self.database.begin() as tx:
            tx.trials.add_repeat(self.study.id, self.study.lease_epoch, number,
                                 measurement(step_seconds, peak_mib=peak_mib, seed=seed), log="")

    def succeed(self, winner: int, *, note: str = "the budget of 14 trials is spent", tie_with: tuple[int, ...] = ()
                ) -> None:
        """Name a winner and end."""
        with self.database.begin() as tx:
            trials = {trial.number: trial for trial in tx.trials.list(self.study.id)}
            best, base = trials[winner].measurements[-1], trials[0].measurements[-1]
            speedup = best.tokens_per_second / base.tokens_per_second
            stored = sample_best(
                self.study.id, trial_number=winner, model_name=self.study.request.name, request=self.study.request,
                config=trials[winner].config, hardware_profile=sample_hardware_profile(**HARDWARE),
                tokens_per_second=best.tokens_per_second, tie_with=tie_with,
                tokens_per_second_interval=best.tokens_per_second_interval,
                samples_per_second=best.samples_per_second, step_seconds=TOKENS_PER_STEP / best.tokens_per_second,
                peak_device_bytes=best.peak_device_bytes, peak_host_bytes=best.peak_host_bytes,
                baseline_tokens_per_second=base.tokens_per_second, baseline_peak_device_bytes=base.peak_device_bytes,
                speedup=speedup, speedup_interval=(speedup * 0.985, speedup * 1.015),
                created_at=trials[winner].started_at)
            tx.studies.set_best(self.study.id, self.study.lease_epoch, stored)
            tx.best.put(stored)
            tx.studies.finish(self.study.id, self.study.lease_epoch, StudyState.SUCCEEDED, note=note)

    def fail(self, error: str) -> None:
        with self.database.begin() as tx:
            tx.studies.finish(self.study.id, self.study.lease_epoch, StudyState.FAILED, error=error)


def planned(story: Story, degrees: str = "auto") -> ClusterPlan:
    """Claim, probe and rank, as the scheduler does."""
    story.claim()
    story.phase(StudyPhase.PROBING)
    found = cluster_plan(degrees)
    with story.database.begin() as tx:
        tx.studies.set_plan(story.study.id, story.study.lease_epoch, found.summary)
        tx.studies.finish(story.study.id, story.study.lease_epoch, StudyState.SUCCEEDED, note=found.note)
    return found


LOG = """\
[rank 0] gpt: 4 layers, hidden 256, 5.4 M parameters
[rank 0] ZeRO 2, bf16, micro-batch 4 x 4
[rank 0] warm-up: 0.412 s, 0.201 s, 0.188 s
[rank 0] steady after 3 steps, measuring
"""


def searched(story: Story) -> None:
    """Claim, plan and nine trials of every kind, the fastest of them number 5."""
    story.claim()
    for phase in (StudyPhase.PROBING, StudyPhase.CALIBRATING):
        story.phase(phase)
    story.plan()
    story.phase(StudyPhase.SEARCHING)
    story.ok(0.352, 412, role=TrialRole.BASELINE, micro_batch_size=1, gradient_accumulation_steps=16, log=LOG)
    story.ok(0.298, 436, zero_stage=1, micro_batch_size=4, gradient_accumulation_steps=4)
    story.failed(Outcome.OOM_DEVICE, "rank 1: the process holds 631 MiB, over the limit of 600 MiB, in step 0",
                 micro_batch_size=16, log=LOG)
    story.ok(0.271, 455, zero_stage=2, micro_batch_size=8, gradient_accumulation_steps=2, log=LOG)
    story.ok(0.322, 291, zero_stage=3, micro_batch_size=4, gradient_accumulation_steps=4,
             activation_checkpointing="full")
    story.ok(0.247, 498, zero_stage=1, precision="bf16", micro_batch_size=8, gradient_accumulation_steps=2, log=LOG)
    story.failed(Outcome.CRASHED, 'rank 0: RuntimeError: "addmm" not implemented for half\n(step 2)', precision="fp16",
                 micro_batch_size=4, gradient_accumulation_steps=4, log=LOG + "Traceback (most recent call last):\n")
    story.ok(0.401, 262, zero_stage=3, micro_batch_size=2, gradient_accumulation_steps=8,
             offload_optimizer_ratio=1.0, host_mib=62)
    story.failed(Outcome.TIMEOUT, "no report within 120 s", zero_stage=3, micro_batch_size=1,
                 gradient_accumulation_steps=16, offload_param=True)


def finished(story: Story) -> None:
    """`searched`, three more trials, the confirmation and the winner."""
    searched(story)
    story.ok(0.251, 476, zero_stage=2, precision="bf16", micro_batch_size=8, gradient_accumulation_steps=2)
    story.failed(Outcome.NON_FINITE, "the loss is not finite from step 3 on", precision="bf16", micro_batch_size=16)
    story.ok(0.262, 470, zero_stage=2, precision="bf16", micro_batch_size=4, gradient_accumulation_steps=4)
    story.phase(StudyPhase.CONFIRMING)
    for turn in range(2):
        for number, seconds, peak in ((5, 0.246, 498), (9, 0.252, 476), (11, 0.263, 470)):
            story.repeat(number, seconds, peak, seed=100 + 10 * turn + number)
    story.succeed(5)
