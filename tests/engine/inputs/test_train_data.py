"""The training data's position over restarts, by every method that there is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import read_batches, replicas, training_data, validation_data
from tests.engine.inputs.one_replica import OneReplica, section_of
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_resume import ResumePolicy
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.inputs.worker_pipeline import build_one_pass

PARAMS = training_data(seed=3)


class _Run:
    """A run that counts its steps and notes the data of `build`, or of a ready-made dataset."""

    def __init__(
        self,
        build: Any,
        step: int = 0,
        ready_made: Any = None,
        *,
        batch_size: int = 0,
        require_exact: bool = False,
    ) -> None:
        self._step = tf.Variable(step, dtype=tf.int64)
        section = section_of(build, PARAMS)
        policy = ResumePolicy(has_single_iterator=True, require_exact=require_exact)
        self.data = TrainData(
            OneReplica(), section, policy, self._step, ready_made, batch_size=batch_size
        )

    @property
    def step(self) -> int:
        return int(self._step.numpy())

    @step.setter
    def step(self, step: int) -> None:
        self._step.assign(step)

    def take(self, count: int) -> list[list[int]]:
        batches = []
        for _ in range(count):
            batches.append(next(self.data.iterator()).numpy().tolist())
            self.step += 1

        return batches


def _create_source(params: DataConfig) -> ArraySource:
    return ArraySource(np.arange(10), params)


def _build_in_order(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).repeat().batch(4)


def _build_shuffled(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).shuffle(10, seed=1).repeat().batch(4)


def _build_cached(params: DataConfig) -> tf.data.Dataset:
    return tf.data.Dataset.range(10).cache().shuffle(10, seed=1).repeat().batch(4)


def _build_random(params: DataConfig) -> tf.data.Dataset:
    numbers = tf.data.Dataset.range(10).repeat()
    return numbers.map(lambda x: x + tf.random.uniform([], 0, 5, tf.int64)).batch(4)


def _build_with_python(params: DataConfig) -> tf.data.Dataset:
    return (
        tf.data.Dataset.range(10)
        .repeat()
        .map(lambda x: tf.py_function(lambda y: y, [x], tf.int64))
        .batch(4)
    )


@functools.cache
def _take_all(build: Any) -> list[list[int]]:
    """The first 12 batches of a run that nothing stops."""
    return _Run(build).take(12)


def test_a_saved_iterator_is_not_for_stacks_of_another_size(tmp_path: Path) -> None:
    whole = _take_all(_build_shuffled)
    first = _Run(_build_shuffled)
    first.take(5)
    first.data.save_iterator(str(tmp_path / "ckpt-5.iterator"))
    second = _Run(_build_shuffled, step=5)

    second.data.prepare_iterator_restore(str(tmp_path / "ckpt-5.iterator"))
    second.data.restore(first.data.state())
    second.data.set_stack_size(3)
    count, batches = next(second.data.iterator())

    assert int(count) == 3
    assert batches.numpy().tolist() == whole[5:8]


def _refuse_to_build(params: DataConfig) -> Any:
    raise AssertionError("build_inputs was called")


def _create_run(build: Any, how: str, **options: Any) -> _Run:
    """Returns a run over the data of `build`.

    They are built, or a ready-made dataset that is given at once or set before the first batch.
    """
    if how == "built":
        return _Run(build, **options)
    if how == "given":
        return _Run(_refuse_to_build, ready_made=build(PARAMS), **options)

    run = _Run(_refuse_to_build, **options)
    run.data.replace(build(PARAMS))
    return run


def _build_distributed() -> Any:
    return replicas(2).experimental_distribute_dataset(_build_in_order(PARAMS))


@pytest.mark.parametrize(
    ("build", "how"),
    [
        (_create_source, "built"),
        *itertools.product([_build_shuffled, _build_cached], ["built", "given", "set"]),
    ],
)
def test_a_restored_run_is_fed_what_it_would_have_been(
    build: Any, how: str, tmp_path: Path
) -> None:
    whole = _take_all(build)
    first = _create_run(build, how)

    assert first.take(5) == whole[:5]

    first.data.save_iterator(str(tmp_path / "ckpt-5.iterator"))
    second = _create_run(build, how, step=5)

    second.data.prepare_iterator_restore(str(tmp_path / "ckpt-5.iterator"))
    second.data.restore(first.data.state())

    assert second.take(7) == whole[5:12]
    assert bool(list(tmp_path.iterdir())) == (build is _build_shuffled)


def test_a_dataset_that_is_set_after_the_restore_goes_on_too() -> None:
    whole = _take_all(_build_cached)
    run = _Run(_create_source, step=5)

    run.data.restore(None)
    run.data.replace(_build_cached(PARAMS))

    assert run.take(4) == whole[5:9]


def test_a_second_dataset_begins_at_its_start_and_resumes() -> None:
    whole = _take_all(_build_cached)
    first = _Run(_create_source)

    first.take(3)
    first.data.skip_batch(7)
    first.data.replace(_build_cached(PARAMS))

    assert first.data.state() == {"batch": 0, "left_out": []}
    assert first.take(5) == whole[:5]

    second = _create_run(_build_cached, "set", step=8)

    second.data.restore(first.data.state())

    assert second.take(4) == whole[5:9]


def test_a_rollback_to_before_a_dataset_was_set_restarts_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = _Run(_create_source)
    strict = _Run(_create_source, require_exact=True)
    for trial in (run, strict):
        trial.take(3)
        trial.data.replace(_build_in_order(PARAMS))
        trial.take(2)
        trial.step = 1

    with caplog.at_level(logging.WARNING, "trainer_kit"):
        run.data.restore({"batch": 1, "left_out": []})

    assert (
        "resume is not exact: the run goes back to step 1, and its dataset was set at step 3"
        in caplog.text
    )
    assert run.take(4) == _take_all(_build_in_order)[:4]

    with pytest.raises(
        UsageError, match=r"trainer\.require_exact_resume:\n .* its dataset was set at step 3"
    ):
        strict.data.restore({"batch": 1, "left_out": []})


def test_build_inputs_after_a_ready_made_dataset_starts_over() -> None:
    run = _Run(_create_source, step=5)

    run.data.restore(None)
    run.take(2)
    run.data.replace(_build_cached(PARAMS))
    run.take(3)
    run.data.replace(None)

    assert run.take(2) == _take_all(_create_source)[:2]


def test_a_reread_shuffle_warns_unless_its_iterator_was_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _take_all(_build_shuffled)
    prefix = str(tmp_path / "ckpt-5.iterator")
    kept = _build_shuffled(PARAMS)
    for run in (
        _create_run(_build_shuffled, "given", require_exact=True),
        _Run(lambda params: kept, require_exact=True),
    ):
        run.take(5)
        checkpoint = run.data.state()
        run.data.save_iterator(prefix)
        run.take(2)
        run.step = 5
        run.data.prepare_iterator_restore(prefix)
        run.data.restore(checkpoint)
        assert run.take(4) == whole[5:9]
        run.data.restore(checkpoint)
        with pytest.raises(
            UsageError, match=r"dataset is read a second time, and shuffle\(\) then draws another"
        ):
            run.take(1)

    with caplog.at_level(logging.WARNING, "trainer_kit"):
        run = _create_run(_build_shuffled, "given")
        run.data.restore(None)
        run.take(2)
        assert caplog.text == ""
        run.data.restore(None)
        assert run.take(2) != whole[2:4]

    assert (
        "resume is not exact: the same dataset is read a second time, and shuffle() then draws"
        in caplog.text
    )


def test_a_dataset_in_one_order_can_be_begun_again() -> None:
    run = _create_run(_build_in_order, "given", require_exact=True)
    run.take(5)
    run.step = 2

    run.data.restore(None)

    assert run.take(4) == _take_all(_build_in_order)[2:6]


@pytest.mark.parametrize("ready_made", [lambda: _build_in_order(PARAMS), _build_distributed])
def test_no_batch_of_a_ready_made_dataset_can_be_left_out(ready_made: Any) -> None:
    run = _Run(_refuse_to_build, ready_made=ready_made())
    with pytest.raises(UsageError):
        run.data.skip_batch(2)


def test_a_distributed_dataset_warns_once_and_always_restarts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        run = _Run(_refuse_to_build, ready_made=_build_distributed())
        assert caplog.text == ""
        first = next(run.data.iterator())
        run.data.restore({"batch": 3, "left_out": []})
        again = next(run.data.iterator())

    assert [record.getMessage() for record in caplog.records] == [
        "task.train_data: resume is not exact: a ready-made DistributedDataset has no position,"
        " so each start and each rollback reads it from its beginning; return the data from"
        " build_inputs instead"
    ]
    assert [part.numpy().tolist() for part in first.values] == [
        part.numpy().tolist() for part in again.values
    ]


def test_a_stop_does_not_wait_long_for_batches_in_the_making(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def count_slowly(number: tf.Tensor) -> tf.Tensor:
        rounds = tf.while_loop(lambda i, x: i < 15_000, lambda i, x: (i + 1, x), (0, 0.0))[0]
        return number + 0 * tf.cast(rounds, number.dtype)

    run = _Run(lambda _: tf.data.Dataset.range(50).map(count_slowly).batch(1).prefetch(20))
    run.take(1)
    begin = time.monotonic()

    run.data.save_iterator(str(tmp_path / "ckpt-1.iterator"), should_give_up=lambda: True)
    given_up = time.monotonic() - begin

    assert "is resumed by reading the data from its start" in caplog.text

    begin = time.monotonic()

    run.data.save_iterator(str(tmp_path / "ckpt-2.iterator"))

    # What was given up leaves a folder at most, which is removed at the next start.
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        "ckpt-2.iterator.index",
        "ckpt-2.iterator.data-00000-of-00001",
    }
    assert given_up < 0.5 + time.monotonic() - begin


def test_a_lost_iterator_means_reading_from_the_start_for_good(
    tmp_path: Path,
) -> None:
    whole = _take_all(_build_shuffled)
    run = _Run(_build_shuffled, step=5)

    run.data.prepare_iterator_restore(str(tmp_path / "ckpt-5.iterator"))
    run.data.restore(None)

    assert run.take(2) == whole[5:7]

    run.data.save_iterator(str(tmp_path / "ckpt-7.iterator"))

    assert not list(tmp_path.iterdir())


def test_the_state_of_another_datas_iterator_is_a_storage_error(tmp_path: Path) -> None:
    first = _Run(_build_shuffled)
    first.take(2)
    first.data.save_iterator(str(tmp_path / "ckpt-2.iterator"))
    other = _Run(lambda params: tf.data.Dataset.range(5).batch(1).prefetch(1), step=2)
    other.data.prepare_iterator_restore(str(tmp_path / "ckpt-2.iterator"))
    other.data.restore(first.data.state())

    with pytest.raises(
        StorageError, match=r"ckpt-2\.iterator does not hold the state of this data's iterator"
    ):
        other.take(1)


def test_a_batch_that_is_left_out_stays_out_after_a_restart() -> None:
    whole = _take_all(_create_source)
    first = _Run(_create_source)

    first.take(2)
    first.data.skip_batch(4)

    assert first.take(3) == [whole[2], whole[3], whole[5]]
    assert first.data.state() == {"batch": 6, "left_out": [4]}

    second = _Run(_create_source, step=5)

    second.data.restore(first.data.state())

    assert second.take(2) == whole[6:8]
    assert [first.data.get_batch_index(step) for step in (3, 4, 5, 6)] == [2, 3, 5, 6]


def test_another_batch_size_continues_after_as_many_examples() -> None:
    def pairs(params: DataConfig) -> ArraySource:
        return _create_source(params.replace(global_batch_size=2))

    whole = np.concatenate(_take_all(_create_source)).tolist()
    first = _Run(_create_source, batch_size=4)
    first.take(3)
    first.data.skip_batch(5)
    second = _Run(pairs, step=3, batch_size=2)

    second.data.restore(first.data.state())

    assert np.concatenate(second.take(4)).tolist() == whole[12:20]
    assert second.data.state() == {"batch": 10, "left_out": [], "batch_size": 2}

    third = _Run(_create_source, step=7, batch_size=4)

    third.data.restore(second.data.state())

    assert third.take(1) == [whole[20:24]]


def test_a_second_rollback_keeps_left_out_batches_out() -> None:
    whole = _take_all(_build_cached)
    run = _Run(_build_cached)
    run.take(2)
    checkpoint = run.data.state()

    for bad, expected in ((4, [2, 3, 5, 6]), (6, [2, 3, 5, 7])):
        run.step = 2
        run.data.restore(checkpoint)
        run.data.skip_batch(bad)
        assert run.take(4) == [whole[index] for index in expected]

    assert run.data.state() == {"batch": 8, "left_out": [4, 6]}

    run.step = 2

    run.data.restore(checkpoint)

    assert run.data.get_batch_index(6) == 7

    run.data.restore(None)

    assert run.data.position == Position(2, (4, 6))


@pytest.mark.parametrize("ready_made", [False, True])
@pytest.mark.parametrize(
    ("build", "named", "level"),
    [
        (_build_cached, r"cache\(\)", "INFO"),
        (_build_random, r"map\(\): RandomUniform", "WARNING"),
        (_build_with_python, "EagerPyFunc", "WARNING"),
    ],
)
def test_slow_and_inexact_resumes_are_logged_once_with_the_op(
    build: Any, named: str, level: str, ready_made: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = _create_run(build, "given") if ready_made else _Run(build)

    with caplog.at_level(logging.INFO, "trainer_kit"):
        run.take(1)
        run.data.restore(run.data.state())
        run.take(1)

    lines = [record.getMessage() for record in caplog.records]

    assert level in {
        record.levelname for record in caplog.records if re.search(named, record.getMessage())
    }
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("how", ["built", "given"])
@pytest.mark.parametrize(
    ("build", "exact"),
    [
        (_build_shuffled, True),
        (_build_cached, True),
        (_build_random, False),
        (_build_with_python, False),
    ],
)
def test_where_exactness_is_required_only_exact_data_is_read(
    build: Any, exact: bool, how: str
) -> None:
    run = _create_run(build, how, require_exact=True)
    with contextlib.nullcontext() if exact else pytest.raises(UsageError):
        run.take(1)


def test_exact_resume_refuses_a_distributed_dataset() -> None:
    with pytest.raises(UsageError):
        _Run(_refuse_to_build, ready_made=_build_distributed(), require_exact=True).take(1)


def test_validation_data_begins_at_its_start() -> None:
    assert read_batches(build_one_pass(_create_source(validation_data()), None), 1) == [
        [0, 1, 2, 3]
    ]
