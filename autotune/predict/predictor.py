"""`predict`: one configuration's memory and time, before it is tried."""

from autotune.domain.prediction import Prediction
from autotune.predict.memory import Situation, memory_terms
from autotune.predict.time import step_seconds
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile


def predict(model: ModelProfile, hardware: HardwareProfile, optimizer: OptimizerConfig,
            config: TrainConfig) -> Prediction:
    """Bytes of the rank that holds most, by term, and seconds of one optimizer step.

    Pure: equal arguments give an equal prediction, and a field that does nothing in this configuration changes nothing.

    Args:
        model: the probe's result; activations of the configuration's checkpointing and precision must be in it.
        hardware: the calibration's result; its world size is the data-parallel size.

    Raises:
        KeyError: the model was not probed with this checkpointing and precision.
    """
    situation = Situation(model=model, optimizer=optimizer, world_size=hardware.world_size,
                          device_is_host=hardware.device_type == "cpu")
    terms = memory_terms(situation, config)
    return Prediction(device_bytes=terms.device, host_bytes=terms.host,
                      peak_device_bytes=sum(terms.device.values()), peak_host_bytes=sum(terms.host.values()),
                      step_seconds=step_seconds(model, hardware, optimizer, config))
