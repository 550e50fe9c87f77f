"""GanConfig: the config of a GanTask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import TaskConfig, TrainerConfig
from trainer_kit.config.schema.number_types import NonNegativeFloat, PositiveInt


@configclass
class GanConfig(TaskConfig):
    """A generator and a discriminator that train against each other.

    Inherit from it for a task of your own.

    Attributes:
      latent_size: The number of random numbers from which the generator makes an example.
      loss: The losses of both nets, as functions of the discriminator's logits.
      updates: When the nets are updated. `in_turns` updates the discriminator first, and the
        generator against the updated discriminator. `joint` updates both from one forward pass.
      r1_penalty: The weight of the discriminator's squared gradient at real examples (R1), which
        keeps it smooth; 0: no penalty.
    """

    latent_size: PositiveInt = 64
    loss: Literal["non_saturating", "least_squares", "hinge", "wasserstein"] = "non_saturating"
    updates: Literal["in_turns", "joint"] = "in_turns"
    r1_penalty: NonNegativeFloat = 0.0

    def rules_with_trainer(self, trainer: TrainerConfig) -> Iterator[tuple[str, str]]:
        """Checks that the generator can train against an updated discriminator."""
        if self.updates == "in_turns" and trainer.accumulate_steps != 1:
            problem = f"{trainer.accumulate_steps} puts all updates after the last micro-batch"
            yield "trainer.accumulate_steps", f"{problem}; set task.updates=joint"
