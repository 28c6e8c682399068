"""What can be asked. Every call is one short read transaction; callers get the domain's frozen values."""

from datetime import datetime

from autotune.domain.catalog import ModelSummary
from autotune.domain.cluster import Cluster
from autotune.domain.errors import ConflictError, FieldError, InvalidRequestError, NotFoundError, NoWinnerError
from autotune.domain.explanation import Explanation
from autotune.domain.hardware import DeviceLease, Host
from autotune.domain.page import Page
from autotune.domain.study import BestConfig, Event, PlanSummary, Study, StudyState, Trial
from autotune.export import FORMATS, ExportedFile
from autotune.export import export as write_export
from autotune.search.explain import explain
from autotune.search.layouts import described_clusters
from autotune.store.database import Database
from engine.profile import HardwareProfile
from engine.values import Value


class DeviceView(Value):
    """One device and who holds it.

    Attributes:
        study_id: the study that holds it; None: free.
        held_until: when the hold ends unless renewed.
    """

    host: str
    device_type: str
    device_name: str
    index: int
    study_id: str | None = None
    held_until: datetime | None = None


class HardwareView(Value):
    """Hosts whose schedulers reported, their devices with holders, and what calibration measured."""

    hosts: tuple[Host, ...]
    devices: tuple[DeviceView, ...]
    profiles: tuple[HardwareProfile, ...]


class StoreCounts(Value):
    """Totals for monitoring."""

    studies: dict[str, int]
    trials: dict[str, int]
    devices: int
    devices_held: int


