"""What the engine raises.

EngineError
├── ConfigurationError (ValueError)    a configuration that cannot run; names the field and the fix
│   └── BatchSizeError                 batch sizes contradict each other or leave something open
├── TaskError                          a task that cannot be built or breaks its contract
├── RankFailedError                    another rank failed; carries its message
└── MemoryLimitError                   the memory limit of the run was exceeded
    ├── DeviceMemoryLimitError
    └── HostMemoryLimitError
"""


class EngineError(Exception):
    """Base of everything the engine raises on purpose."""


class ConfigurationError(EngineError, ValueError):
    """A configuration that cannot run.

    Args:
        message: what is wrong and what to do about it.
        fields: names of the fields at fault, as the user wrote them.
    """

    def __init__(self, message: str, *, fields: tuple[str, ...]) -> None:
        super().__init__(message)
        self.fields = fields


class BatchSizeError(ConfigurationError):
    """The batch sizes contradict each other or leave something open."""


class TaskError(EngineError):
    """A task that cannot be built, or that breaks the contract of `engine.tasks.Task`."""


class RankFailedError(EngineError):
    """Another rank of the group failed; the message is that rank's own."""


RANK_FAILURES = (RankFailedError, RuntimeError)
"""How a collective with a rank that failed ends: the engine's own messages with the first, torch's with the second."""


class MemoryLimitError(EngineError):
    """The run exceeded its memory limit."""


class DeviceMemoryLimitError(MemoryLimitError):
    """Device bytes over the limit."""


class HostMemoryLimitError(MemoryLimitError):
    """Host bytes (offload) over the limit."""
