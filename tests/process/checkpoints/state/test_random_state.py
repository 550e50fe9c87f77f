"""Random numbers after a restart: those that would have come without it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.fork_server import ForkServer
from tests.process.checkpoints.random_runs import (
    REPLICAS,
    STEPS,
    draw_all,
    draw_second_half,
    select_kinds,
)
from trainer_kit.checkpoints.state.random_state import (
    prepare_process_generators,
    task_state,
    untracked_model_state,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders of runs whose second half was drawn again by another process, for each number of
    replicas.
    """
    base = tmp_path_factory.mktemp("drawn")
    with ForkServer(["tests.process.checkpoints.random_runs"]) as server:
        for function in (draw_all, draw_second_half):
            end = server.run(function, str(base))
            assert end.code == 0, end.text[-1500:]
        yield base


@pytest.mark.parametrize(
    ("replicas", "kind"), [(number, kind) for number in REPLICAS for kind in select_kinds(number)]
)
def test_a_resumed_process_draws_the_same_random_numbers(
    folder: Path, kind: str, replicas: int
) -> None:
    runs = folder / str(replicas) / kind
    straight = json.loads((runs / "0.json").read_text())
    resumed = json.loads((runs / f"{STEPS // 2}.json").read_text())

    assert len(straight) == STEPS
    assert resumed == straight[STEPS // 2 :]
    assert len({json.dumps(step) for step in straight}) > STEPS // 2  # they are random at all


def test_process_generators_use_the_seed_unless_they_exist() -> None:
    generator = tf.random.Generator.from_seed(1)
    tf.random.set_global_generator(generator)

    states = prepare_process_generators(5)

    assert sorted(states) == ["keras", "tensorflow"]
    assert states["tensorflow"] is generator.state
    assert prepare_process_generators(6)["keras"] is states["keras"]


def test_a_missing_tensorflow_generator_is_made_from_the_seed() -> None:
    expected = tf.random.Generator.from_seed(tf.compat.v1.get_seed(5)).state.numpy().tolist()
    for _ in range(2):
        tf.random.set_global_generator(None)
        assert prepare_process_generators(5)["tensorflow"].numpy().tolist() == expected


def test_a_run_replaces_generators_left_on_other_replicas() -> None:
    def create_strategy() -> tf.distribute.Strategy:
        return tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
        )

    keras.utils.set_random_seed(1)
    python_state = random.getstate()
    tf.random.set_global_generator(None)

    for strategy in (create_strategy(), create_strategy(), tf.distribute.get_strategy()):
        with strategy.scope():
            states = prepare_process_generators(5)
        assert len(states) == 2
        assert all(map(strategy.extended.variable_created_in_scope, states.values()))
        with strategy.scope():
            assert prepare_process_generators(6) == states

    # The program's next model has the weights that it has without a run.
    assert random.getstate() == python_state


class _Layer(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(1)
        self.counts = [tf.Variable(0), tf.Variable(1)]
        self.again = self.counts[0]
        self.dense = keras.layers.Dense(2)
        self.metric = keras.metrics.Mean()
        self.optimizer_of_its_own = keras.optimizers.Adam()


def test_unlisted_state_of_a_keras_three_model_is_found_by_path() -> None:
    layer = _Layer()
    layer.dense.build((None, 3))
    layer.optimizer_of_its_own.build(layer.dense.trainable_variables)
    model = keras.Sequential([layer])

    state = untracked_model_state(model)

    values: list[Any] = [layer.generator.state, *layer.counts]
    assert sorted(map(id, state.values())) == sorted(map(id, values))
    assert all("layers/0/" in path for path in state)
    assert untracked_model_state(layer)["again"] is layer.counts[0]


def test_names_do_not_depend_on_what_the_process_built_before() -> None:
    first = untracked_model_state(keras.Sequential([_Layer(), _Layer()]))
    second = untracked_model_state(keras.Sequential([_Layer(), _Layer()]))

    assert list(first) == list(second)
    assert len(first) == 6


def test_only_hidden_state_of_tracked_models_is_found() -> None:
    module = tf.Module()
    module.weights = [tf.Variable(1.0)]
    module.generator = tf.random.Generator.from_seed(1)

    assert untracked_model_state(module) == {}

    tf_keras.backend.experimental.enable_tf_random_generator()
    try:
        model = tf_keras.Sequential([tf_keras.layers.Dense(2), tf_keras.layers.Dropout(0.5)])
        model(tf.ones([1, 2]))
    finally:
        tf_keras.backend.experimental.disable_tf_random_generator()
    (variable,) = untracked_model_state(model).values()

    assert variable is model.layers[1]._random_generator._generator.state


class _Task:
    def __init__(self, model: Any) -> None:
        self.model = model
        self.models = {"student": model}
        self.teacher = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)]
        )
        self.count = tf.Variable(3)
        self.more = ([tf.Variable(4)], {"deep": tf.Variable(5), 7: tf.Variable(6)})
        self.seeds = keras.random.SeedGenerator(1)
        self.words = ["a"]
        self.config = {"a": 1}
        self.myself = self


def test_task_state_has_variables_and_generators_but_no_weights() -> None:
    model = tf.Module()
    model.weight = tf.Variable(1.0)
    task = _Task(model)

    state = task_state(task, model)

    (dropout,) = (path for path in state if path.startswith("teacher/"))
    assert state.pop(dropout) is task.teacher.layers[1].seed_generator.state.value
    assert state == {
        "count": task.count,
        "more/0/0": task.more[0][0],
        "more/1/deep": task.more[1]["deep"],
        "more/1/7": task.more[1][7],
        "seeds": task.seeds.state.value,
    }
    assert task_state(object()) == {}
    assert task_state(object.__new__(_Task)) == {}
