"""Keys under which results may be used again."""

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autotune.domain.request import StudyRequest
from autotune.scheduler.launcher.base import Launcher
from engine.profile import PROFILE_VERSION
from engine.spec import ModelSpec, PythonSpec


def training_fingerprint(request: StudyRequest) -> str:
    """Equal for studies whose winners can stand for each other: the same training, under the same memory limit."""
    return _digest({"training": request.training.model_dump(mode="json"),
                    "memory_limit_bytes": request.hardware.memory_limit_bytes})


def probe_key(spec: ModelSpec) -> str | None:
    """What a probe's result depends on; None where it cannot be known, as the user's own code may change."""
    if isinstance(spec, PythonSpec):
        return None
    return _digest({"model": spec.model_dump(mode="json"), "software": software()})


def calibration_key(launcher: Launcher, world_size: int) -> str:
    """What is known, before calibrating, of what a calibration's result depends on."""
    return _digest({"host": launcher.host, "type": launcher.device_type, "name": launcher.device_name,
                    "world_size": world_size, "software": software()})


def software() -> dict[str, str]:
    """Versions that results depend on, read without importing anything."""
    found = {"profiles": PROFILE_VERSION}
    for name in ("torch", "transformers", "autotune"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]
