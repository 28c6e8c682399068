"""What is known of the models tuned so far."""

from datetime import datetime

from engine.values import Value


class ModelSummary(Value):
    """One model, by the name that its studies were submitted under.

    Attributes:
        kind: of the latest study's model: gpt, huggingface ...
        studies: how many are in the store; 0 where only the best configuration was kept.
        best_configs: how many are stored: one per training set-up and hardware.
        best_tokens_per_second: the fastest of them.
        last_study_at: when the latest study was submitted.
    """

    name: str
    kind: str
    studies: int
    best_configs: int
    best_tokens_per_second: float | None = None
    last_study_at: datetime | None = None
