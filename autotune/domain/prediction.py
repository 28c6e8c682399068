"""What is expected of a configuration before it is tried."""

from pydantic import Field

from engine.values import Value


class Prediction(Value):
    """Bytes are per rank, the largest over ranks. The terms sum to the totals."""

    device_bytes: dict[str, int] = Field(description="by term: parameters, gradients, optimizer, model_buffers, "
                                         "buckets, gathered, activations, workspace")
    host_bytes: dict[str, int]
    peak_device_bytes: int
    peak_host_bytes: int
    step_seconds: float | None = Field(None, description="None where nothing is known yet")
    seconds: dict[str, float] = Field(
        default_factory=dict, description="of `step_seconds`, by term: forward, backward, recompute, tensor_exchange, "
        "pipeline_bubble, pipeline_transfer, data_exchange, optimizer, host_transfer")
