"""Where worker groups live: one protocol, one module per place."""

from autotune.scheduler.launcher.base import Launcher, WorkerGroup
from autotune.scheduler.launcher.local import LocalLauncher

__all__ = ["Launcher", "LocalLauncher", "WorkerGroup"]
