"""Everything that a run is made of, saved and brought back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.state.train_state import TrainState, list_optimizer_variables
from trainer_kit.checkpoints.state.variable_names import canonical_paths


class _Average:
    """Copies of the weights, as the moving average keeps them; counts how often it began anew."""

    section = "average"
    more_variables = MappingProxyType[str, Any]({})

    def __init__(self, model: Any) -> None:
        variables = model.trainable_variables
        keys = canonical_paths([variable.path for variable in variables])
        self.variables = {
            key: tf.Variable(variable.value) for key, variable in zip(keys, variables, strict=True)
        }
        self.resets = 0

    def initialize(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.resets += 1


class _Task:
    def __init__(self) -> None:
        self.seen = tf.Variable(0)
        self.later: tf.Variable | None = None


class _Module(tf.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.ones([3, 2]))
        self.generator = tf.random.Generator.from_seed(1)


def _build_keras() -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])


def _build_tf_keras() -> Any:
    return tf_keras.Sequential(
        [tf_keras.layers.Dense(2, input_shape=(3,)), tf_keras.layers.BatchNormalization()]
    )


MODELS: dict[str, Callable[[], Any]] = {
    "Keras 3": _build_keras,
    "tf_keras": _build_tf_keras,
    "tf.Module": _Module,
}


class _Run:
    def __init__(
        self, make: Callable[[], Any] = _build_keras, average: bool = True, trains: bool = True
    ) -> None:
        self.step = tf.Variable(0, dtype=tf.int64)
        self.model = make()
        self.task = _Task()
        self.optimizer = keras.optimizers.Adam()
        self.optimizer.build(list(self.model.trainable_variables))
        self.average = _Average(self.model) if average and make is _build_keras else None
        self.note: Any = "fresh"
        optimizer = self.optimizer if trains else None
        self.state = TrainState(self.step, self.model, optimizer, self.average, self.task, seed=3)
        self.state.python_state.add("note", lambda: self.note, self._put)

    def _put(self, note: Any) -> None:
        self.note = note

    def go_on(self, number: int) -> None:
        """Gives every variable another value."""
        average = self.average.variables.values() if self.average else ()
        for variable in (
            *self.model.variables,
            *self.optimizer.variables,
            self.step,
            self.task.seen,
            *average,
        ):
            values = np.full(variable.shape, number)
            variable.assign(tf.cast(values, variable.dtype))
        self.note = {"step": number}

    def values(self) -> list[Any]:
        average = list(self.average.variables.values()) if self.average else []
        variables = [
            *self.model.variables,
            *self.optimizer.variables,
            self.step,
            self.task.seen,
            *average,
        ]
        return [variable.numpy().tolist() for variable in variables]

    def save(self, folder: Path, *numbers: int) -> str:
        trainer = SavedTrainer(
            self.state.checkpoint, self.step, before_save=lambda _: self.state.python_state.store()
        )
        manager = manager_of(trainer, folder, max_to_keep=9)
        for number in numbers:
            self.go_on(number)
            manager.save(number)
        manager.sync()
        return f"{folder}/ckpt-{numbers[-1]}"

    def restore(self, path: str, strict: bool = True) -> None:
        restore(self.state.checkpoint, path, strict=strict)
        self.state.after_restore(path)


@pytest.mark.parametrize("kind", MODELS)
def test_all_comes_back_from_any_of_several_asynchronous_saves(tmp_path: Path, kind: str) -> None:
    run = _Run(MODELS[kind])
    run.save(tmp_path, 1, 2, 3)
    for number in (2, 3):
        run.go_on(number)
        again = _Run(MODELS[kind])
        again.restore(f"{tmp_path}/ckpt-{number}")
        assert again.values() == run.values()
        assert again.note == {"step": number}
        assert again.average is None or again.average.resets == 0


def test_a_save_that_failed_is_named_when_state_is_added(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> None:
        raise OSError(f"no room for {path}")

    run = _Run()
    options = tf.train.CheckpointOptions(enable_async=True, experimental_write_callbacks=[fail])
    run.state.checkpoint.write(str(tmp_path / "ckpt-1"), options)
    run.state.checkpoint.sync()

    run.task.later = tf.Variable(1.0)
    run.state.track_attributes([])

    assert "a checkpoint was not written: no room for" in caplog.text


def test_the_parts_are_named_and_nothing_is_saved_twice(tmp_path: Path) -> None:
    shapes = CheckpointGraph(_Run().save(tmp_path, 1)).shapes_by_name()

    assert set(shapes) == {
        "global_step",
        "run_state",
        "model/sequential/dense/kernel",
        "model/sequential/dense/bias",
        "model/seed_generator/seed_generator_state",
        *(f"optimizer/adam/{name}" for name in ("iteration", "learning_rate")),
        *(
            f"optimizer/adam/sequential/dense/{leaf}/{slot}"
            for leaf in ("kernel", "bias")
            for slot in ("momentum", "velocity")
        ),
        *(f"average/sequential/dense/{leaf}" for leaf in ("kernel", "bias")),
        "random/keras",
        "random/tensorflow",
        "task/seen",
    }


def test_what_a_checkpoint_lacks_starts_anew(tmp_path: Path) -> None:
    path = _Run(average=False).save(tmp_path, 1)
    run = _Run()

    run.restore(path)

    assert run.average is not None
    assert run.average.resets == 1
    assert run.note == {"step": 1}

    bare = tf.train.Checkpoint(
        **{
            name: getattr(run.state.checkpoint, name)
            for name in ("global_step", "model", "optimizer")
        }
    )

    run.restore(bare.save(str(tmp_path / "bare" / "ckpt")))

    assert run.note is None
    assert run.average.resets == 2


def test_best_weights_hold_model_step_and_task_state(tmp_path: Path) -> None:
    path = _Run().state.weights_checkpoint.write(str(tmp_path / "best"))

    assert {name.split("/")[0] for name in CheckpointGraph(path).shapes_by_name()} == {
        "global_step",
        "model",
        "task",
    }

    reader = _Run(trains=False, average=False)
    reader.restore(path, strict=False)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite_makes_the_state_unsound(kind: str, value: float) -> None:
    run = _Run(MODELS[kind])

    assert run.state.all_finite()

    variable = next(v for v in run.model.variables if len(v.shape) == 2)

    variable.assign(tf.tensor_scatter_nd_update(tf.ones(variable.shape), [[1, 1]], [value]))

    assert not run.state.all_finite()

    variable.assign(tf.ones(variable.shape))

    assert run.state.all_finite()


def test_infinities_do_not_cancel_and_integers_do_not_count() -> None:
    run = _Run()
    kernel = run.model.layers[0].kernel

    kernel.assign(tf.constant([[float("inf"), float("-inf")], [0.0, 0.0], [0.0, 0.0]]))

    assert not run.state.all_finite()

    step = tf.Variable(0, dtype=tf.int64)
    model = tf.Module()
    model.count = tf.Variable(2**40, dtype=tf.int64)

    assert TrainState(step, model, None, None, _Task(), seed=0).all_finite()


def test_every_variable_of_any_shape_and_type_is_checked() -> None:
    model = tf.Module()
    shapes = [(3,), (3,), (), (2**13,), (2**13,)]
    model.weights = [
        tf.Variable(tf.ones(shape, dtype))
        for dtype in (tf.float32, tf.bfloat16)
        for shape in shapes
    ]

    state = TrainState(tf.Variable(0, dtype=tf.int64), model, None, None, _Task(), seed=0)

    assert state.all_finite()

    for variable in model.weights:
        variable.assign(variable * float("nan"))
        assert not state.all_finite()
        variable.assign(tf.ones_like(variable))

    assert state.all_finite()


def test_replicas_save_and_restore_the_same(tmp_path: Path) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        run = _Run()
        path = run.save(tmp_path, 1, 2)

    with strategy.scope():
        again = _Run()
        again.restore(path)

    assert again.values() == run.values()
    assert again.note == {"step": 2}
    assert run.state.all_finite()

    alone = _Run()

    alone.restore(path)

    assert alone.values() == run.values()


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_evaluated_comes_back_and_nothing_else_changes(tmp_path: Path, kind: str) -> None:
    run = _Run(MODELS[kind])
    run.save(tmp_path, 1, 2)
    wanted = _restore_weights(run, 1)
    run.go_on(2)
    others = [variable.numpy().tolist() for variable in run.optimizer.variables]

    run.state.restore_weights(f"{tmp_path}/ckpt-1")

    assert _read_weights(run) == wanted
    assert [variable.numpy().tolist() for variable in run.optimizer.variables] == others
    assert int(run.task.seen) == 1
    assert run.note == {"step": 2}

    run.state.restore_weights(f"{tmp_path}/ckpt-2")

    assert _read_weights(run) == _restore_weights(run, 2)


def _read_weights(run: _Run) -> list[Any]:
    average = list(run.average.variables.values()) if run.average else []
    return [variable.numpy().tolist() for variable in (*run.model.variables, run.step, *average)]


def _restore_weights(run: _Run, number: int) -> list[Any]:
    run.go_on(number)
    return _read_weights(run)


class _OptimizersAverage(_Average):
    """Averages that are the optimizer's own."""

    section = "optimizer"

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begins = 0
        self.variables = _Kept(model)

    def initialize(self) -> None:
        self.begins += 1


