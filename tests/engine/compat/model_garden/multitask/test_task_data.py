"""The data of several tasks, used as that of one."""

from __future__ import annotations

import pytest
import tensorflow as tf

from trainer_kit.compat.model_garden.multitask.task_data import TaskData
from trainer_kit.errors import DataError
from trainer_kit.inputs.train_data import TrainData


def test_damaged_data_of_one_task_drops_all_iterators() -> None:
    broken = tf.data.Dataset.range(3).map(
        lambda x: tf.debugging.check_numerics(1.0 / tf.cast(x - 1, tf.float32), "bad")
    )
    given = {"whole": tf.data.Dataset.range(9), "broken": broken, "other": tf.data.Dataset.range(9)}
    parts = {name: TrainData(lambda _: None, lambda: 0, one, one_iterator=True) for name, one in given.items()}
    data = TaskData(parts, lambda step: dict.fromkeys(parts, step))
    iterators = {name: part.iterator() for name, part in parts.items()}
    with pytest.raises(DataError, match=r"cannot be read: .*bad"), data.reporting_damage():
        for _ in range(3):
            tf.function(lambda: next(iterators["broken"]))()
    assert not any(part.feed.started for part in parts.values())
