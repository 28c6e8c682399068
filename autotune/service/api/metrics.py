"""Numbers for Prometheus: studies, trials, devices as the store has them now; requests as this process saw them.

Needs the token like everything else: a scraper sends it with `authorization: {credentials: ...}`.
"""

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from autotune.service.queries import Queries
from engine.report import Outcome

disable_created_metrics()  # type: ignore[no-untyped-call]

SECONDS = (0.005, 0.025, 0.1, 0.5, 2.5)

router = APIRouter(tags=["health"])


class Metrics:
    """One application's metrics, in a registry of its own."""

    def __init__(self, queries: Queries) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("autotune_http_requests", "Requests answered, by route template.",
                                 ("method", "route", "status"), registry=self.registry)
        self._seconds = Histogram("autotune_http_request_seconds", "Seconds until a request was answered in full.",
                                  ("method", "route"), buckets=SECONDS, registry=self.registry)
        self.registry.register(_StoreCollector(queries))

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        method = method if method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS") else "OTHER"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _StoreCollector(Collector):
    """Reads the store when asked, so that numbers are right whichever process changed them."""

    def __init__(self, queries: Queries) -> None:
        self._queries = queries

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        counts = self._queries.counts()
        studies = GaugeMetricFamily("autotune_studies", "Studies in the store, by state.", labels=["state"])
        for state, number in counts.studies.items():
            studies.add_metric([state], number)
        yield studies
        trials = GaugeMetricFamily("autotune_trials", "Trials in the store, by outcome.", labels=["outcome"])
        for outcome in [*(known.value for known in Outcome), "running"]:
            trials.add_metric([outcome], counts.trials.get(outcome, 0))
        yield trials
        yield GaugeMetricFamily("autotune_devices", "Devices of all hosts seen.", value=counts.devices)
        yield GaugeMetricFamily("autotune_devices_held", "Devices held by studies now.", value=counts.devices_held)


def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


@router.get("/metrics", summary="Numbers for Prometheus", response_class=Response,
            responses={200: {"content": {"text/plain": {}}}})
def get_metrics(metrics: Annotated[Metrics, Depends(_metrics)]) -> Response:
    """Studies by state, trials by outcome, device occupancy, request counts and times."""
    return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
