"""What a configuration needs and how long a step takes, from a model's and a hardware's profile. Pure, no torch."""

from autotune.predict.predictor import predict

__all__ = ["predict"]
