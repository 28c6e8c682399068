"""What the product raises.

AutotuneError
├── InvalidRequestError (ValueError)   a request that can never run; carries (field, message) pairs
├── NotFoundError                      no such study, trial, model ...
├── ConflictError                      the state of things forbids it (cancel a finished study ...)
│   └── NoWinnerError                  a study has no winner (yet); carries how its trials ended
├── ExportError                        a format cannot express the configuration
├── LeaseLostError                     a scheduler acted on a study that another one has taken over
├── StoreUnavailableError              the database cannot be reached, or is not at the version of this code
├── UnreadableError                    a stored study or trial is no value of this release
└── LaunchError                        worker processes could not be started
"""

from collections.abc import Mapping
from typing import NamedTuple


class AutotuneError(Exception):
    """Base of everything the product raises on purpose."""


class FieldError(NamedTuple):
    """One thing wrong with a request: a dotted path such as ``training.global_batch_size``, and what to do."""

    field: str
    message: str


class InvalidRequestError(AutotuneError, ValueError):
    """A request that can never run."""

    def __init__(self, *errors: FieldError) -> None:
        super().__init__("; ".join(f"{error.field}: {error.message}" for error in errors))
        self.errors = errors


class NotFoundError(AutotuneError):
    """No such thing; the message names it."""


class ConflictError(AutotuneError):
    """The present state forbids the request; the message says what state that is."""


class NoWinnerError(ConflictError):
    """A study has no winner, or none yet.

    Args:
        outcomes: how many of its trials ended in which way; empty before the first.
    """

    def __init__(self, message: str, *, outcomes: Mapping[str, int]) -> None:
        super().__init__(message)
        self.outcomes = dict(outcomes)


class ExportError(AutotuneError):
    """A format cannot express a configuration; the message names the field and what to use instead."""


class LeaseLostError(AutotuneError):
    """The study was claimed by another scheduler: its lease's epoch has moved on."""


class StoreUnavailableError(AutotuneError):
    """The database cannot be reached, or its schema is not the one this code was written for."""


class UnreadableError(AutotuneError):
    """What is stored of a study or trial cannot be read: another release wrote it, or a hand; the message says what."""


class LaunchError(AutotuneError):
    """Worker processes could not be started, or died before they were ready."""
