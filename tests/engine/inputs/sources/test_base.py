"""What a Source is, and where the Trainer asks it to start."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import input_context, read_batches, replicas, training_data, validation_data
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.source_protocol import (
    Source,
    build_dataset_at,
    call_build_inputs,
    get_data_identity,
)
from trainer_kit.testing import tiny_arrays
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer


def test_a_dataset_is_no_source_and_arrays_and_own_classes_are() -> None:
    source = ArraySource(np.zeros(3), training_data(1))

    assert isinstance(source, Source)
    assert isinstance(_Recorded(source, []), Source)
    assert not isinstance(tf.data.Dataset.range(3), Source)


def test_a_plain_dataset_is_described_by_length_and_spec() -> None:
    data = tf.data.Dataset.range(10).batch(4)
    spec = "TensorSpec(shape=(None,), dtype=tf.int64, name=None)"

    assert get_data_identity(data) == {"batches": 3, "element_spec": spec}
    assert get_data_identity(data, " of one replica") == {
        "batches of one replica": 3,
        "element_spec of one replica": spec,
    }


def test_a_source_without_identity_is_not_known() -> None:
    assert get_data_identity(_Recorded(ArraySource(np.zeros(3), training_data(1)), [])) == {}
    assert get_data_identity(None) == {}


class _Recorded:
    """A source of a user's own, which keeps what it was asked for."""

    def __init__(self, source: ArraySource, asked: list[tuple[int, int]]) -> None:
        self._source = source
        self._asked = asked

    def at(
        self, position: int, input_context: tf.distribute.InputContext | None = None
    ) -> tf.data.Dataset:
        self._asked.append((position, input_context.num_replicas_in_sync if input_context else 1))
        return self._source.at(position, input_context)


