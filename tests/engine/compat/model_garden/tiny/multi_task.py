"""Two small regressions that share a layer, over official.modeling.multitask."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import tensorflow as tf
import tf_keras
from official.core import base_task, config_definitions, input_reader, task_factory
from official.modeling.multitask import base_model, configs

from tests.engine.compat.model_garden.tiny.records import example, floats, generator, write_shards
from tests.engine.compat.model_garden.tiny.trainer import STEPS_PER_LOOP, data, optimizer, trainer

TASKS = ("sum", "difference")
WIDTH = 4
BATCH = 8


def write(folder: Path) -> None:
    """Four numbers, their sum, and what is between the first two."""
    for part, count in (("train", 48), ("validation", 16)):
        numbers = generator(part).uniform(-1, 1, size=(count, WIDTH))
        examples = [
            example(x=floats(row), sum=floats([row.sum()]), difference=floats([row[0] - row[1]]))
            for row in numbers
        ]
        write_shards(folder, part, examples)


@dataclasses.dataclass
class RegressionConfig(config_definitions.TaskConfig):
    """Which feature is to be told."""

    target: str = ""


@task_factory.register_task_cls(RegressionConfig)
class RegressionTask(base_task.Task):
    """A regression with the mean squared error."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """Reads the four numbers and the target."""
        target = self.task_config.target
        features = {
            "x": tf.io.FixedLenFeature([WIDTH], tf.float32),
            target: tf.io.FixedLenFeature([1], tf.float32),
        }

        def decode(record: Any) -> tuple[Any, Any]:
            parsed = tf.io.parse_single_example(record, features)
            return parsed["x"], parsed[target]

        return input_reader.InputReader(params, decoder_fn=decode).read(input_context)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """The mean squared error."""
        return tf.reduce_mean(tf.square(labels - model_outputs))

    def build_metrics(self, training: bool = True) -> list[Any]:
        """The mean absolute error, under a name of each task's own."""
        return [tf_keras.metrics.MeanAbsoluteError(name=f"{self.task_config.target}_error")]


class SharedModel(base_model.MultiTaskBaseModel):
    """One hidden layer for both, and one output for each."""

    def _instantiate_sub_tasks(self) -> dict[str, Any]:
        hidden = tf_keras.layers.Dense(8, activation="relu")
        return {name: self._sub_task(hidden) for name in TASKS}

    @staticmethod
    def _sub_task(hidden: Any) -> Any:
        inputs = tf_keras.Input((WIDTH,))
        return tf_keras.Model(inputs, tf_keras.layers.Dense(1)(hidden(inputs)))


def model() -> SharedModel:
    """The model, which is made beside the tasks."""
    return SharedModel()


def config_joint(
    folder: Path, steps_per_loop: int = STEPS_PER_LOOP
) -> configs.MultiTaskExperimentConfig:
    """Each step trains both."""
    return _config(folder, steps_per_loop, "joint")


def config_interleaving(
    folder: Path, steps_per_loop: int = STEPS_PER_LOOP
) -> configs.MultiTaskExperimentConfig:
    """Each step trains one, drawn in proportion to the weights of the tasks."""
    return _config(folder, steps_per_loop, "interleaving")


def _config(
    folder: Path, steps_per_loop: int, trainer_type: str
) -> configs.MultiTaskExperimentConfig:
    routines = tuple(
        _routine(folder, name, weight) for name, weight in zip(TASKS, (1.0, 2.0), strict=True)
    )
    config = configs.MultiTaskExperimentConfig(task=configs.MultiTaskConfig(task_routines=routines))
    settings = trainer(
        steps_per_loop, trainer_type=trainer_type, optimizer_config=optimizer("sgd", 0.05)
    )
    config.override(
        {"trainer": settings, "runtime": {"distribution_strategy": "off"}}, is_strict=True
    )
    return config


def _routine(folder: Path, name: str, weight: float) -> configs.TaskRoutine:
    task = RegressionConfig(
        target=name,
        train_data=config_definitions.DataConfig(**data(folder, "train", BATCH)),
        validation_data=config_definitions.DataConfig(**data(folder, "validation", BATCH)),
    )
    return configs.TaskRoutine(task_name=name, task_config=task, task_weight=weight)
