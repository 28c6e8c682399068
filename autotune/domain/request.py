"""`StudyRequest`: the body of ``POST /api/v1/studies``. Field names are a contract with clients."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag, model_validator

from autotune.domain.cluster import Cluster
from engine.config import OptimizerConfig
from engine.report import MeasurePolicy
from engine.spec import ModelSpec
from engine.values import Count, Real, Value, Whole

Sampler = Literal["guided", "tpe", "gp", "random", "grid"]
Name = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=120,
                                        pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]


class TrainingSetup(Value):
    """What must not change between configurations: it decides what is learned."""

    global_batch_size: Count
    optimizer: OptimizerConfig = OptimizerConfig()
    gradient_clipping: Real = Field(0.0, ge=0, description="largest global gradient norm; 0: no clipping")
    seed: Whole = Field(0, ge=0, lt=2**31, description="of the initial weights and the batches")


ClusterName = Annotated[str, StringConstraints(max_length=120)]

Described = Annotated[
    Annotated[ClusterName, Tag("name")] | Annotated[Cluster, Tag("Cluster")],
    Discriminator(lambda given: "name" if isinstance(given, str) else "Cluster"
                  if isinstance(given, dict | Cluster) else None, custom_error_type="cluster",
                  custom_error_message="give the name of a bundled cluster, or an object that describes one")]
"""A bundled cluster's name, or a cluster as an object of the bundled files' form."""


def _listed(given: object) -> object:
    """One degree is a list of one."""
    if isinstance(given, str) and given != "auto":
        raise ValueError(f"give whole numbers, such as [1, 2, 4], or \"auto\", not {given!r}")
    return [given] if isinstance(given, int) and not isinstance(given, bool) else given


Degrees = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[list[Count], Field(min_length=1, max_length=64), Tag("list")],
    Discriminator(lambda given: "auto" if isinstance(given, str) else "list"), BeforeValidator(_listed)]
"""Of parallelism: those to plan with, or "auto" for all that the model and the cluster allow."""


class HardwareRequest(Value):
    """The devices to tune for. On CPU a device is a core.

    Attributes:
        tensor_parallel: mode plan: devices between which every matrix is cut. The bundled engine trains data-parallel
            only, so that these degrees are planned, never measured.
        pipeline_parallel: mode plan: stages that each hold a part of the blocks.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    devices: Count = Field(1, description="how many: the data-parallel size; in mode plan that times the degrees of "
                           "tensor and pipeline parallelism")
    cluster: Described | None = Field(None, description="mode plan: the cluster to plan for, a bundled one's name or a "
                                      "description")
    tensor_parallel: Degrees = Field([1], description="mode plan: degrees to plan with, a list or \"auto\"")
    pipeline_parallel: Degrees = Field([1], description="mode plan: degrees to plan with, a list or \"auto\"")
    memory_limit_bytes: Count | None = Field(
        None, description="device bytes per rank that a trial may use; exceeding it is an out-of-memory outcome")

    @property
    def cluster_name(self) -> str | None:
        """The name of the cluster that is planned for."""
        return self.cluster.name if isinstance(self.cluster, Cluster) else self.cluster

    @property
    def plans_degrees(self) -> bool:
        """Whether more than data parallelism is asked for."""
        return (self.tensor_parallel, self.pipeline_parallel) != ([1], [1])


class SearchRequest(Value):
    """How to search.

    Only the knobs named in `space` vary; every other field keeps the base configuration's value. A knob maps to the
    list of values to try, or to "auto" for the product's own list. Without `space`, the default space is searched.
    """

    sampler: Sampler = "guided"
    seed: Whole = Field(0, ge=0, lt=2**31)
    space: dict[str, list[Any] | Literal["auto"]] | None = None
    baseline: dict[str, Any] | None = Field(
        None, description="the user's present configuration, fields of TrainConfig; measured as trial 0, and the base "
        "of every other configuration")
    finalists: Whole = Field(3, ge=1, le=10,
                             description="how many of the fastest are measured again before one wins")
    confirm_rounds: Whole = Field(2, ge=0, le=10,
                                  description="most interleaved rounds in which finalists are measured again; they end "
                                  "once the winner is told from all others")
    min_expected_gain: Real = Field(0.01, ge=0, le=1, description="guided: the search ends once all trials left are "
                                    "expected to gain less than this share of throughput; 0: never")
    policy: MeasurePolicy = MeasurePolicy()


class Budget(Value):
    """A study ends when any is spent; the trial under way is finished."""

    max_trials: Whole = Field(20, ge=1, le=10_000)
    max_seconds: Real = Field(600.0, gt=0, le=7 * 24 * 3600)
    max_device_seconds: Real | None = Field(
        None, gt=0, description="elapsed seconds times hardware.devices; without it only the other limits hold")
    trial_timeout_seconds: Real = Field(120.0, gt=0, le=24 * 3600, description="deadline of one trial")


class StudyRequest(Value):
    """One tuning job.

    Attributes:
        mode: tune: measure on the devices; plan: predict for a described cluster and measure nothing.
    """

    name: Name
    mode: Literal["tune", "plan"] = "tune"
    model: ModelSpec
    training: TrainingSetup
    hardware: HardwareRequest = HardwareRequest()
    search: SearchRequest = SearchRequest()
    budget: Budget = Budget()

    @model_validator(mode="after")
    def _plans_for_a_cluster(self) -> Self:
        if (self.mode == "plan") != (self.hardware.cluster is not None):
            raise ValueError("mode plan needs hardware.cluster, and only it takes one: give both or neither")
        if self.mode != "plan" and self.hardware.plans_degrees:
            raise ValueError("hardware: tensor_parallel and pipeline_parallel can be planned, not measured, as the "
                             "bundled engine trains data-parallel only: leave them out, or use mode plan")
        return self

    @property
    def devices_needed(self) -> int:
        """Devices of this machine: a plan takes one, to look at the model."""
        return 1 if self.mode == "plan" else self.hardware.devices

    @property
    def most_seconds(self) -> float:
        """Of elapsed time, as long as both budgets of time allow."""
        budget = self.budget
        if budget.max_device_seconds is None:
            return budget.max_seconds
        return min(budget.max_seconds, budget.max_device_seconds / self.hardware.devices)
