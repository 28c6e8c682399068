"""Bundled clusters, for predictions where there is no hardware: published figures, with their sources."""

from functools import cache
from importlib import resources

from autotune.domain.cluster import Cluster

_FOLDER = resources.files("autotune.predict") / "hardware"


@cache
def bundled_clusters() -> tuple[str, ...]:
    """Names that `bundled_cluster` takes."""
    return tuple(sorted(entry.name.removesuffix(".json") for entry in _FOLDER.iterdir()
                        if entry.name.endswith(".json")))


@cache
def bundled_cluster(name: str) -> Cluster:
    """A published cluster.

    Raises:
        KeyError: there is none of this name.
    """
    if name not in bundled_clusters():
        raise KeyError(f"no bundled cluster {name}; there are {', '.join(bundled_clusters())}")
    return Cluster.model_validate_json((_FOLDER / f"{name}.json").read_text())


def described(cluster: str | Cluster) -> Cluster:
    """A cluster that a request names, or describes itself.

    Raises:
        KeyError: there is none of this name.
    """
    return cluster if isinstance(cluster, Cluster) else bundled_cluster(cluster)
