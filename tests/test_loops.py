"""The inner loops, with steps that count."""

import numpy as np
import pytest
import tensorflow as tf

from tests.counting_step import Counter, batches
from trainer_kit.loops import OneElement, Readback, TrainLoop


@pytest.mark.parametrize(("function", "loop"), [(True, True), (True, False), (False, False)])
def test_every_way_of_running_the_train_loop_gives_the_same(function: bool, loop: bool) -> None:
    counter = Counter()
    train = TrainLoop(
        counter.begin, counter.step, counter.results, counter.stop, use_tf_function=function, use_tf_while_loop=loop
    )
    iterator = iter(batches())
    assert train(iterator, tf.constant(2)) == (2, {"total": 15.0})
    assert train(iterator, tf.constant(1)) == (1, {"total": 21.0})  # reset at the start of a loop


def test_a_stop_ends_the_train_loop_before_its_next_step() -> None:
    counter = Counter()

    def step(iterator: object) -> None:
        counter.step(iterator)
        counter.stop.assign(counter.total > 3.0)

    train = TrainLoop(counter.begin, step, counter.results, counter.stop)
    assert train(iter(batches()), tf.constant(4)) == (2, {"total": 15.0})
    assert train(iter(batches()), tf.constant(4)) == (0, {"total": 0.0})


def test_the_end_of_the_data_is_an_exception_and_keeps_what_was_done() -> None:
    counter = Counter()
    train = TrainLoop(counter.begin, counter.step, counter.results, counter.stop)
    with pytest.raises(tf.errors.OutOfRangeError):
        train(iter(batches()), tf.constant(9))
    assert train.results() == {"total": 45.0}


def test_an_evaluation_step_that_takes_two_elements_is_told_what_to_set() -> None:
    iterator = OneElement(tf.constant(1))
    next(iterator)
    with pytest.raises(ValueError, match="eval_tf_function=false"):
        next(iterator)


def test_results_keep_their_nesting_types_and_shapes() -> None:
    source = {"b": tf.constant(3), "a": {"c": tf.constant(0.5), "d": tf.constant([[1, 2]])}, "e": tf.constant("text")}
    read = Readback(lambda: source, tf.function)()
    assert read["b"] == 3
    assert read["b"].dtype == np.int32
    assert read["a"]["c"].dtype == np.float32
    np.testing.assert_array_equal(read["a"]["d"], [[1, 2]])
    assert read["e"] == b"text"
