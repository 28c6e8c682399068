"""The few numbers of the time model that are neither the model's nor the hardware's."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The same for all models, devices and configurations.

    Attributes:
        activation_traffic: bytes moved by all that is not a matrix product, forward and backward, over the bytes of
            activations saved without checkpointing. Short kernels reach a part of the copy rate, which counts here.
        fused_attention_rate: operations per second of fused attention, masked ones included, over those of large
            matrix products.
        unaligned_rate: rate of an accelerator's matrix products whose rows do not start at multiples of 16 bytes, over
            that of others.
        product_launches: of the host's time to start operations, the share of matrix products.
        host_norm: a device waits for its host where operations are short. As some are and some are not, the two times
            combine as a norm of this order, between their sum (1) and the larger one (infinity).
        forward_share: of a forward and backward pass, the forward one. Products alone would make it a third, as each
            has two gradients; of the rest it is less.
        hidden_share: of a computation's time, what communication beside it can use.
        exposed_share: of communication beside a computation, what costs time all the same.
    """

    activation_traffic: float = 8.6
    fused_attention_rate: float = 0.63
    unaligned_rate: float = 0.48
    product_launches: float = 0.5
    host_norm: float = 2.7
    forward_share: float = 0.3
    hidden_share: float = 0.8
    exposed_share: float = 0.5


FITTED = Constants()
"""Found once, from published measurements; docs/prediction.md says how."""
