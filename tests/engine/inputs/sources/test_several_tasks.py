"""The data of several tasks as one stream: from any position, stacked, over replicas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import input_context, training_data
from trainer_kit.config.schema.multitask import TaskSamplingConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.inputs.sources.multitask_source import combine_task_data
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.inputs.task_sampler import TaskSampler

SAMPLER = TaskSampler(TaskSamplingConfig(), (1.0, 2.0), seed=3)


def _create_sources() -> dict[str, ArraySource]:
    """Tasks whose batches differ in size and structure."""
    data = training_data(seed=1)
    pairs = (np.arange(10, dtype=np.float32), np.arange(10))
    return {
        "a": ArraySource(pairs, data),
        "b": ArraySource({"x": np.arange(9)}, data.replace(global_batch_size=2)),
    }


def _read_elements(dataset: tf.data.Dataset, count: int) -> list[Any]:
    return list(dataset.take(count).as_numpy_iterator())


def _assert_same(value: Any, other: Any) -> None:
    tf.nest.map_structure(np.testing.assert_array_equal, value, other)


@pytest.fixture(scope="module")
def interleaved_batches() -> list[Any]:
    """The first 20 elements."""
    return _read_elements(combine_task_data(_create_sources(), SAMPLER).at(0), 20)


@pytest.fixture(scope="module")
def joint() -> list[Any]:
    """The first 20 elements."""
    return _read_elements(combine_task_data(_create_sources(), None).at(0), 20)


def test_an_interleaved_element_is_the_next_batch_of_one_task(
    interleaved_batches: list[Any],
) -> None:
    alone = {name: iter(source.at(0)) for name, source in _create_sources().items()}
    for number, batches in interleaved_batches[:12]:
        name, other = ("a", "b") if number == 0 else ("b", "a")
        _assert_same(
            batches[name], tf.nest.map_structure(lambda part: part.numpy(), next(alone[name]))
        )
        assert all(len(part) == 0 for part in tf.nest.flatten(batches[other]))


def test_a_stream_continues_from_any_position(
    joint: list[Any], interleaved_batches: list[Any]
) -> None:
    for source, whole in (
        (combine_task_data(_create_sources(), None), joint),
        (combine_task_data(_create_sources(), SAMPLER), interleaved_batches),
    ):
        assert isinstance(source, Source)
        later = source.at(7)
        _assert_same(whole[7:], _read_elements(later, 13))
        assert int(later.cardinality()) == tf.data.INFINITE_CARDINALITY


def test_stacks_hold_the_same_batches(joint: list[Any], interleaved_batches: list[Any]) -> None:
    stack = _read_elements(combine_task_data(_create_sources(), None).stacked_at(3, 4), 1)[0]

    _assert_same(stack, tf.nest.map_structure(lambda *parts: np.stack(parts), *joint[3:7]))

    numbers, stacks = _read_elements(
        combine_task_data(_create_sources(), SAMPLER).stacked_at(3, 4), 1
    )[0]
    for place, (number, batches) in enumerate(interleaved_batches[3:7]):
        name = "ab"[number]
        assert numbers[place] == number
        _assert_same(
            tf.nest.map_structure(lambda part, at=place: part[at], stacks[name]), batches[name]
        )


def test_all_replicas_of_a_step_train_the_same_task() -> None:
    context = input_context(2)
    elements = _read_elements(
        combine_task_data(_create_sources(), SAMPLER, context).at(5, context), 12
    )
    numbers = [int(number) for number, _ in elements]

    expected = [int(number) for number in SAMPLER.draw_tasks(5).take(6)]
    assert numbers[::2] == expected
    assert numbers[1::2] == expected
    # Half of a batch.
    assert {len(batches["ab"[number]]["x"]) for number, batches in elements if number == 1} == {1}


def test_a_plain_dataset_among_the_tasks_makes_a_plain_dataset() -> None:
    parts = {"a": _create_sources()["a"], "b": tf.data.Dataset.range(6).batch(2)}
    joint = combine_task_data(parts, None)
    interleaved_batches = combine_task_data(parts, SAMPLER)

    assert not isinstance(joint, Source)
    assert len(_read_elements(joint, 9)) == 3

    batches = [
        batches["b"].tolist()
        for number, batches in _read_elements(interleaved_batches, 50)
        if number == 1
    ]
    assert batches == [[0, 1], [2, 3], [4, 5]]  # and the stream ends with the data of one task


def test_interleaved_batches_have_to_be_dense() -> None:
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]])).ragged_batch(2)
    with pytest.raises(UsageError):
        combine_task_data({"a": _create_sources()["a"], "b": ragged}, SAMPLER)


def test_the_identity_of_several_tasks_is_that_of_each() -> None:
    of_b = ArraySource({"x": np.arange(9)}, training_data(2)).identity()
    for source in (
        combine_task_data(_create_sources(), None),
        combine_task_data(_create_sources(), SAMPLER),
    ):
        identity = source.identity()
        assert list(identity) == ["a, array 0", "a, array 1", "b, array 0"]
        assert identity["b, array 0"] == of_b["array 0"]
