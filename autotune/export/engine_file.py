"""The bundled engine's own file: the whole run, for ``torchrun -m engine.run FILE``."""

from autotune.export.base import ConfigReader, ExportedFile, Source
from engine.run_file import RunFile


def write_engine(source: Source) -> ExportedFile:
    """Everything that was measured or planned, complete: model, optimizer, configuration, batch, seed, ranks."""
    reader, training = ConfigReader(source, "the engine"), source.request.training
    if reader.nodes == 1:
        launch = f"torchrun --standalone --nproc-per-node {reader.world_size}"
    else:
        launch = (f"torchrun --nnodes {reader.nodes} --nproc-per-node {reader.world_size // reader.nodes} "
                  "--rdzv-backend c10d --rdzv-endpoint HOST:29500")
    notes = (f"run with: {launch} -m engine.run {_FILENAME}", reader.evidence)
    run = RunFile(model=source.request.model, optimizer=training.optimizer, config=source.config,
                  global_batch_size=training.global_batch_size, seed=training.seed, world_size=reader.world_size,
                  notes=notes)
    return ExportedFile(filename=_FILENAME, media_type="application/json", text=run.model_dump_json(indent=2) + "\n",
                        notes=notes)


_FILENAME = "engine_run.json"
