"""`predict`: one configuration's memory and time, before it is tried."""

from autotune.domain.prediction import Prediction
from autotune.predict.communication import reads_in_place
from autotune.predict.constants import FITTED, Constants
from autotune.predict.memory import Situation, memory_terms
from autotune.predict.parallel import ALONE, Parallel, part_of
from autotune.predict.time import step_terms
from engine.config import OptimizerConfig, TrainConfig
from engine.profile import HardwareProfile, ModelProfile


def predict(model: ModelProfile, hardware: HardwareProfile, optimizer: OptimizerConfig, config: TrainConfig,
            parallel: Parallel = ALONE, constants: Constants = FITTED) -> Prediction:
    """Bytes of the rank that holds most, by term, and seconds of one optimizer step.

    Pure: equal arguments give an equal prediction, and a field that does nothing in this configuration changes nothing.

    Args:
        model: the probe's result; activations of the configuration's checkpointing and precision must be in it.
        hardware: the calibration's result, or a described cluster's; its world size is the number of devices.
        constants: others than the fitted ones only to fit them.
        parallel: the devices that share one copy of the model. The others hold copies, or parts of one by the stage.

    Raises:
        KeyError: the model was not probed with this checkpointing and precision.
        ValueError: the devices are not a multiple of those that share a copy, or stages outnumber blocks.
    """
    situation = Situation(
        model=part_of(model, parallel), optimizer=optimizer, world_size=parallel.data(hardware.world_size),
        device_is_host=hardware.device_type == "cpu", reads_in_place=reads_in_place(hardware), parallel=parallel,
        whole=model)
    memory = memory_terms(situation, config)
    seconds = step_terms(situation, hardware, config, constants)
    return Prediction(device_bytes=memory.device, host_bytes=memory.host,
                      peak_device_bytes=sum(memory.device.values()), peak_host_bytes=sum(memory.host.values()),
                      step_seconds=None if seconds is None else sum(seconds.values()), seconds=seconds or {})