class _Kept(tf.Module):  # type: ignore[misc]
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.averages = [tf.Variable(v.value) for v in model.trainable_variables]


def _create_averaging_run() -> tuple[Any, _OptimizersAverage, TrainState]:
    model = _build_keras()
    average = _OptimizersAverage(model)
    step = tf.Variable(0, dtype=tf.int64)
    return model, average, TrainState(step, model, None, average, _Task(), seed=3)


def test_an_optimizers_average_is_saved_and_evaluated(tmp_path: Path) -> None:
    _, average, state = _create_averaging_run()

    for variable in average.variables.averages:
        variable.assign(tf.fill(variable.shape, 4.0))
    path = state.checkpoint.write(str(tmp_path / "ckpt-1"))

    assert {name.split("/")[0] for name in CheckpointGraph(path).shapes_by_name()} == {
        "global_step",
        "model",
        "optimizer",
    }

    _, average, state = _create_averaging_run()

    state.restore_weights(path)

    assert average.resets == 0
    assert all((variable.numpy() == 4.0).all() for variable in average.variables.averages)

    state.after_restore(path)

    assert average.resets == 0
    assert average.begins == 0

    state.after_restore(None)

    assert average.resets == 0
    assert average.begins == 1


def test_without_an_optimizers_average_the_weights_are_used(tmp_path: Path) -> None:
    _, _, state = _create_averaging_run()
    path = state.weights_checkpoint.write(str(tmp_path / "ckpt-1"))

    assert not any(name.startswith("optimizer") for name in CheckpointGraph(path).shapes_by_name())

    _, average, other = _create_averaging_run()

    other.restore_weights(path)

    assert average.resets == 1
    assert other.all_finite()


@pytest.mark.parametrize("module", [tf_keras.optimizers, tf_keras.optimizers.legacy])
def test_the_slots_of_keras_2_optimizers_are_listed(module: Any) -> None:
    weights = tf.Variable(tf.ones([5]))
    optimizer = module.Adam()
    optimizer.apply_gradients([(tf.ones([5]), weights)])

    shapes = [tuple(variable.shape) for variable in list_optimizer_variables({"a": optimizer})]

    # Adam has two slots.
    assert shapes.count((5,)) == 2
