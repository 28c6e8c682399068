"""What can be ordered. Every call is one transaction, committed here."""

from collections.abc import Callable

from autotune.domain.errors import FieldError, InvalidRequestError
from autotune.domain.hardware import Host
from autotune.domain.request import StudyRequest
from autotune.domain.study import Study
from autotune.service.checks import (
    check_devices,
    check_free_parts,
    check_idempotency_key,
    check_sizes,
    check_space,
    check_task,
)
from autotune.settings import Settings
from autotune.store.database import Database


class Commands:
    """Writes for the REST handlers and the dashboard."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    def submit(self, request: StudyRequest, idempotency_key: str | None = None) -> Study:
        """Queue a study. The same key with the same request gives the first study again.

        Raises:
            InvalidRequestError: a request that can never run; names every field at fault.
            ConflictError: the key was used for another request.
        """
        if idempotency_key is not None:
            check_idempotency_key(idempotency_key)
        with self._database.read() as transaction:
            hosts = transaction.hosts.list()
        self._check(request, hosts)
        with self._database.begin() as transaction:
            return transaction.studies.add(request, idempotency_key=idempotency_key)

    def _check(self, request: StudyRequest, hosts: tuple[Host, ...]) -> None:
        """Gather what is wrong, so that a user need not find out one by one."""
        check_free_parts(request)
        check_sizes(request)  # first: the others compute with these numbers
        problems: list[FieldError] = []
        checks: tuple[Callable[[], None], ...] = (
            lambda: check_task(request, self._settings), lambda: check_devices(request, hosts),
            lambda: check_space(request))
        for check in checks:
            try:
                check()
            except InvalidRequestError as error:
                problems.extend(error.errors)
        if problems:
            raise InvalidRequestError(*problems)

    def cancel(self, study_id: str) -> Study:
        """Ask a study to stop: a queued one ends at once, a running one within seconds.

        Raises:
            NotFoundError: no such study.
            ConflictError: it has ended already.
        """
        with self._database.begin() as transaction:
            return transaction.studies.request_cancel(study_id)

    def delete(self, study_id: str) -> None:
        """Remove a finished study, its trials, logs and events. Best configurations stay stored.

        Raises:
            NotFoundError: no such study.
            ConflictError: it has not ended.
        """
        with self._database.begin() as transaction:
            transaction.studies.delete(study_id)
