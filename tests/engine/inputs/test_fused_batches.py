"""Batches stacked to one element."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import training_data, validation_data
from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_structure import get_transformation_kind, iterate_transformations
from trainer_kit.inputs.fused_batches import (
    build_stacked_dataset_at,
    describe_stacking_problem,
    stack_batches,
)
from trainer_kit.inputs.sources.arrays import ArraySource

PARAMS = training_data(seed=3)


class _Pair(NamedTuple):
    x: Any
    y: Any


def _unstack_batches(dataset: tf.data.Dataset, stacks: int) -> list[Any]:
    """The batches of the first `stacks` elements, without what they are filled up with."""
    batches = []
    for count, stack in dataset.take(stacks):
        batches += [
            tf.nest.map_structure(lambda part, n=n: part[n].numpy().tolist(), stack)
            for n in range(int(count))
        ]

    return batches


def test_full_stacks_and_a_last_one_that_is_filled_up() -> None:
    dataset = stack_batches(tf.data.Dataset.range(14).batch(2, drop_remainder=True), 4)

    assert [int(count) for count, _ in dataset] == [4, 3]
    assert {tuple(batches.shape) for _, batches in dataset} == {(4, 2)}
    assert _unstack_batches(dataset, 2) == [[2 * n, 2 * n + 1] for n in range(7)]


@pytest.mark.parametrize(
    "structure", [lambda x: {"x": x}, lambda x: (x,), lambda x: _Pair(x, (x, x)), lambda x: x]
)
def test_elements_keep_their_structure(structure: Any) -> None:
    dataset = tf.data.Dataset.range(8).map(structure).batch(2, drop_remainder=True)
    _, spec = stack_batches(dataset, 2).element_spec

    tf.nest.assert_same_structure(spec, dataset.element_spec)
    assert type(spec) is type(dataset.element_spec)


def test_batches_of_other_sizes_begin_a_stack_of_their_own() -> None:
    dataset = tf.data.Dataset.range(5).map(lambda x: {"x": x, "y": (x,)}).batch(2).repeat(2)
    stacks = stack_batches(dataset, 4)

    assert [int(count) for count, _ in stacks] == [2, 1, 1, 1, 1]

    plain = [tf.nest.map_structure(lambda part: part.numpy().tolist(), batch) for batch in dataset]
    assert _unstack_batches(stacks, 5) == plain
    # Filled up, so that few programs are compiled.
    assert {len(stack["x"]) for _, stack in stacks} == {4}


@pytest.mark.parametrize("position", [Position(5, (1,)), Position(2, (3, 11))])
def test_a_source_gives_the_same_batches_as_one_by_one(position: Position) -> None:
    source = ArraySource((np.arange(10), np.arange(20.0).reshape(10, 2)), PARAMS)
    transformed = ArraySource(
        (np.arange(10), np.arange(20.0).reshape(10, 2)), PARAMS, transform=lambda pair: pair
    )
    at_once = build_stacked_dataset_at(source, position, 3)
    one_by_one = build_stacked_dataset_at(transformed, position, 3)

    assert at_once.element_spec == one_by_one.element_spec

    assert _unstack_batches(at_once, 4) == _unstack_batches(one_by_one, 4)

    if not [out for out in position.skipped_batches if out >= position.batch]:
        plain = [
            [x.numpy().tolist(), y.numpy().tolist()] for x, y in source.at(position.batch).take(12)
        ]
        assert [list(batch) for batch in _unstack_batches(at_once, 4)] == plain


def test_no_single_batch_is_prefetched_before_stacking() -> None:
    dataset = tf.data.Dataset.range(14).batch(2, drop_remainder=True)
    options = tf.data.Options()
    options.deterministic = True
    plain = stack_batches(dataset, 4)
    prefetched = dataset.prefetch(3).with_options(options)

    stacks = build_stacked_dataset_at(prefetched, Position(1), 4)

    assert _unstack_batches(stacks, 2) == _unstack_batches(plain, 2)[1:]
    kinds = [get_transformation_kind(part) for part in iterate_transformations(stacks)]
    assert kinds.count("Prefetch") == 1
    assert stacks.options().deterministic is True


def test_a_pass_over_arrays_is_stacked_too() -> None:
    source = ArraySource(np.arange(10), validation_data())

    assert _unstack_batches(build_stacked_dataset_at(source, Position(), 2), 2) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (tf.TensorSpec([None, 3], tf.float32), ""),
        (tf.TensorSpec([None, None], tf.float32), "no fixed shape"),
        (tf.TensorSpec(None, tf.float32), "no fixed shape"),
        (tf.TensorSpec([2], tf.string), "string tensors"),
        (tf.RaggedTensorSpec([2, None], tf.int32), "a RaggedTensor"),
    ],
)
def test_what_cannot_be_stacked_is_told(spec: Any, problem: str) -> None:
    assert problem in describe_stacking_problem((spec, tf.TensorSpec([2], tf.int32)))
    assert bool(problem) == bool(describe_stacking_problem(spec))


def test_a_dataset_that_cannot_be_stacked_is_refused() -> None:
    words = tf.data.Dataset.from_tensor_slices(["a", "b"]).batch(1, drop_remainder=True)
    with pytest.raises(UsageError):
        stack_batches(words, 2)
