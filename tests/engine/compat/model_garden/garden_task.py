"""A small task of Model Garden with a model of Keras 2, for tests of the door."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from official.core import base_task, config_definitions, task_factory
from official.modeling import performance

from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.garden_trainer import Trainer, create_trainer
from trainer_kit.process.run_directory import RunDirectory

BATCH = 8
FEATURES = 4
CLASSES = 3
BATCHES = 5


@dataclasses.dataclass
class SmallConfig(config_definitions.TaskConfig):
    """Of SmallTask."""


@task_factory.register_task_cls(SmallConfig)
class SmallTask(base_task.Task):
    """One dense layer, and batches that differ from each other."""

    def build_model(self) -> Any:
        tf_keras.utils.set_random_seed(3)
        return tf_keras.Sequential(
            [tf_keras.Input((FEATURES,)), tf_keras.layers.Dense(CLASSES, dtype="float32")]
        )

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        generator = np.random.default_rng(7)
        features = generator.normal(size=(BATCHES * BATCH, FEATURES)).astype("float32")
        labels = generator.integers(CLASSES, size=BATCHES * BATCH).astype("int32")
        dataset = tf.data.Dataset.from_tensor_slices((features, labels))
        dataset = dataset.repeat() if params.is_training else dataset
        return dataset.batch(
            BATCH if input_context is None else BATCH // input_context.num_replicas_in_sync
        )

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        return tf.reduce_mean(
            tf_keras.losses.sparse_categorical_crossentropy(labels, model_outputs, from_logits=True)
        )

    def build_metrics(self, training: bool = True) -> list[Any]:
        return [tf_keras.metrics.SparseCategoricalAccuracy("accuracy")]


def small_config(**optimization: Any) -> Any:
    """Returns a config of theirs: 2 steps a loop, and SGD unless `optimization` says otherwise."""
    parts: dict[str, Any] = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
        **optimization,
    }
    task = SmallConfig(train_data=config_definitions.DataConfig(is_training=True))
    task.validation_data.is_training = False
    config = config_definitions.ExperimentConfig(task=task)
    config.trainer.override(
        {
            "train_steps": 6,
            "steps_per_loop": 1,
            "summary_interval": 1,
            "checkpoint_interval": 3,
            "validation_interval": 3,
            "optimizer_config": parts,
        }
    )
    return config


def small_trainer(
    config: Any,
    train: bool = True,
    evaluate: bool = True,
    strategy: Any = None,
    ours: bool = False,
    **options: Any,
) -> Trainer:
    """Returns our Trainer of a new SmallTask; `ours`: from the config converted to ours."""
    with (strategy or tf.distribute.get_strategy()).scope():
        task = task_factory.get_task(config.task)
        params = convert(config) if ours else config
        trainer: Trainer = create_trainer(params, task, train, evaluate, **options)
    return trainer


def restore_newest(trainer: Trainer, config: Any, folder: Path) -> CheckpointManager:
    """Returns the manager of the checkpoints in `folder`, once `trainer` goes on from the newest,
    if there is one.
    """
    options = convert(config).trainer
    manager = CheckpointManager(
        trainer, RunDirectory(str(folder), options), options, asynchronous=False
    )
    manager.prepare_folder()
    with trainer.strategy.scope():
        path = manager.restore_or_initialize()
        if path:
            trainer.after_restore(path)
    return manager


def bits(variables: Any) -> list[bytes]:
    """Returns the values of variables, on every replica, to be compared bit by bit."""
    return [
        local.numpy().tobytes()
        for variable in variables
        for local in getattr(variable, "values", [variable])
    ]


@contextlib.contextmanager
def eagerly() -> Iterator[None]:
    """Runs steps eagerly: to trace one takes a second, and what a step does is the same."""
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


def set_half_precision() -> Any:
    """Sets float16 as the policy of Keras 2; to be undone by `full_precision`."""
    performance.set_mixed_precision_policy(tf.float16)


def set_full_precision() -> None:
    """Sets float32 as the policy of Keras 2."""
    tf_keras.mixed_precision.set_global_policy("float32")
