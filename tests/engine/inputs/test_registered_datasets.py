"""Datasets that a config names, in place of a task's build_inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import replicas, restore_registries
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.experiment import DatasetConfig
from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyConfig, tiny_arrays
from trainer_kit.training.task import Task
from trainer_kit.training.trainer import Trainer


@tk.configclass
class FirstConfig(tk.Config):
    """A dataset of these tests.

    Attributes:
      examples: The number of examples.
    """

    examples: int = 40


@pytest.fixture(autouse=True)
def register_datasets() -> Iterator[None]:
    """Registers two datasets for the time of a test."""
    with restore_registries(DatasetConfig.registry):

        @tk.register_dataset("first", FirstConfig)
        def build_first(config: FirstConfig, params: Any) -> Any:
            features, labels = tiny_arrays(bool(params.is_training))
            return tk.ArraySource((features[: config.examples], labels[: config.examples]), params)

        @tk.register_dataset("piped")
        def build_piped(config: Any, params: Any, input_context: Any = None) -> Any:
            size = 8
            if input_context:
                size = input_context.get_per_replica_batch_size(params.global_batch_size)

            return tf.data.Dataset.from_tensor_slices(tiny_arrays(False)).batch(size)

        yield


class _NoInputs(LinearTask):
    build_inputs = Task.build_inputs


_FIRST = {"type": "first", "first": {"examples": 20}}
_PIPED = {"type": "piped"}


def test_a_task_without_build_inputs_reads_what_the_config_names() -> None:
    """On two replicas: each dataset gets its place among them."""
    data = {"train_data": {"dataset": _FIRST}, "validation_data": {"dataset": _PIPED}}
    config = linear_experiment().replace(task=data)
    with replicas(2).scope():
        trainer = Trainer.create(config, _NoInputs(config.task), train=True, evaluate=True)

    assert np.isfinite(trainer.train(tf.constant(5))["training_loss"])
    assert trainer.evaluate(tf.constant(-1)).keys() >= {"accuracy", "validation_loss"}
    assert int(trainer.evaluated_batches.numpy()) == 13  # of 8 examples, of 103


def test_it_replaces_the_data_of_the_task() -> None:
    config = linear_experiment().replace(task={"validation_data": {"dataset": _FIRST}})
    trainer = Trainer.create(config, LinearTask(config.task), train=False, evaluate=True)

    trainer.evaluate(tf.constant(-1))

    assert int(trainer.evaluated_batches.numpy()) == 3  # of 8 examples, of 20


def test_no_data_at_all_is_an_error_that_says_what_to_do() -> None:
    config = linear_experiment()
    trainer = Trainer.create(config, _NoInputs(TinyConfig()), train=True, evaluate=False)

    with pytest.raises(UsageError):
        trainer.train(tf.constant(1))
