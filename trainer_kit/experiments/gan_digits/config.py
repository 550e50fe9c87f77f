"""The experiment `gan_digits`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, RuntimeConfig, TrainerConfig

LOOP = 200


@trainer_kit.configclass
class GanDigitsConfig(trainer_kit.GanConfig):
    """Images of digits, 8 by 8 pixels.

    Attributes:
      channels: The number of channels of the widest layer; both nets are convolutional.
    """

    latent_size: Annotated[int, Field(ge=1)] = 32
    r1_penalty: Annotated[float, Field(ge=0)] = 1.0
    channels: Annotated[int, Field(ge=8)] = 64
    train_data: DataConfig = DataConfig(global_batch_size=64, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=360, drop_remainder=False)


trainer_kit.register_task(GanDigitsConfig, "trainer_kit.experiments.gan_digits.task:GanDigitsTask")


@trainer_kit.register_experiment("gan_digits")
def gan_digits(
    learning_rate: float = 5e-4, train_steps: int = 6000, seed: int = 0
) -> ExperimentConfig:
    """Returns the config of `gan_digits`.

    Adam for both nets, and a moving average of the generator.
    """
    return ExperimentConfig(
        task=GanDigitsConfig(),
        runtime=RuntimeConfig(random_seed=seed),
        trainer=TrainerConfig().replace(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=5 * LOOP,
            checkpoint_interval=5 * LOOP,
            best_checkpoint_eval_metric="coverage_distance",
            best_checkpoint_metric_comp="lower",
            optimizers={
                "generator": {**_adam(learning_rate), "ema": {"average_decay": 0.995}},
                "discriminator": _adam(learning_rate),
            },
            callbacks=[{"name": "sample_pictures"}],
        ),
    )


def _adam(learning_rate: float) -> dict[str, Any]:
    return {
        "optimizer": {"type": "adam", "adam": {"beta_1": 0.5}},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": learning_rate}},
    }
