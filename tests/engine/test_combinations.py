"""Offload, clipping, precision, stage and both kinds of checkpoint together: each pair has broken some engine once."""

from pathlib import Path
from typing import Any

import pytest

from engine import OptimizerConfig, TrainConfig
from tests.engine.training import (
    Awkward,
    RanksOf,
    Setup,
    Weights,
    assert_same_weights,
    over_shared_memory,
    reference,
    run_step,
    stages,
    start,
)

ADAGRAD = OptimizerConfig(name="adagrad", lr=0.02)
ALIKE_BUT = ((0.0, 0.0, "none"), (0.0, 0.2, "full"), (0.3, 0.0, "full"), (0.3, 0.2, "none"), (1.0, 0.0, "none"),
             (1.0, 0.2, "full"))
"""Ratio of the states on the host, largest norm, and activation checkpointing."""


def _config(base: TrainConfig, ratio: float, clipping: float, checkpointing: str) -> TrainConfig:
    return TrainConfig.model_validate({**base.model_dump(), "offload_optimizer_ratio": ratio,
                                       "gradient_clipping": clipping, "activation_checkpointing": checkpointing})


def _every_combination(base: TrainConfig, path: Path) -> list[list[Weights]]:
    """Weights after each of three steps, the last one in a trainer that resumes from a checkpoint of the first two."""
    histories = []
    for ratio, clipping, checkpointing in ALIKE_BUT:
        setup = Setup(Awkward, _config(base, ratio, clipping, checkpointing), ADAGRAD)
        trainer = start(setup)
        history = []
        for step in range(2):
            run_step(trainer, step)
            history.append(trainer.consolidated_state_dict())
        trainer.save_checkpoint(path)
        trainer.close()
        trainer = start(setup)
        trainer.load_checkpoint(path)
        run_step(trainer, 2)
        histories.append([*history, trainer.consolidated_state_dict()])
        trainer.close()
    return histories


@over_shared_memory
@stages
@pytest.mark.parametrize("change", [
    {"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp16", "initial_scale_power": 8},
    {"precision": "bf16", "optimizer_precision": "compute"}], ids=["fp32", "bf16", "fp16", "bf16-states"])
def test_every_combination_trains_and_resumes(ranks: RanksOf, tmp_path: Path, stage: int,
                                              change: dict[str, Any]) -> None:
    base = TrainConfig.model_validate({"zero_stage": stage, "reduce_bucket_size": 150, **change})
    expected = {clipping: reference(Setup(Awkward, _config(base, 0.0, clipping, "none"), ADAGRAD, steps=3))
                for clipping in (0.0, 0.2)}
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if base.precision == "fp32" else {"atol": 4e-2, "rtol": 2e-2}
    for histories in ranks(2).run(_every_combination, base, tmp_path / "checkpoint"):
        for (_, clipping, _), history in zip(ALIKE_BUT, histories, strict=True):
            assert_same_weights([history], expected[clipping], **tolerance)
        for clipping in (0.0, 0.2):  # what differs in the place of states and activations alone differs in no bit
            alike = [history for (_, norm, _), history in zip(ALIKE_BUT, histories, strict=True) if norm == clipping]
            for history in alike[1:]:
                assert_same_weights([history], alike[0], atol=0, rtol=0)