class _RecordingTask(LinearTask):
    """Keeps (section, position, replicas) of what the Trainer asks for, and learns nothing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.asked: dict[str, list[tuple[int, int]]] = {"train": [], "validation": []}

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        kind = "train" if params.is_training else "validation"
        source = ArraySource(tiny_arrays(kind == "train", self.task_config.examples), params)
        return _Recorded(source, self.asked[kind])

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        return {self.loss: tf.reduce_mean(inputs[0])}

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        return {self.loss: tf.reduce_mean(inputs[0])}


def _create_trainer(count: int) -> tuple[Trainer, dict[str, list[tuple[int, int]]]]:
    config = linear_experiment()
    with replicas(count).scope():
        task = _RecordingTask(config.task)
        return create_trainer(config, task), task.asked


def test_training_resumes_at_a_position_evaluation_at_the_start(tmp_path: Path) -> None:
    first, asked = _create_trainer(2)

    # Nothing is asked for before it is known where to start.
    assert asked == {"train": [], "validation": []}

    first.train(tf.constant(3))
    first.train(tf.constant(4))
    first.evaluate(tf.constant(2))

    assert asked == {"train": [(0, 2)], "validation": [(0, 2)]}

    path = first.checkpoint.write(str(tmp_path / "ckpt-7"))

    resumed, asked = _create_trainer(2)

    resumed.checkpoint.read(path)
    resumed.after_restore(path)
    resumed.evaluate(tf.constant(2))
    resumed.train(tf.constant(5))

    assert asked == {"train": [(7, 2)], "validation": [(0, 2)]}

    resumed.checkpoint.read(path)  # and a rollback moves to the position of the restored step
    resumed.after_restore(path)
    resumed.train(tf.constant(1))

    assert asked["train"] == [(7, 2), (7, 2)]


def _build_array_inputs(params: DataConfig, input_context: Any = None) -> ArraySource:
    return ArraySource(np.arange(23), params)


def _build_plain_inputs(params: DataConfig) -> tf.data.Dataset:
    """The shuffle has no seed of its own."""
    return tf.data.Dataset.range(23).shuffle(23).repeat().batch(2, drop_remainder=True)


@pytest.fixture
def _global_seed() -> Any:
    tf.random.set_seed(5)
    yield
    tf.random.set_seed(None)


PARAMS = training_data()
TWO = input_context(2)


@functools.cache
def _read_all(build_inputs: Any) -> np.ndarray:
    """The first 30 global batches, from the start and with none left out."""
    dataset = build_dataset_at(call_build_inputs(build_inputs, PARAMS, TWO), Position(), TWO)
    return np.asarray(read_batches(dataset, 30 * 2)).reshape([30, 2, 2])


@pytest.mark.usefixtures("_global_seed")
@pytest.mark.parametrize("build_inputs", [_build_array_inputs, _build_plain_inputs])
@pytest.mark.parametrize(
    "position", [Position(9), Position(3, (3, 4, 9)), Position(7, (2, 8)), Position(0, (0, 1, 5))]
)
def test_data_begins_at_the_position_without_left_out_batches(
    position: Position, build_inputs: Any
) -> None:
    rows = (
        _read_all(build_inputs)[[position.get_batch_after(k) for k in range(8)]]
        .reshape([-1, 2])
        .tolist()
    )
    dataset = build_dataset_at(call_build_inputs(build_inputs, PARAMS, TWO), position, TWO)

    assert read_batches(dataset, 8 * 2) == rows
    assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY


@pytest.mark.parametrize(
    ("begin", "left_out"),
    [
        *((1, out) for out in ((), (1,), (0, 3, 4))),
        *((0, out) for out in ((1,), (0, 3, 4), (4,))),
        *((4, out) for out in ((0, 3, 4), (40,))),
    ],
)
def test_one_pass_knows_its_length_without_what_is_left_out(
    begin: int, left_out: tuple[int, ...]
) -> None:
    """On the second of two workers with two replicas each."""
    params = validation_data()
    context = input_context(4, 2, 1)

    def plain(params: Any) -> tf.data.Dataset:
        # 9 batches of one example; with two replicas the last global one is half.
        return tf.data.Dataset.range(9)

    for build_inputs, elements in (
        (lambda params: ArraySource(np.arange(17), params), 10),
        (plain, 9),
    ):
        dataset = build_dataset_at(build_inputs(params), Position(begin, left_out), context)
        expected = [k for k in range(begin * 2, elements) if k // 2 not in left_out]
        assert int(dataset.cardinality()) == len(expected) == len(read_batches(dataset, -1))


def test_any_dataset_can_leave_batches_out() -> None:
    def build_inputs(params: Any) -> tf.data.Dataset:
        numbers = tf.data.Dataset.range(9).filter(lambda value: value != 4)
        return numbers.map(lambda value: {"a": value, "b": (value, [value])})

    read = list(build_dataset_at(build_inputs(None), Position(1, (2, 3))))

    assert [int(element["a"]) for element in read] == [1, 5, 6, 7, 8]
    assert set(read[0]) == {"a", "b"}
    assert isinstance(read[0]["b"], tuple)


def test_build_inputs_gets_the_context_only_if_it_takes_one() -> None:
    context = input_context(2)
    got: list[Any] = []

    def with_context(params: Any, input_context: Any) -> tf.data.Dataset:
        got.append((params, input_context))
        return tf.data.Dataset.range(3)

    call_build_inputs(with_context, 1, context)

    assert got == [(1, context)]
    assert (
        call_build_inputs(lambda params: params, numbers := tf.data.Dataset.range(3), context)
        is numbers
    )


@pytest.mark.parametrize("inputs", [None, ([[1.0]], [1]), {}, iter([]), np.zeros(3)])
def test_what_is_no_data_is_told_with_the_method(inputs: Any) -> None:
    def build_inputs(params: Any) -> Any:
        return inputs

    with pytest.raises(UsageError):
        call_build_inputs(build_inputs, None)


@pytest.mark.usefixtures("_global_seed")
def test_unseeded_shuffles_ignore_earlier_random_numbers() -> None:
    first = read_batches(call_build_inputs(_build_plain_inputs, None), 20)
    following = float(tf.random.uniform([]))

    assert read_batches(call_build_inputs(_build_plain_inputs, None), 20) == first

    tf.random.set_seed(5)

    # And making data changes no number of the others.
    assert float(tf.random.uniform([])) == following

    tf.random.set_seed(6)

    assert read_batches(call_build_inputs(_build_plain_inputs, None), 20) != first
