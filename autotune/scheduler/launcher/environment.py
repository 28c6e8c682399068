"""What a worker's environment holds: what it needs, none of the service's secrets."""

import os
from collections.abc import Mapping

from engine.spec import ALLOWED_TASKS_VARIABLE

_KEPT = frozenset({
    ALLOWED_TASKS_VARIABLE, "HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "SSL_CERT_FILE",
    "TMPDIR", "TZ", "USER", "VIRTUAL_ENV", "XDG_CACHE_HOME", "HF_HOME"})
_KEPT_PREFIXES = ("CUDA_", "CUBLAS_", "LC_", "NCCL_", "NVIDIA_", "PYTORCH_", "TORCH", "HIP_", "ROCR_")


def worker_environment(parent: Mapping[str, str] = os.environ, *, threads: int = 1) -> dict[str, str]:
    """The environment of one rank, made from the launcher's own.

    Thread counts are set here, whatever the launcher was started with.
    """
    kept = {name: value for name, value in parent.items() if name in _KEPT or name.startswith(_KEPT_PREFIXES)}
    return {
        **kept,
        "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": parent.get("PYTHONDONTWRITEBYTECODE", ""),
        "MALLOC_ARENA_MAX": "2",
    }
