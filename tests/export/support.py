"""A study's winner to export."""

from typing import Any

from autotune.domain.study import BestConfig
from engine.config import TrainConfig
from engine.profile import ModelProfile
from tests.search.support import NOW, hardware_profile, model_profile, study_request


def best(*, world_size: int = 2, global_batch_size: int = 32, optimizer: dict[str, Any] | None = None,
         model: ModelProfile | None = None, device_type: str = "cuda", **config: Any) -> BestConfig:
    """The winner with these fields of the configuration; accumulation follows from the batch."""
    micro = config.setdefault("micro_batch_size", 4)
    config["gradient_accumulation_steps"] = global_batch_size // (micro * world_size)
    request = study_request(devices=world_size, global_batch_size=global_batch_size,
                            training={"optimizer": optimizer or {"name": "adamw", "lr": 3e-4, "weight_decay": 0.1},
                                      "gradient_clipping": config.get("gradient_clipping", 0.0), "seed": 7})
    return BestConfig(
        study_id="study", trial_number=3, model_name="small", model_fingerprint="model",
        training_fingerprint="training", hardware_fingerprint="hardware", request=request,
        config=TrainConfig.model_validate(config),
        model_profile=model or model_profile(),
        hardware_profile=hardware_profile(world_size=world_size, device_type=device_type), tokens_per_second=1234.5,
        tokens_per_second_interval=(1200.0, 1260.0), samples_per_second=9.6, step_seconds=3.3,
        peak_device_bytes=1_000_000, peak_host_bytes=0, confirmed=True, created_at=NOW)
