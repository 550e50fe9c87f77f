"""The private names of TensorFlow: they exist, and mean what they meant."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.eager import context

from tests.builders import replicas
from trainer_kit.inputs.op_definitions import find_op_definition
from trainer_kit.inputs.stateful_ops import find_unsaved_state, iterate_nodes
from trainer_kit.runtime import tensorflow_internals as internals

D = tf.data.Dataset


def test_without_a_global_seed_no_seeds_are_restarted() -> None:
    tf.random.set_seed(3)
    tf.random.set_seed(None)
    generator = context.context().__dict__.pop("_rng", None)  # as if no seed had been set yet

    with internals.restart_operation_seeds():
        assert tf.compat.v1.get_seed(None) == (None, None)

    context.context()._rng = generator


def test_a_global_seed_is_seen_while_it_is_set() -> None:
    tf.random.set_seed(None)

    assert not internals.has_global_seed()

    tf.random.set_seed(3)

    assert internals.has_global_seed()


# ---- AutoGraph


def _positive(x: Any) -> Any:
    if x > 0:  # in a graph only after a conversion
        return tf.constant("yes")
    return tf.constant("no")


def test_outside_of_autograph_layers_alone_are_converted() -> None:
    class Positive(tf_keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return _positive(x)

    layer = Positive()

    @tf.autograph.experimental.do_not_convert
    def run(function: Any, x: Any) -> Any:
        return internals.convert_with_autograph(function, convert_own_code=False)(x)

    traced = tf.function(run)

    assert traced(lambda x: layer(x), tf.constant(1)) == b"yes"

    with pytest.raises(TypeError, match="AutoGraph"):
        traced(_positive, tf.constant(1))


# ---- asynchronous saves


def _save(path: Path, callback: Any = None) -> tf.train.Checkpoint:
    checkpoint = tf.train.Checkpoint(variable=tf.Variable(1.0))
    callbacks = [callback] if callback else None
    options = tf.train.CheckpointOptions(enable_async=True, experimental_write_callbacks=callbacks)
    checkpoint.write(str(path / "ckpt-1"), options)
    checkpoint.sync()
    return checkpoint


def test_a_failed_save_is_reported_once_and_a_later_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError(f"no room for {path}")

    checkpoint = _save(tmp_path, fail)

    assert "no room for" in str(internals.stop_async_saver(checkpoint))
    assert not caplog.records
    assert not logging.getLogger("absl").disabled
    assert internals.stop_async_saver(checkpoint) is None

    checkpoint.write(str(tmp_path / "ckpt-2"), tf.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()

    assert (tmp_path / "ckpt-2.index").exists()
    assert internals.stop_async_saver(checkpoint) is None


def test_the_next_save_restarts_the_thread_of_saves(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile
    checkpoint = _save(tmp_path)
    (thread,) = set(threading.enumerate()) - before

    internals.stop_async_saver(checkpoint)

    assert not thread.is_alive()

    checkpoint.write(str(tmp_path / "ckpt-2"), tf.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()

    assert (tmp_path / "ckpt-2.index").exists()

    (thread,) = set(threading.enumerate()) - before

    internals.stop_async_saver(checkpoint)

    assert not thread.is_alive()


# ---- random operations

SAMPLES = 100_000
# By name: a draw of SAMPLES numbers, their mean and their variance.
DRAWS: dict[str, tuple[Any, float, float]] = {
    "normal": (lambda: tf.random.normal([SAMPLES]), 0.0, 1.0),
    "normal of half precision": (lambda: tf.random.normal([SAMPLES], dtype=tf.float16), 0.0, 1.0),
    "uniform": (lambda: tf.random.uniform([SAMPLES]), 0.5, 1 / 12),
    "uniform integers": (lambda: tf.random.uniform([SAMPLES], 0, 10, tf.int64), 4.5, 8.25),
    "truncated normal": (lambda: tf.random.truncated_normal([SAMPLES]), 0.0, 0.7737),
    "categorical": (lambda: tf.random.categorical([[0.0, 0.0]], SAMPLES, tf.int32), 0.5, 0.25),
    "gamma": (lambda: tf.random.gamma([SAMPLES // 2], [2.0, 2.0], beta=2.0), 1.0, 0.5),
    "poisson": (lambda: tf.random.poisson([SAMPLES], 3.0), 3.0, 3.0),
    "shuffle": (lambda: tf.random.shuffle(tf.range(SAMPLES) % 10), 4.5, 8.25),
    "dropout": (lambda: tf.nn.dropout(tf.ones([SAMPLES]), 0.5), 1.0, 1.0),
    "random crop": (lambda: tf.image.random_crop(tf.range(2 * SAMPLES) % 10, [SAMPLES]), 4.5, 8.25),
}


def _build_drawing_function(draw: Any, generator: tf.random.Generator) -> Any:
    """Returns `draw` as a tf.function whose random operations use the generator."""

    @tf.function(autograph=False)
    def function() -> Any:
        with internals.stateless_random_operations(generator):
            return draw()

    return function


def _find_hidden_states(function: Any) -> set[str]:
    graph = function.get_concrete_function().graph.as_graph_def()
    return {
        node.op
        for node in iterate_nodes(graph)
        if find_unsaved_state(node.op, find_op_definition(node.op))
    }


@pytest.mark.parametrize("name", DRAWS)
def test_a_random_operation_draws_from_the_generator(name: str) -> None:
    draw, mean, variance = DRAWS[name]
    generator = tf.random.Generator.from_seed(3)
    drawing = _build_drawing_function(draw, generator)
    stateful = tf.function(draw)

    first = drawing().numpy().astype(np.float64)

    assert first.mean() == pytest.approx(mean, abs=0.03)
    assert first.var() == pytest.approx(variance, rel=0.03)
    assert not _find_hidden_states(drawing)
    assert _find_hidden_states(stateful)

    concrete = drawing.get_concrete_function()
    expected = stateful.get_concrete_function()

    assert concrete.output_shapes == expected.output_shapes
    assert concrete.output_dtypes == expected.output_dtypes

    second = drawing().numpy()
    generator.reset_from_seed(3)

    np.testing.assert_array_equal(drawing().numpy(), first)
    np.testing.assert_array_equal(drawing().numpy(), second)
    assert not np.array_equal(first, second)


def test_operations_with_the_same_seed_draw_the_same_numbers() -> None:
    numbers = tf.range(20)
    drawing = _build_drawing_function(
        lambda: [tf.random.shuffle(numbers, seed) for seed in (5, 5, None, None)],
        tf.random.Generator.from_seed(3),
    )
    for _ in range(2):
        first, again, other, another = (order.numpy().tolist() for order in drawing())
        assert first == again
        assert len({tuple(order) for order in (first, other, another)}) == 3


def test_operations_in_branches_and_loops_are_replaced() -> None:
    dropout = tf.function(lambda x: tf.nn.dropout(x, 0.5), jit_compile=True)
    before = tf.function(lambda x: x + tf.random.normal([3]))
    before(tf.ones([3]))  # its trace has an operation with a hidden state

    def draw() -> Any:
        x = tf.ones([3])
        branch = tf.cond(x[0] > 0, lambda: tf.random.normal([3]), lambda: tf.random.uniform([3]))
        loop = tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, y + tf.random.normal([3])), (0, x)
        )[1]
        return tf.stack([branch, loop, dropout(x), before(x)])

    generator = tf.random.Generator.from_seed(3)
    drawing = _build_drawing_function(draw, generator)

    first = drawing().numpy()

    assert _find_hidden_states(drawing) == set()

    generator.reset_from_seed(3)

    np.testing.assert_array_equal(drawing().numpy(), first)


def test_gradients_flow_through_random_operations() -> None:
    def gradients() -> Any:
        rate = tf.constant([2.0, 3.0])
        kept = tf.ones([8])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([rate, kept])
            mean = tf.reduce_mean(tf.random.gamma([SAMPLES], rate), axis=0)
            dropped = tf.nn.dropout(kept, 0.5)

        return tape.gradient(mean, rate), tape.gradient(dropped, kept), dropped

    of_rate, of_kept, dropped = _build_drawing_function(
        gradients, tf.random.Generator.from_seed(3)
    )()

    # The mean of a gamma distribution is its rate.
    np.testing.assert_allclose(of_rate, [1.0, 1.0], atol=0.02)
    np.testing.assert_array_equal(of_kept, dropped)


def test_each_replica_draws_other_numbers() -> None:
    strategy = replicas(2)
    with strategy.scope():
        generator = tf.random.Generator.from_seed(3)

    @tf.autograph.experimental.do_not_convert
    def draw() -> Any:
        return strategy.run(
            lambda: tf.stack([tf.random.normal([2]), tf.random.normal([2], seed=1)])
        )

    first, second = strategy.experimental_local_results(_build_drawing_function(draw, generator)())

    assert not (first.numpy() == second.numpy()).any()


def test_random_operations_elsewhere_keep_their_state() -> None:
    generator = tf.random.Generator.from_seed(3)
    normal = tf.function(lambda: tf.random.normal([2]))

    # Traced here with the generator, and again outside.
    _build_drawing_function(normal, generator)()

    assert _find_hidden_states(normal) == {"RandomStandardNormal"}

    before = generator.state.numpy()

    with internals.stateless_random_operations(generator):
        tf.random.normal([2])  # in eager mode

    np.testing.assert_array_equal(generator.state.numpy(), before)

    with replicas(2).scope():
        across_replicas = _build_drawing_function(lambda: tf.random.normal([2]), generator)
        assert _find_hidden_states(across_replicas) == {"RandomStandardNormal"}


# ---- summaries


def test_a_summary_context_may_end_after_one_of_the_engine(tmp_path: Path) -> None:
    state = internals.SummaryState()
    own = tf.summary.create_file_writer(str(tmp_path / "own"))
    engine = tf.summary.create_file_writer(str(tmp_path / "engine"))
    lasting = own.as_default(5)
    with state.activate():
        lasting.__enter__()

    with engine.as_default(7):
        assert tf.summary.experimental.get_step() == 7
        with state.activate():
            assert tf.summary.experimental.get_step() == 5
            assert tf.summary.scalar("a", 1.0)
            lasting.__exit__(None, None, None)
            assert not tf.summary.scalar("b", 1.0)
        assert tf.summary.experimental.get_step() == 7
