"""The experiment `digits`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, OptimizationConfig, TrainerConfig

LOOP = 100


@trainer_kit.configclass
class DigitsModelConfig(trainer_kit.Config):
    """The net: two convolutions, a pooling, a third convolution, dropout, and one dense layer.

    Attributes:
      width: The number of filters of the first convolution; the other two have twice as many.
      dropout: The share of the features that a training step leaves out.
    """

    width: Annotated[int, Field(ge=1)] = 16
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.3


@trainer_kit.configclass
class DigitsConfig(trainer_kit.TaskConfig):
    """Classification of 8 x 8 images of digits."""

    model: DigitsModelConfig = DigitsModelConfig()
    train_data: DataConfig = DataConfig(global_batch_size=64, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=360, drop_remainder=False)


trainer_kit.register_task(DigitsConfig, "trainer_kit.experiments.digits.task:DigitsTask")


@trainer_kit.register_experiment("digits")
def digits(
    learning_rate: float = 3e-3, train_steps: int = 1200, width: int = 16, dropout: float = 0.3
) -> ExperimentConfig:
    """Returns the config of `digits`: Adam, with a cosine from `learning_rate` to a hundredth."""
    cosine = {"initial_learning_rate": learning_rate, "decay_steps": train_steps, "alpha": 0.01}
    return ExperimentConfig(
        task=DigitsConfig(model=DigitsModelConfig(width=width, dropout=dropout)),
        trainer=TrainerConfig(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=2 * LOOP,
            checkpoint_interval=2 * LOOP,
            best_checkpoint_eval_metric="accuracy",
            optimizer_config=OptimizationConfig().replace(
                optimizer={"type": "adam"},
                learning_rate={"type": "cosine", "cosine": cosine},
            ),
        ),
    )
