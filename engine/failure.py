"""What an exception in a rank means: the outcome of the trial, and whether it is the cause or only an echo."""

import atexit
import os
import re
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from engine.errors import DeviceMemoryLimitError, HostMemoryLimitError, RankFailedError
from engine.report import Outcome

_HOST_ALLOCATION = re.compile(r"DefaultCPUAllocator|not enough memory|Cannot allocate memory|cudaHostAlloc|"
                              r"pinned memory|unable to mmap", re.IGNORECASE)
_DEVICE_ALLOCATION = re.compile(r"out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED", re.IGNORECASE)
_PEER_GONE = re.compile(r"connection (was )?(closed|reset|refused)|closed by peer|broken pipe|remote process exited|"
                        r"Socket Timeout|gloo.*(transport|read|write|recv|send).*error|NCCL.*(unhandled|remote)|"
                        r"Application timeout caused pair closure|Timed out waiting \d+ms for (send|recv) operation",
                        re.IGNORECASE | re.DOTALL)

_STORE_KEY = "engine/failure"
_HEAR_SECONDS = 3.0
"""For the message of the rank that failed: none comes from one that was killed."""
_LINGER_SECONDS = 2.0
"""For that rank to end first, and the launcher to notice."""


def outcome_of(error: BaseException, device_type: str) -> Outcome:
    """The outcome that an exception means, on a kind of device.

    On CPU the device's memory is the host's: what cannot be allocated is the device's.
    """
    host = Outcome.OOM_DEVICE if device_type == "cpu" else Outcome.OOM_HOST
    if isinstance(error, DeviceMemoryLimitError | torch.OutOfMemoryError):
        return Outcome.OOM_DEVICE
    if isinstance(error, HostMemoryLimitError):
        return Outcome.OOM_HOST
    if isinstance(error, FloatingPointError):
        return Outcome.NON_FINITE
    if isinstance(error, MemoryError):
        return host
    if isinstance(error, RuntimeError):
        if _HOST_ALLOCATION.search(str(error)):
            return host
        if _DEVICE_ALLOCATION.search(str(error)):
            return Outcome.OOM_DEVICE
    return Outcome.CRASHED


def is_echo(error: BaseException) -> bool:
    """Whether an exception only shows that another rank is gone."""
    if isinstance(error, RankFailedError | dist.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_PEER_GONE.search(str(error)))


def describe(error: BaseException, rank: int) -> str:
    """`rank 1: ValueError: boom`, as text that every message and database can carry."""
    text = str(error).strip().encode("utf-8", "backslashreplace").decode()
    name = type(error).__name__
    return f"rank {rank}: {name}: {text}" if text else f"rank {rank}: {name}"


def tell_at_exit() -> None:
    """Have an exception that ends this process told to the other ranks, and one that is only an echo end it later.

    Launchers report the process that ends first, and stop the others. A rank that fails closes its connections before
    it has ended, and its peers would often be first.
    """
    atexit.unregister(_tell)  # again: what is registered last runs first, while the others can still hear
    atexit.register(_tell, os.getpid())


def _tell(owner: int) -> None:
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None or os.getpid() != owner:  # or a forked child's
        return
    echo = is_echo(error)
    with suppress(RuntimeError, ValueError):  # the group or its store is gone, or nothing comes
        store, rank = _get_default_store(), dist.get_rank()
        if echo:
            store.wait([_STORE_KEY], timedelta(seconds=_HEAR_SECONDS))
            sys.stderr.write(f"rank {rank} stops because another failed: {store.get(_STORE_KEY).decode()}\n")
            sys.stderr.flush()
        else:
            store.compare_set(_STORE_KEY, "", describe(error, rank))  # the first cause stays
    if echo:
        time.sleep(_LINGER_SECONDS)
