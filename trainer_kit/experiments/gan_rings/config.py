"""The experiment `gan_rings`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, RuntimeConfig, TrainerConfig

LOOP = 500


@trainer_kit.configclass
class GanRingsConfig(trainer_kit.GanConfig):
    """Points in the plane: a mixture of Gaussians with equal shares.

    The centers lie on a circle around 0.

    Attributes:
      centers: The number of Gaussians.
      radius: The radius of the circle.
      sigma: The standard deviation of each Gaussian, in both directions.
      hidden: The width of the two hidden layers of both nets.
    """

    latent_size: Annotated[int, Field(ge=1)] = 16
    r1_penalty: Annotated[float, Field(ge=0)] = 0.5
    centers: Annotated[int, Field(ge=1)] = 8
    radius: Annotated[float, Field(gt=0)] = 2.0
    sigma: Annotated[float, Field(gt=0)] = 0.1
    hidden: Annotated[int, Field(ge=1)] = 128
    train_data: DataConfig = DataConfig(global_batch_size=256, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=1000, drop_remainder=False)


trainer_kit.register_task(GanRingsConfig, "trainer_kit.experiments.gan_rings.task:GanRingsTask")


@trainer_kit.register_experiment("gan_rings")
def gan_rings(
    learning_rate: float = 1e-3, train_steps: int = 6000, seed: int = 0
) -> ExperimentConfig:
    """Returns the config of `gan_rings`.

    Adam for both nets, and a moving average of the generator.
    """
    return ExperimentConfig(
        task=GanRingsConfig(),
        runtime=RuntimeConfig(random_seed=seed),
        trainer=TrainerConfig().replace(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=2 * LOOP,
            checkpoint_interval=2 * LOOP,
            best_checkpoint_eval_metric="distance",
            best_checkpoint_metric_comp="lower",
            optimizers={
                "generator": {**_adam(learning_rate), "ema": {"average_decay": 0.995}},
                "discriminator": _adam(learning_rate),
            },
            callbacks=[{"name": "sample_pictures", "args": {"count": 1000}}],
        ),
    )


def _adam(learning_rate: float) -> dict[str, Any]:
    return {
        "optimizer": {"type": "adam", "adam": {"beta_1": 0.5}},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": learning_rate}},
    }
