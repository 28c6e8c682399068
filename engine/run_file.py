"""`RunFile`: everything that a training run under the engine needs, as an export writes it. Torch-free."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.config import OptimizerConfig, TrainConfig, require_global_batch
from engine.errors import ConfigurationError
from engine.spec import ModelSpec
from engine.values import Count, Value


class RunFile(Value):
    """One configuration of one model on so many ranks; `engine.run` trains from it as a trial did."""

    format: Literal["autotune-engine"] = "autotune-engine"
    version: Literal[1] = 1
    model: ModelSpec
    optimizer: OptimizerConfig
    config: TrainConfig
    global_batch_size: Count
    seed: int = Field(0, ge=0, lt=2**31, description="of the initial weights and the batches")
    world_size: Count = Field(description="ranks, the data-parallel size")
    notes: tuple[str, ...] = Field((), description="for people: where the configuration comes from")

    @model_validator(mode="after")
    def _batch_sizes_agree(self) -> Self:
        require_global_batch(self.config, global_batch_size=self.global_batch_size, data_parallel_size=self.world_size)
        return self


def load_run_file(path: Path) -> RunFile:
    """Read a run file.

    Raises:
        ConfigurationError: there is no such file, or it is no run file; the message names the fields.
    """
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # the latter where nothing can be called so
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigurationError(f"cannot read {str(path)!r}: {why}", fields=()) from error
    try:
        return RunFile.model_validate_json(content)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        fields = tuple(".".join(map(str, problem["loc"])) for problem in problems)
        named = zip(fields, problems, strict=True)
        text = "; ".join(f"{field or 'file'}: {problem['msg'].removeprefix('Value error, ')}"
                         for field, problem in named)
        raise ConfigurationError(f"{path} is no run file of the engine: {text}", fields=fields) from error
