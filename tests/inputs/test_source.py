"""What a Source is, and where the Trainer asks it to start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.build import create_trainer
from trainer_kit.config.schema import DataConfig
from trainer_kit.inputs.arrays import ArraySource
from trainer_kit.inputs.source import Source, dataset_at
from trainer_kit.testing import TinyTask, tiny_arrays, tiny_experiment
from trainer_kit.trainer import Trainer


def test_arrays_are_a_source_and_a_dataset_is_none() -> None:
    assert isinstance(ArraySource(np.zeros(3), DataConfig(global_batch_size=1)), Source)
    assert not isinstance(tf.data.Dataset.range(3), Source)


class _Recorded:
    """A source of a user's own, which keeps what it was asked for."""

    def __init__(self, source: ArraySource, asked: list[tuple[int, int]]) -> None:
        self._source, self._asked = source, asked

    def at(self, position: int, input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
        self._asked.append((position, input_context.num_replicas_in_sync if input_context else 1))
        return self._source.at(position, input_context)


class _RecordingTask(TinyTask):
    """Keeps (section, position, replicas) of what the Trainer asks for."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.asked: dict[str, list[tuple[int, int]]] = {"train": [], "validation": []}

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        kind = "train" if params.is_training else "validation"
        source = ArraySource(tiny_arrays(kind == "train", self.task_config.examples), params)
        return _Recorded(source, self.asked[kind])


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    """Replicas that sum by copying: collective operations allow one group size in the life of a process."""
    devices = [f"CPU:{index}" for index in range(replicas)]
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=tf.distribute.ReductionToOneDevice())


def _trainer(replicas: int = 1) -> tuple[Trainer, dict[str, list[tuple[int, int]]]]:
    config = tiny_experiment()
    with (_mirrored(replicas) if replicas > 1 else tf.distribute.get_strategy()).scope():
        task = _RecordingTask(config.task)
        return create_trainer(config, task), task.asked


def test_a_source_of_ones_own_satisfies_the_protocol() -> None:
    assert isinstance(_Recorded(ArraySource(np.zeros(3), DataConfig(global_batch_size=1)), []), Source)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_resumed_run_asks_for_its_position_and_evaluation_for_the_start(tmp_path: Path, replicas: int) -> None:
    first, asked = _trainer(replicas)
    assert asked == {"train": [], "validation": []}  # nothing is asked for before it is known where to start
    first.train(tf.constant(3))
    first.train(tf.constant(4))
    first.evaluate(tf.constant(2))
    assert asked == {"train": [(0, replicas)], "validation": [(0, replicas)]}
    path = first.checkpoint.write(str(tmp_path / "ckpt-7"))

    resumed, asked = _trainer(replicas)
    resumed.checkpoint.read(path)
    resumed.after_restore(path)
    resumed.evaluate(tf.constant(2))
    resumed.train(tf.constant(1))
    assert asked == {"train": [(7, replicas)], "validation": [(0, replicas)]}


def test_after_a_rollback_the_position_is_that_of_the_restored_step(tmp_path: Path) -> None:
    trainer, asked = _trainer()
    trainer.train(tf.constant(5))
    path = trainer.checkpoint.write(str(tmp_path / "ckpt-5"))
    trainer.train(tf.constant(5))
    trainer.checkpoint.read(path)
    trainer.after_restore(path)
    trainer.train(tf.constant(1))
    assert asked["train"] == [(0, 1), (5, 1)]


@pytest.mark.parametrize(("position", "told"), [(0, False), (7, True)])
def test_a_dataset_without_a_position_starts_at_its_beginning_and_says_so(
    position: int, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_at(lambda params: tf.data.Dataset.range(20), None, position, None)
    assert int(next(iter(dataset))) == 0
    assert ("starts again at its beginning, not at batch 7" in caplog.text) == told
