"""The experiment `digits_mlp`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, OptimizationConfig, TrainerConfig

LOOP = 200


@trainer_kit.configclass
class DigitsMlpModelConfig(trainer_kit.Config):
    """The net: 64 pixels, one hidden layer, 10 logits.

    Attributes:
      hidden: The width of the hidden layer.
      dropout: The share of the hidden features that a training step leaves out.
    """

    hidden: Annotated[int, Field(ge=1)] = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@trainer_kit.configclass
class DigitsMlpConfig(trainer_kit.TaskConfig):
    """Classification of images of digits, given as 64 numbers."""

    model: DigitsMlpModelConfig = DigitsMlpModelConfig()
    train_data: DataConfig = DataConfig(global_batch_size=32, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=360, drop_remainder=False)


trainer_kit.register_task(DigitsMlpConfig, "trainer_kit.experiments.digits_mlp.task:DigitsMlpTask")


@trainer_kit.register_experiment("digits_mlp")
def digits_mlp(
    learning_rate: float = 3e-3, train_steps: int = 3000, hidden: int = 32, dropout: float = 0.0
) -> ExperimentConfig:
    """Returns the config of `digits_mlp`.

    Adam, with a cosine from `learning_rate` to a hundredth of it.
    """
    cosine = {"initial_learning_rate": learning_rate, "decay_steps": train_steps, "alpha": 0.01}
    return ExperimentConfig(
        task=DigitsMlpConfig(model=DigitsMlpModelConfig(hidden=hidden, dropout=dropout)),
        trainer=TrainerConfig(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=3 * LOOP,
            checkpoint_interval=3 * LOOP,
            best_checkpoint_eval_metric="accuracy",
            optimizer_config=OptimizationConfig().replace(
                optimizer={"type": "adam"},
                learning_rate={"type": "cosine", "cosine": cosine},
            ),
        ),
    )
