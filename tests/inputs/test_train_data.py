"""The training data's position over restarts, by every method that there is."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.config.schema import DataConfig
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.arrays import ArraySource
from trainer_kit.inputs.position import Position
from trainer_kit.inputs.train_data import TrainData, open_whole

PARAMS = DataConfig(is_training=True, global_batch_size=4, seed=3)


class _Run:
    """A run that counts its steps and notes what it is fed."""

    def __init__(self, build: Any, step: int = 0, **options: Any) -> None:
        self.step = step
        make = lambda open_at: open_at(build, PARAMS, None)  # noqa: E731
        self.data = TrainData(make, lambda: self.step, one_iterator=True, **options)

    def take(self, count: int) -> list[list[int]]:
        batches = []
        for _ in range(count):
            batches.append(next(self.data.iterator()).numpy().tolist())
            self.step += 1
        return batches


def _source(params: DataConfig) -> ArraySource:
    return ArraySource(np.arange(10), params)


def _shuffled(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).shuffle(10, seed=1).repeat().batch(4)


def _cached(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).cache().shuffle(10, seed=1).repeat().batch(4)


def _random(params: DataConfig) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(10).repeat()
    return numbers.map(lambda x: x + tf.random.uniform([], 0, 5, tf.int64)).batch(4)


def _python(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).repeat().map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)).batch(4)


@pytest.mark.parametrize("build", [_source, _shuffled, _cached])
def test_a_restored_run_is_fed_what_it_would_have_been(build: Any, tmp_path: Path) -> None:
    whole = _Run(build).take(12)
    first = _Run(build)
    assert first.take(5) == whole[:5]
    first.data.save_iterator(str(tmp_path / "ckpt-5.iterator"))
    second = _Run(build, step=5)
    second.data.restored(str(tmp_path / "ckpt-5.iterator"))
    second.data.put_state(first.data.state())
    assert second.take(7) == whole[5:]


def test_an_iterator_is_saved_only_where_that_is_the_way(tmp_path: Path) -> None:
    for build, files in ((_shuffled, 2), (_source, 0), (_cached, 0)):
        run = _Run(build)
        run.take(2)
        run.data.save_iterator(str(tmp_path / build.__name__ / "ckpt-2.iterator"))
        assert len(list(tmp_path.glob(f"{build.__name__}/ckpt-2.iterator.*"))) == files


def test_without_the_saved_iterator_the_data_is_read_from_its_start_and_no_iterator_is_saved_any_more(
    tmp_path: Path,
) -> None:
    whole = _Run(_shuffled).take(9)
    run = _Run(_shuffled, step=5)
    run.data.restored(str(tmp_path / "ckpt-5.iterator"))
    run.data.put_state(None)
    assert run.take(2) == whole[5:7]
    run.data.save_iterator(str(tmp_path / "ckpt-7.iterator"))
    assert not list(tmp_path.iterdir())


def test_the_state_of_another_datas_iterator_is_a_storage_error(tmp_path: Path) -> None:
    first = _Run(_shuffled)
    first.take(2)
    first.data.save_iterator(str(tmp_path / "ckpt-2.iterator"))
    other = _Run(lambda params: tf.data.Dataset.range(5).batch(1).prefetch(1), step=2)
    other.data.restored(str(tmp_path / "ckpt-2.iterator"))
    other.data.put_state(first.data.state())
    with pytest.raises(StorageError, match=r"ckpt-2\.iterator does not hold the state of this data's iterator"):
        other.take(1)


def test_a_batch_that_is_left_out_stays_out_after_a_restart() -> None:
    whole = _Run(_source).take(9)
    first = _Run(_source)
    first.take(2)
    first.data.leave_out(4)
    assert first.take(3) == [whole[2], whole[3], whole[5]]
    assert first.data.state() == {"batch": 6, "left_out": [4]}
    second = _Run(_source, step=5)
    second.data.put_state(first.data.state())
    assert second.take(2) == whole[6:8]
    assert [first.data.batch_of(step) for step in (3, 4, 5, 6)] == [2, 3, 5, 6]


def test_a_run_without_a_state_stands_at_the_batch_of_its_step() -> None:
    run = _Run(_source, step=7)
    run.data.put_state(None)
    assert run.data.position == Position(7)


@pytest.mark.parametrize(
    ("build", "named"), [(_cached, r"cache\(\)"), (_random, r"map\(\): RandomUniform"), (_python, "EagerPyFunc")]
)
def test_data_that_cannot_be_resumed_at_once_is_told_of_by_the_name_of_the_op_once(
    build: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Run(build)
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        run.take(1)
        run.data.put_state(run.data.state())
        run.take(1)
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.search(named, line) for line in lines)
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("build", [_random, _python])
def test_where_exactness_is_required_inexact_data_is_refused(build: Any) -> None:
    with pytest.raises(UsageError, match=r"trainer\.require_exact_resume:\n  task\.train_data: map\(\)"):
        _Run(build, require_exact=True).take(1)


@pytest.mark.parametrize("build", [_source, _shuffled, _cached])
def test_where_exactness_is_required_exact_data_is_not_refused(build: Any) -> None:
    assert len(_Run(build, require_exact=True).take(1)) == 1


def test_validation_data_begins_at_its_start() -> None:
    params = DataConfig(is_training=False, global_batch_size=4, drop_remainder=False)
    assert next(batch.tolist() for batch in open_whole(_source, params, None).as_numpy_iterator()) == [0, 1, 2, 3]
