"""The bundled engine's own file: the whole run, for ``torchrun -m engine.run FILE``."""

from autotune.domain.study import BestConfig
from autotune.export.base import ExportedFile
from engine.run_file import RunFile


def write_engine(best: BestConfig) -> ExportedFile:
    """Everything that was measured, complete: model, optimizer, configuration, batch, seed, ranks."""
    training = best.request.training
    ranks = best.hardware_profile.world_size
    notes = (f"run with: torchrun --standalone --nproc-per-node {ranks} -m engine.run {_FILENAME}",
             f"measured in study {best.study_id}, trial {best.trial_number}: {best.tokens_per_second:.0f} tokens/s on "
             f"{ranks} x {best.hardware_profile.device_name or best.hardware_profile.device_type}")
    run = RunFile(model=best.request.model, optimizer=training.optimizer, config=best.config,
                  global_batch_size=training.global_batch_size, seed=training.seed, world_size=ranks, notes=notes)
    return ExportedFile(filename=_FILENAME, media_type="application/json", text=run.model_dump_json(indent=2) + "\n",
                        notes=notes)


_FILENAME = "engine_run.json"
