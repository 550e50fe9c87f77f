"""The inner loops, with steps that count."""

import time
from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.training.loops.counting_step import Counter, batches
from trainer_kit.training.loops.iterators import SingleElementIterator
from trainer_kit.training.loops.loop_function import Readback
from trainer_kit.training.loops.train_loop import TrainLoop


@pytest.mark.parametrize("exact", [True, False])
def test_the_waits_for_batches_are_measured(exact: bool) -> None:
    def wait(batch: np.ndarray) -> np.ndarray:
        time.sleep(0.02)
        return batch

    counter = Counter()
    shape = batches().element_spec.shape
    slow = batches().map(
        lambda batch: tf.ensure_shape(tf.numpy_function(wait, [batch], batch.dtype), shape)
    )

    train = TrainLoop(counter, counter.stop, exact_waits=exact)

    assert train(iter(slow), tf.constant(3))[0] == 3
    assert train.wait_seconds is not None
    assert train.wait_seconds > 0.03


def test_a_stop_ends_the_train_loop_before_its_next_step() -> None:
    class StoppingCounter(Counter):
        def after_step(self) -> None:
            self.stop.assign(self.total > 3.0)

    counter = StoppingCounter()

    train = TrainLoop(counter, counter.stop)

    assert train(iter(batches()), tf.constant(4)) == (2, {"total": 15.0})
    assert train(iter(batches()), tf.constant(4)) == (0, {"total": 0.0})


def test_end_of_the_data_raises_and_keeps_the_steps_done() -> None:
    counter = Counter()
    train = TrainLoop(counter, counter.stop)

    with pytest.raises(tf.errors.OutOfRangeError):
        train(iter(batches()), tf.constant(9))

    assert float(counter.total) == 45.0


def _read_in_function(iterator: object) -> tf.Tensor:
    return tf.function(lambda: next(iterator), autograph=False)()  # type: ignore[call-overload]


def _read_in_branch(iterator: object) -> tf.Tensor:
    some = tf.random.uniform([]) < 2.0
    return tf.cond(some, lambda: next(iterator), lambda: tf.constant(0, tf.int64))  # type: ignore[call-overload]


def _read_in_loop(iterator: object) -> tf.Tensor:
    def add(number: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return number + 1, total + next(iterator)  # type: ignore[call-overload]

    return tf.while_loop(lambda number, total: number < 2, add, (0, tf.constant(0, tf.int64)))[1]


@pytest.mark.parametrize(
    ("take", "total"), [(_read_in_function, 3.0), (_read_in_branch, 3.0), (_read_in_loop, 15.0)]
)
def test_a_step_may_take_its_batches_in_a_graph_of_its_own(
    take: Callable[[object], tf.Tensor], total: float
) -> None:
    class TakingCounter(Counter):
        def step(self, iterator: object) -> dict[str, tf.Tensor]:
            self.total.assign_add(tf.cast(take(iterator), tf.float32))
            return {}

    counter = TakingCounter()

    train = TrainLoop(counter, counter.stop)

    assert train(iter(tf.data.Dataset.range(9)), tf.constant(3)) == (3, {"total": total})


def test_a_batch_may_have_parts_that_are_none() -> None:
    class FirstPartCounter(Counter):
        def step(self, iterator: object) -> dict[str, tf.Tensor]:
            return super().step(iter([next(iterator)[0]]))  # type: ignore[call-overload]

    counter = FirstPartCounter()

    train = TrainLoop(counter, counter.stop)

    assert train(iter(tf.data.Dataset.range(4).map(lambda x: (x, None))), tf.constant(3)) == (
        3,
        {"total": 3.0},
    )
    assert train.wait_seconds is not None
    assert train.wait_seconds > 0


def test_error_of_an_eval_step_with_two_elements_names_the_flag() -> None:
    iterator = SingleElementIterator(tf.constant(1))
    next(iterator)

    with pytest.raises(ValueError, match="eval_tf_function=false"):
        next(iterator)


def test_results_keep_their_nesting_types_and_shapes() -> None:
    source = {
        "b": tf.constant(3),
        "a": {"c": tf.constant(0.5), "d": tf.constant([[1, 2]])},
        "e": tf.constant("text"),
    }
    read = Readback(lambda: source, tf.function)()

    assert read["b"] == 3
    assert read["b"].dtype == np.int32
    assert read["a"]["c"].dtype == np.float32
    np.testing.assert_array_equal(read["a"]["d"], [[1, 2]])
    assert read["e"] == b"text"
