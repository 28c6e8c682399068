"""Two models trained against each other, each by a trainer of its own."""

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from engine import OptimizerConfig, TrainConfig
from engine.trainer import initialize
from tests.engine.replicas import ways
from tests.engine.training import (
    FEATURES,
    RanksOf,
    Tower,
    Weights,
    assert_same_weights,
    built,
    plain_optimizer,
    samples,
)

MOMENTUM = OptimizerConfig(name="sgd", lr=0.05, momentum=0.9)
STEPS = 4


class Generator(Tower):
    def __init__(self) -> None:
        super().__init__(2, FEATURES)
        self.leave = nn.Linear(FEATURES, FEATURES)


def discriminator() -> nn.Module:
    return Tower(2, FEATURES)


def _judged(critic: nn.Module, fake: Tensor, real: Tensor) -> Tensor:
    of_fake, of_real = critic(fake.detach()), critic(real)
    return of_fake.mean() - of_real.mean() + of_real.square().mean()


def _together(**state_dicts: Weights) -> Weights:
    return {f"{model}.{name}": value.clone() for model, weights in state_dicts.items()
            for name, value in weights.items()}


def _own(tensor: Tensor) -> Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _duel(stage: int, freezes: bool) -> list[Weights]:
    """The generator learns through the discriminator, which may be frozen meanwhile."""
    config = TrainConfig(zero_stage=stage, reduce_bucket_size=100)
    maker = initialize(built(Generator), config=config, optimizer=MOMENTUM)
    critic = initialize(built(discriminator), config=config, optimizer=MOMENTUM)
    history = []
    for step in range(STEPS):
        fake = maker(_own(samples(step)[0]))
        critic.backward(_judged(critic.module, fake, _own(samples(50 + step)[0])))
        critic.step()
        critic.module.requires_grad_(not freezes)
        maker.backward(fake.square().mean() - critic(fake).mean())
        maker.step()
        critic.module.requires_grad_(True)
        history.append(_together(maker=maker.consolidated_state_dict(), critic=critic.consolidated_state_dict()))
    maker.close()
    critic.close()
    return history


def _duel_by_hand() -> list[Weights]:
    maker, critic = built(Generator), built(discriminator)
    making, judging = (plain_optimizer(MOMENTUM, list(model.parameters())) for model in (maker, critic))
    history = []
    for step in range(STEPS):
        fake = maker(samples(step)[0])
        judging.zero_grad()
        _judged(critic, fake, samples(50 + step)[0]).backward()
        judging.step()
        making.zero_grad()
        (fake.square().mean() - critic(fake).mean()).backward()
        making.step()
        history.append(_together(maker=maker.state_dict(), critic=critic.state_dict()))
    return history


@ways
@pytest.mark.parametrize("freezes", [True, False])
def test_generator_and_discriminator(ranks: RanksOf, stage: int, freezes: bool) -> None:
    assert_same_weights(ranks(2).run(_duel, stage, freezes), _duel_by_hand())
