"""The experiment `digits_tasks`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, OptimizationConfig, TaskRoutine, TrainerConfig

LOOP = 200


@trainer_kit.configclass
class LabelConfig(trainer_kit.TaskConfig):
    """Classification of images of digits, given as 64 numbers.

    Attributes:
      label: The classes: `digit` has the ten digits, `parity` has even and odd ones.
    """

    label: Literal["digit", "parity"] = "digit"
    train_data: DataConfig = DataConfig(global_batch_size=32, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=360, drop_remainder=False)


@trainer_kit.configclass
class SharedNetConfig(trainer_kit.Config):
    """The net: 64 pixels, one hidden layer that all tasks share, and logits for each task.

    Attributes:
      hidden: The width of the hidden layer.
    """

    hidden: Annotated[int, Field(ge=1)] = 64


@trainer_kit.configclass
class DigitsTasksConfig(trainer_kit.MultiTaskConfig):
    """Digits and their parity, told by one net."""

    model: SharedNetConfig = SharedNetConfig()
    task_routines: dict[str, TaskRoutine] = Field(
        default_factory=lambda: {
            "digit": TaskRoutine(task_config=LabelConfig(label="digit"), task_weight=2.0),
            "parity": TaskRoutine(task_config=LabelConfig(label="parity"), task_weight=1.0),
        }
    )


trainer_kit.register_task(LabelConfig, "trainer_kit.experiments.digits_tasks.task:LabelTask")
trainer_kit.register_task(
    DigitsTasksConfig, "trainer_kit.experiments.digits_tasks.task:DigitsTasks"
)


@trainer_kit.register_experiment("digits_tasks")
def digits_tasks(
    learning_rate: float = 3e-3, train_steps: int = 3000, hidden: int = 64
) -> ExperimentConfig:
    """Returns the config of `digits_tasks`.

    Adam, with a cosine from `learning_rate` to a hundredth of it.
    """
    cosine = {"initial_learning_rate": learning_rate, "decay_steps": train_steps, "alpha": 0.01}
    return ExperimentConfig(
        task=DigitsTasksConfig(model=SharedNetConfig(hidden=hidden)),
        trainer=TrainerConfig().replace(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=3 * LOOP,
            checkpoint_interval=3 * LOOP,
            best_checkpoint_eval_metric="digit|accuracy",
            best_checkpoints={"parity": {"metric": "parity|accuracy"}},
            optimizer_config=OptimizationConfig().replace(
                optimizer={"type": "adam"},
                learning_rate={"type": "cosine", "cosine": cosine},
            ),
        ),
    )
