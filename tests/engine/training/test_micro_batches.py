"""A batch in micro-batches: their sizes, weights and shapes, on one replica and on two."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import on_each_replica, replicas
from trainer_kit.errors import UsageError
from trainer_kit.training.micro_batches import (
    MicroBatches,
    batch_size,
    find_static_batch_size,
    slice_batch,
)


class _Parts:
    """Notes the parts that a step gets, in the graph."""

    def __init__(
        self, parts: int, strategy: tf.distribute.Strategy | None = None, **options: Any
    ) -> None:
        self.strategy = strategy or tf.distribute.get_strategy()
        self.seen: list[Any] = []
        self.static: list[int | None] = []
        self.updates = 0
        self.batches = MicroBatches(parts, self.strategy, self._step, self._update, **options)

    def _step(self, part: Any, share: Any, first: Any) -> None:
        (values, *_) = tf.nest.flatten(part)
        self.static.append(values.shape[0])
        tf.numpy_function(self._note, [values, share, first], [])

    def _note(self, values: Any, share: Any, first: Any) -> None:
        self.seen.append((values.tolist(), round(float(share), 4), bool(first)))

    def _update(self) -> None:
        tf.numpy_function(lambda: self.seen.append("update"), [], [])


def _run(parts: int, n: int, static: bool = True, **options: Any) -> _Parts:
    noted = _Parts(parts, **options)
    spec = tf.TensorSpec([n if static else None], tf.int32)
    tf.function(noted.batches, input_signature=[spec], autograph=False)(tf.range(n))
    return noted


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 10])
def test_each_example_is_in_one_part_and_no_part_is_empty(n: int, static: bool) -> None:
    noted = _run(4, n, static)
    *parts, last = noted.seen

    assert last == "update"
    assert [value for values, _, _ in parts for value in values] == list(range(n))

    count = {5: 5, 7: 7, 10: 5}.get(n, min(4, n)) if static else min(4, n)
    assert len(parts) == count
    assert max(len(values) for values, _, _ in parts) == -(-n // count)
    assert all(
        share == pytest.approx(len(values) / n, abs=1e-4) and values for values, share, _ in parts
    )
    assert [first for _, _, first in parts] == [True] + [False] * (len(parts) - 1)


def test_a_known_size_gives_parts_of_one_static_shape() -> None:
    assert _run(4, 8).static == [2]
    assert _run(4, 10).static == [2]
    assert _run(4, 10, static=False).static == [None]


def _count_totals(n: int, parts: int, in_xla: bool) -> Any:
    total = tf.Variable(0.0)
    calls = tf.Variable(0)

    def step(part: Any, share: Any, first: Any) -> None:
        del first
        total.assign_add(share * tf.reduce_mean(part))
        calls.assign_add(1)

    batches = MicroBatches(parts, tf.distribute.get_strategy(), step, lambda: None, uses_xla=in_xla)
    function = tf.function(batches, jit_compile=True, autograph=False)
    function.get_concrete_function(tf.TensorSpec([None], tf.float32))(tf.range(float(n)))
    return float(total.numpy()), int(calls.numpy())


@pytest.mark.parametrize("n", [2, 4, 9])
def test_xla_compiles_parts_of_a_batch_of_unknown_size(n: int) -> None:
    assert _count_totals(n, 4, in_xla=True) == (pytest.approx((n - 1) / 2), n)


def test_nested_features_are_split_and_scalars_passed_on() -> None:
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2], [3, 0], [0, 4]])
    inputs = (
        {
            "a": tf.reshape(tf.range(12), [4, 3]),
            "scale": tf.constant(2.0),
            "ragged": ragged,
            "none": None,
        },
        sparse,
    )

    features, labels = slice_batch(inputs, tf.constant(1), 2)

    assert features["a"].numpy().tolist() == [[3, 4, 5], [6, 7, 8]]
    assert features["ragged"].to_list() == [[2, 3], []]
    assert float(features["scale"]) == 2.0
    assert features["none"] is None
    assert tf.sparse.to_dense(labels).numpy().tolist() == [[0, 2], [3, 0]]
    assert batch_size(tf.nest.flatten(inputs)) == 4


def test_a_batch_that_cannot_be_split_is_refused() -> None:
    with pytest.raises(UsageError, match="the tensors of a batch need first axes"):
        find_static_batch_size([tf.constant(1.0)])

    with pytest.raises(UsageError, match=r"first axes of one size.*\[4, 3\].*\[8\]"):
        find_static_batch_size([tf.zeros([4, 3]), tf.zeros([8])])


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (3, 1)])
def test_replicas_take_the_same_number_of_parts(sizes: tuple[int, int]) -> None:
    mirrored = replicas(2)
    with mirrored.scope():
        mean = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM)
        metric = keras.metrics.Mean()

    def step(part: Any, share: Any, first: Any) -> None:
        del first
        mean.assign_add(share * tf.reduce_mean(part))
        metric.update_state(part)

    # A batch for each replica, of sizes that are not known before.
    whole = [np.arange(size, dtype=np.float32) + 10 * number for number, size in enumerate(sizes)]
    spec = tf.TensorSpec([None], tf.float32)
    batches = MicroBatches(4, mirrored, step, lambda: None, lambda: metric.variables)
    data = iter(
        mirrored.distribute_datasets_from_function(
            lambda _: tf.data.Dataset.from_generator(lambda: iter(whole), output_signature=spec)
        )
    )

    tf.function(lambda: batches(next(data)), autograph=False)()

    np.testing.assert_allclose(
        on_each_replica(mirrored, mean), [part.mean() for part in whole], rtol=1e-6
    )
    # Repeated examples count once.
    assert float(metric.result()) == pytest.approx(np.concatenate(whole).mean())


SUM = tf.VariableAggregation.SUM