class Queries:
    """Reads for the REST handlers and the dashboard.

    Raises (every method that takes an id or a name):
        NotFoundError: there is no such thing.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def check(self) -> None:
        """Whether the store can be used.

        Raises:
            StoreUnavailableError: it cannot be reached, or is not at the version of this code.
        """
        self._database.check()

    def studies(self, *, state: StudyState | None = None, model: str | None = None, cursor: str | None = None,
                limit: int = 50) -> Page[Study]:
        """Studies, newest first.

        Raises:
            InvalidRequestError: a cursor that no page gave, or a limit out of range.
        """
        with self._database.read() as transaction:
            return transaction.studies.page(state=state, model=model, cursor=cursor, limit=limit)

    def study(self, study_id: str) -> Study:
        """One study, without its plan, which may be large: see `plan`."""
        with self._database.read() as transaction:
            return transaction.studies.get(study_id, with_plan=False)

    def plan(self, study_id: str) -> PlanSummary:
        """What the plan found.

        Raises:
            ConflictError: it has not been made, or never will be.
        """
        plan = self._with_plan(study_id).plan
        assert plan is not None
        return plan

    def _with_plan(self, study_id: str) -> Study:
        with self._database.read() as transaction:
            study = transaction.studies.get(study_id)
        if study.plan is None:
            raise ConflictError(
                f"study {study_id} ended before its plan was made: {study.error or study.state.value}"
                if study.state.is_final else
                f"study {study_id} has no plan yet: it is {study.phase or study.state}; ask again")
        return study

    def trials(self, study_id: str) -> tuple[Trial, ...]:
        """All trials of a study, by number."""
        with self._database.read() as transaction:
            transaction.studies.get(study_id, with_plan=False)
            return transaction.trials.list(study_id)

    def trials_page(self, study_id: str, *, cursor: str | None = None, limit: int = 50) -> Page[Trial]:
        """Trials of a study by number, a page at a time."""
        with self._database.read() as transaction:
            transaction.studies.get(study_id, with_plan=False)
            return transaction.trials.page(study_id, cursor=cursor, limit=limit)

    def trial(self, study_id: str, number: int) -> Trial:
        with self._database.read() as transaction:
            transaction.studies.get(study_id, with_plan=False)
            return transaction.trials.get(study_id, number)

    def trial_log(self, study_id: str, number: int) -> str:
        """What the ranks of a trial wrote; empty while it runs."""
        with self._database.read() as transaction:
            transaction.studies.get(study_id, with_plan=False)
            transaction.trials.get(study_id, number)
            return transaction.trials.log(study_id, number)

    def outcomes(self, study_id: str) -> dict[str, int]:
        """How many trials of a study ended in which way; those under way count as ``running``."""
        with self._database.read() as transaction:
            transaction.studies.get(study_id, with_plan=False)
            return transaction.trials.count(study_id)

    def best(self, study_id: str) -> BestConfig:
        """The winner with its evidence; while the study runs, the best so far (`confirmed` tells them apart).

        Raises:
            NoWinnerError: there is none, with the counts of trials by outcome.
        """
        study = self.study(study_id)
        if study.best is not None:
            return study.best
        outcomes = self.outcomes(study_id)
        counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())) or "none yet"
        reason = f": {study.error}" if study.error else self._why_only_planned(study)
        raise NoWinnerError(f"study {study_id} is {study.state.value} and has no winner{reason} (trials: {counts})",
                            outcomes=outcomes)

    def _why_only_planned(self, study: Study) -> str:
        if study.request.mode != "plan" or study.state is not StudyState.SUCCEEDED:
            return ""
        return f" as it only planned: export a row of it, --row 1 to {len(self.plan(study.id).rows)}"

    def explanation(self, study_id: str) -> Explanation:
        """Where the winner's memory and time go, what binds, and what each knob would have cost.

        Raises:
            NoWinnerError: there is no winner.
        """
        return explain(self.best(study_id), self.trials(study_id))

    def export(self, study_id: str, format: str, row: int | None = None) -> ExportedFile:
        """The winner as a file for a training tool; with `row`, that row of a plan, which the file says is predicted.

        Raises:
            InvalidRequestError: an unknown format or row.
            NoWinnerError: nothing to export.
            ConflictError: a row of a plan that has not been made.
            ExportError: the format cannot express the configuration.
        """
        study = self.study(study_id)
        if format not in FORMATS:
            raise InvalidRequestError(FieldError(
                "format", f"unknown format {format!r}: give one of {', '.join(FORMATS)}"))
        if row is not None:
            return write_export(self._with_plan(study_id).planned(row), format)
        return write_export(study.best or self.best(study_id), format)

    def clusters(self) -> tuple[Cluster, ...]:
        """Those that can be planned for by name."""
        return described_clusters()

    def export_formats(self) -> tuple[str, ...]:
        """Names of the formats that `export` knows."""
        return FORMATS

    def models(self) -> tuple[ModelSummary, ...]:
        """Models seen, by name."""
        with self._database.read() as transaction:
            return transaction.best.models()

    def best_for_model(self, name: str) -> tuple[BestConfig, ...]:
        """The best stored configurations of a model, one per training set-up and hardware; maybe none yet."""
        with self._database.read() as transaction:
            found = transaction.best.for_model(name)
            if not found and all(model.name != name for model in transaction.best.models()):
                raise NotFoundError(f"no model {name!r}: GET /api/v1/models lists those seen")
            return found

    def hardware(self) -> HardwareView:
        """Devices, who holds them, and what calibration measured."""
        with self._database.read() as transaction:
            hosts = transaction.hosts.list()
            leases = transaction.leases.live()
            profiles = transaction.profiles.list_hardware()
        return HardwareView(hosts=hosts, devices=_devices(hosts, leases), profiles=profiles)

    def events_after(self, last_id: int, *, study_id: str | None = None, limit: int = 500) -> tuple[Event, ...]:
        """Events with a larger id, oldest first."""
        with self._database.read() as transaction:
            return transaction.events.after(last_id, study_id=study_id, limit=limit)

    def last_event_id(self, study_id: str | None = None) -> int:
        """The newest event's id; 0 before the first."""
        with self._database.read() as transaction:
            return transaction.events.last_id(study_id)

    def counts(self) -> StoreCounts:
        """Totals for monitoring."""
        with self._database.read() as transaction:
            studies = transaction.studies.count()
            trials = transaction.trials.count()
            hosts = transaction.hosts.list()
            leases = transaction.leases.live()
        return StoreCounts(studies={state.value: number for state, number in studies.items()}, trials=trials,
                           devices=sum(host.device_count for host in hosts), devices_held=len(leases))


def _devices(hosts: tuple[Host, ...], leases: tuple[DeviceLease, ...]) -> tuple[DeviceView, ...]:
    held = {(lease.device.host, lease.device.device_type, lease.device.index): lease for lease in leases}
    views = []
    for host in hosts:
        for index in host.device_indices:
            lease = held.get((host.host, host.device_type, index))
            views.append(DeviceView(
                host=host.host, device_type=host.device_type, device_name=host.device_name, index=index,
                study_id=lease.study_id if lease else None, held_until=lease.expires_at if lease else None))
    return tuple(views)
