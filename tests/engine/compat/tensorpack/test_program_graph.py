"""The graph of a program: sessions, variables by name, random operations and functions."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import tensorflow

from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.compat.tensorpack.input_source.input_source import DatasetFlow
from trainer_kit.compat.tensorpack.program_graph import current_program_graph
from trainer_kit.errors import UsageError


def test_a_session_runs_tensors_operations_and_names() -> None:
    x = tf.placeholder(tf.float32, [None], "x")
    total = tf.get_variable("total", [], initializer=tf.zeros_initializer())
    add = tf.assign_add(total, tf.reduce_sum(x, name="sum"))

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        results = session.run({"sum": "sum:0", "op": add.op, "more": [x]}, {x: [1.0, 2.0]})

        assert results == {"sum": 3.0, "op": None, "more": [pytest.approx([1.0, 2.0])]}
        assert session.run(total) == 3.0
        assert total.eval() == 3.0
        assert session.run("total:0") == 3.0


def test_an_operation_runs_in_the_default_session() -> None:
    counter = tf.get_variable("counter", [], tf.int32, tf.zeros_initializer())
    increment = tf.assign_add(counter, 1).op

    with tf.Session().as_default():
        increment.run()
        increment.run()

    assert counter.eval() == 2


def test_variables_have_their_scope_in_their_names() -> None:
    with tf.variable_scope("outer"):
        first = tf.get_variable("weight", [2])
        second = tf.Variable(tf.zeros([3]), name="bias")
        third = tf.Variable(tf.zeros([3]), name="bias")

    names = [first.op.name, second.op.name, third.op.name]

    assert names == ["outer/weight", "outer/bias", "outer/bias_1"]
    assert first.name == "outer/weight:0"
    assert tf.global_variables() == [first, second, third]


def test_initial_values_follow_seed_and_name() -> None:
    values = {}
    for order in (["first", "second"], ["second", "first"]):
        tf.reset_default_graph()
        for name in order:
            variable = tf.get_variable(name, [4])
            values.setdefault(name, []).append(variable.eval())
    tf.reset_default_graph()
    tf.set_random_seed(7)
    other_seed = tf.get_variable("first", [4]).eval()

    assert (values["first"][0] == values["first"][1]).all()
    assert (values["second"][0] == values["second"][1]).all()
    assert (values["first"][0] != values["second"][0]).all()
    assert (values["first"][0] != other_seed).all()


def test_random_operations_follow_the_seed_of_the_call() -> None:
    first = tf.random_normal([3])
    second = tf.random_uniform([3])
    program = current_program_graph()
    session = tf.Session()

    program.next_seed = 5
    draws = session.run([first, second])
    later_draws = session.run([first, second])
    program.next_seed = 5
    same_draws = session.run([first, second])

    assert (draws[0] == same_draws[0]).all()
    assert (draws[1] == same_draws[1]).all()
    assert (draws[0] != later_draws[0]).all()
    assert (draws[0] != draws[1]).all()


def test_each_turn_of_a_loop_draws_other_numbers() -> None:
    def body(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return index + 1, tf.concat([total, tf.random_uniform([1])], 0)

    shapes = [tf.TensorShape([]), tf.TensorShape([None])]
    _, draws = tf.while_loop(
        lambda index, _: index < 3, body, [tf.constant(0), tf.zeros([0])], shapes
    )

    values = tf.Session().run(draws)

    assert len(set(values.tolist())) == 3
    assert any(name.startswith("random_generators/") for name in current_program_graph().variables)


def test_a_dataset_of_the_graph_draws_random_numbers() -> None:
    dataset = tf.data.Dataset.range(3)
    dataset = dataset.map(lambda index: (index, tf.random_normal([])))

    with tensorflow.init_scope():
        elements = list(iter(DatasetFlow(dataset)))

    assert [index for index, _ in elements] == [0, 1, 2]
    assert len({float(noise) for _, noise in elements}) == 3


def test_tensors_are_compared_by_identity() -> None:
    first = tf.constant(1.0)
    second = tf.constant(1.0)

    assert first != second
    assert first == first
    assert {first: "a", second: "b"}[second] == "b"
    with tensorflow.init_scope():
        assert bool(tensorflow.constant(1.0) == tensorflow.constant(1.0))


def test_a_placeholder_without_a_value_is_named() -> None:
    x = tf.placeholder(tf.float32, [2], "image")
    y = x * 2.0

    with pytest.raises(UsageError, match="the placeholder 'image' needs a value"):
        tf.Session().run(y)
    with pytest.raises(ValueError, match=r"Cannot feed value of shape \(3,\) for Tensor image:0"):
        tf.Session().run(y, {x: np.zeros(3)})


def test_an_unknown_name_has_near_names() -> None:
    tf.placeholder(tf.float32, [2], "image")

    with pytest.raises(UsageError, match="no tensor 'imgae:0'; did you mean image"):
        tf.Session().run("imgae:0")


def test_an_inner_graph_has_its_own_variables() -> None:
    tf.get_variable("weight", [1])
    graph = tf.Graph()

    with graph.as_default(), tf.Session() as session:
        inner = tf.get_variable("weight", [2])
        value = session.run(inner)

    assert value.shape == (2,)
    assert [variable.shape.as_list() for variable in tf.global_variables()] == [[1]]


def test_a_thread_runs_the_session_of_the_program() -> None:
    weight = tf.get_variable("weight", [1], initializer=tf.ones_initializer())
    session = tf.Session()
    results = []

    def run() -> None:
        with session.as_default():
            results.append(weight.eval())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert results == [1.0]


def test_reset_default_graph_forgets_variables() -> None:
    tf.get_variable("weight", [1])

    tf.reset_default_graph()

    assert tf.global_variables() == []
    assert tf.get_variable("weight", [2]).shape == [2]


def test_a_saver_writes_and_reads_checkpoints(tmp_path: object) -> None:
    weight = tf.get_variable("weight", [2], initializer=tf.ones_initializer())
    saver = tf.train.Saver()
    session = tf.Session()
    path = saver.save(session, f"{tmp_path}/model", global_step=3)
    weight.load([5.0, 6.0])

    saver.restore(session, path)

    assert weight.eval().tolist() == [1.0, 1.0]
    assert path.endswith("model-3")


def test_the_layers_of_tensorflow_1_update_their_averages() -> None:
    x = tf.placeholder(tf.float32, [None, 2], "x")
    tf.layers.batch_normalization(x, training=True, name="bn", momentum=0.5)
    updates = tf.get_collection(tf.GraphKeys.UPDATE_OPS)

    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(updates, {x: [[2.0, 4.0], [4.0, 8.0]]})
        mean = session.run("bn/moving_mean:0")

    assert mean.tolist() == [1.5, 3.0]


def test_an_initial_value_reads_another_variable() -> None:
    first = tf.get_variable("first", [100], initializer=tf.random_normal_initializer(1.0))
    second = tf.get_variable("second", initializer=tf.reduce_mean(first))
    session = tf.Session()

    session.run(tf.global_variables_initializer())

    assert session.run(second) == pytest.approx(session.run(first).mean(), rel=1e-5)


def test_a_run_of_the_initializers_is_the_only_one() -> None:
    calls = []

    def draw() -> np.ndarray:
        calls.append("call")
        return np.float32(3)

    value = tf.numpy_function(draw, [], tf.float32)
    value.set_shape([])
    variable = tf.get_variable("drawn", initializer=value)
    initialize = tf.global_variables_initializer()

    with tf.Session() as session:
        session.run(initialize)
        first_count = len(calls)
        variable.load(5.0)
        session.run(initialize)

    assert first_count == 1
    assert len(calls) == 2
    assert variable.eval() == 3


def test_an_engine_variable_is_none_of_the_program() -> None:
    program = current_program_graph()
    may_leave = threading.Event()
    is_inside = threading.Event()

    def build() -> None:
        with program.as_default():
            is_inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=build)
    thread.start()
    is_inside.wait(10)
    with program.leave():
        tensorflow.Variable(1.0, name="of_engine")
    may_leave.set()
    thread.join()

    assert not any("of_engine" in name for name in program.variables)
