"""Fused loops: steps that are counted, stopped and left over as those of every other loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import replicas
from tests.engine.training.loops.counting_step import Counter
from trainer_kit.errors import UsageError
from trainer_kit.inputs.fused_batches import stack_batches
from trainer_kit.testing import tiny_experiment
from trainer_kit.training.loops.fused_loop import (
    BatchStack,
    FusedLoop,
    explain_xla_errors,
    find_fusing_problem,
)


def _create_loop(counter: Counter, stack: BatchStack) -> FusedLoop:
    return FusedLoop(counter, counter.stop, stack, 4)


def test_loops_of_any_length_use_each_batch_once_in_order() -> None:
    counter = Counter()
    stack = BatchStack()
    loop = _create_loop(counter, stack)
    iterator = iter(stack_batches(tf.data.Dataset.range(105).batch(5, drop_remainder=True), 4))
    done = [loop(iterator, tf.constant(steps)) for steps in (6, 1, 9, 5)]

    assert [steps for steps, _ in done] == [6, 1, 9, 5]
    assert [results["total"] for _, results in done] == [
        sum(range(30)),
        sum(range(30, 35)),
        sum(range(35, 80)),
        sum(range(80, 105)),
    ]
    assert stack.is_empty

    with pytest.raises(tf.errors.OutOfRangeError):
        loop(iterator, tf.constant(1))


def test_what_a_loop_has_left_belongs_to_its_iterator() -> None:
    counter = Counter()
    stack = BatchStack()
    loop = _create_loop(counter, stack)
    dataset = stack_batches(tf.data.Dataset.range(12).batch(2), 4)
    first = iter(dataset)
    second = iter(dataset)

    loop(first, tf.constant(3))

    assert not stack.is_empty
    assert loop(second, tf.constant(1)) == (1, {"total": 1.0})
    assert stack.next_batch(second).numpy().tolist() == [2, 3]
    assert loop(second, tf.constant(3))[1] == {"total": float(sum(range(4, 10)))}


def test_a_smaller_batch_is_a_step_of_its_own() -> None:
    counter = Counter()
    loop = _create_loop(counter, BatchStack())

    iterator = iter(stack_batches(tf.data.Dataset.range(8).batch(3).repeat(), 4))

    assert loop(iterator, tf.constant(3)) == (3, {"total": 28.0})
    assert loop(iterator, tf.constant(4)) == (4, {"total": 28.0 + 3})


def test_a_stop_ends_a_loop_at_the_end_of_a_program() -> None:
    counter = Counter()
    loop = _create_loop(counter, BatchStack())
    no_prefetch = tf.data.Options()
    no_prefetch.experimental_optimization.inject_prefetch = False

    def stop_with_the_second(count: tf.Tensor, batches: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Sets the stop while the second element is handed out."""
        with tf.control_dependencies([counter.stop.assign(tf.equal(batches[0, 0], 8))]):
            return tf.identity(count), batches

    dataset = stack_batches(tf.data.Dataset.range(40).batch(2), 4).map(stop_with_the_second)
    iterator = iter(dataset.with_options(no_prefetch))

    assert loop(iterator, tf.constant(20))[0] == 8

    counter.stop.assign(False)
    steps, results = loop(iterator, tf.constant(12), reset_metrics=False)

    assert steps == 12
    assert results == {"total": float(sum(range(40)))}


def test_the_waiting_for_batches_is_measured() -> None:
    counter = Counter()
    loop = _create_loop(counter, BatchStack())

    def count_slowly(number: tf.Tensor) -> tf.Tensor:
        time.sleep(0.05)
        return number

    slow = tf.data.Dataset.range(4).map(lambda x: tf.py_function(count_slowly, [x], tf.int64))
    slow = slow.map(lambda x: tf.ensure_shape(x, [])).batch(1)

    loop(iter(stack_batches(slow, 2)), tf.constant(4))

    assert loop.wait_seconds >= 0.1


def test_what_xla_refuses_is_named_with_its_place() -> None:
    class PythonCounter(Counter):
        def step(self, iterator: Any) -> dict[str, tf.Tensor]:
            tf.py_function(lambda: None, [], [])
            return super().step(iterator)

    counter = PythonCounter()
    loop = FusedLoop(counter, counter.stop, BatchStack(), 4)
    iterator = iter(stack_batches(tf.data.Dataset.range(8).batch(2), 4))
    told = r"trainer\.fuse_steps=4: XLA cannot compile .*: it uses tf\.py_function"

    with pytest.raises(UsageError, match=told) as caught, explain_xla_errors(4):
        loop(iterator, tf.constant(4))

    assert ", which XLA does not support; change the step, or" in str(caught.value)
    assert "test_fused_loop.py" in str(caught.value)

    with pytest.raises(tf.errors.OpError), explain_xla_errors(1):
        loop(iterator, tf.constant(4))


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (
            lambda iterator: tf.summary.scalar("own", 1.0, step=0),
            r"it writes a tf\.summary \(.*\); report the value",
        ),
        (next, "takes more than one batch from its iterator"),
    ],
    ids=["a summary", "two batches"],
)
def test_a_traced_step_that_cannot_be_fused_is_refused(
    first: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    class UnfitCounter(Counter):
        def step(self, iterator: Any) -> dict[str, tf.Tensor]:
            first(iterator)
            return super().step(iterator)

    loop = _create_loop(UnfitCounter(), BatchStack())

    with (
        tf.summary.create_file_writer(str(tmp_path)).as_default(),
        pytest.raises(UsageError, match=message),
    ):
        loop(iter(stack_batches(tf.data.Dataset.range(8).batch(2), 4)), tf.constant(4))


def test_a_variable_out_of_reach_of_a_gpu_program_is_named() -> None:
    told = (
        "Trying to access resource seen (defined @ task.py:7) located in device"
        " /job:localhost/device:CPU:0 from device"
    )

    with (
        pytest.raises(UsageError, match=r"it uses the variable seen .* on the CPU.* int64"),
        explain_xla_errors(4),
    ):
        raise tf.errors.InvalidArgumentError(None, None, f"Graph execution error:\n{told} GPU:0")


@pytest.mark.parametrize(("count", "problem"), [(1, ""), (2, "there are 2 replicas")])
def test_steps_of_several_replicas_are_not_fused(count: int, problem: str) -> None:
    fusing_problem = find_fusing_problem(
        tiny_experiment(), replicas(count), ready_made_dataset=None, custom_loop_class=""
    )

    assert fusing_problem.startswith(problem)
    assert bool(fusing_problem) == bool(problem)
