"""Runs that draw random numbers, of every kind that a checkpoint has to bring back; to be started
in processes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import tf_keras

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoints.state.train_state import TrainState

STEPS = 6
REPLICAS = (1, 2)


class Noise(keras.layers.Layer):  # type: ignore[misc]
    """Adds what `draw` draws."""

    def __init__(self, draw: Callable[[], Any], **state: Any) -> None:
        super().__init__()
        self.draw = draw
        for name, value in state.items():
            setattr(self, name, value)

    def call(self, inputs: Any) -> Any:
        return inputs + self.draw()


class Module(tf.Module):  # type: ignore[misc]
    """A model that TensorFlow tracks by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = tf.random.Generator.from_seed(4)

    def __call__(self, inputs: Any, training: bool = True) -> Any:
        return inputs + self.generator.normal([3]) if training else inputs


class Task:
    """Any object; `draw` is called beside the model."""

    def __init__(self, draw: Callable[[], Any] = lambda: tf.zeros([3]), **state: Any) -> None:
        self.draw = draw
        self.words = ["no", "state"]
        self.numbers = (1, 2)
        for name, value in state.items():
            setattr(self, name, value)


def _counter_and_draw() -> tuple[tf.Variable, Callable[[], Any]]:
    counter = tf.Variable(0, dtype=tf.int32)

    def draw() -> Any:
        return tf.random.stateless_normal([3], [1, counter.assign_add(1)])

    return counter, draw


def _sequential(layer: Any) -> Any:
    return keras.Sequential([keras.Input((3,)), layer])


def _layer_generator() -> tuple[Any, Any]:
    generator = tf.random.Generator.from_seed(3)
    return _sequential(Noise(lambda: generator.normal([3]), generator=generator)), Task()


def _layers_below_layers() -> tuple[Any, Any]:
    generator = tf.random.Generator.from_seed(3)
    inner = Noise(lambda: generator.normal([3]), generators={"deep": [generator]})
    return _sequential(Noise(lambda: inner(tf.zeros([3])), inner=[inner])), Task()


def _layer_variable() -> tuple[Any, Any]:
    counter, draw = _counter_and_draw()
    return _sequential(Noise(draw, counter=counter)), Task()


def _task_generator() -> tuple[Any, Any]:
    generator = tf.random.Generator.from_seed(3)
    return _sequential(keras.layers.Dropout(0.5)), Task(
        lambda: generator.normal([3]), generator=generator
    )


def _task_variable() -> tuple[Any, Any]:
    counter, draw = _counter_and_draw()
    return _sequential(keras.layers.Dropout(0.5)), Task(draw, counter=counter)


def _task_seed_generator() -> tuple[Any, Any]:
    seeds = keras.random.SeedGenerator(3)
    return _sequential(keras.layers.Dropout(0.5)), Task(
        lambda: keras.random.normal([3], seed=seeds), seeds={"a": seeds}
    )


def _task_layer() -> tuple[Any, Any]:
    augment = _sequential(keras.layers.GaussianNoise(1.0))
    return _sequential(keras.layers.Dropout(0.5)), Task(
        lambda: augment(tf.zeros([3, 3]), training=True)[0], all=[augment]
    )


def _task_module() -> tuple[Any, Any]:
    augment = Module()
    return _sequential(keras.layers.Dropout(0.5)), Task(
        lambda: augment(tf.zeros([3])), augment=augment
    )


def _keras_two() -> tuple[Any, Any]:
    tf_keras.backend.experimental.enable_tf_random_generator()
    try:
        model = tf_keras.Sequential(
            [tf_keras.layers.Dropout(0.5, seed=1), tf_keras.layers.GaussianNoise(1.0)]
        )
        model(tf.ones([1, 3]), training=True)  # makes the generators
    finally:
        tf_keras.backend.experimental.disable_tf_random_generator()
    return model, Task()


KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a seed generator of a Keras 3 layer": lambda: (_sequential(keras.layers.Dropout(0.5)), Task()),
    "a generator of a Keras 3 layer": _layer_generator,
    "a generator in a list of a layer of a layer": _layers_below_layers,
    "a variable of a Keras 3 layer": _layer_variable,
    "Keras' global seed generator": lambda: (
        _sequential(Noise(lambda: keras.random.normal([3]))),
        Task(),
    ),
    "TensorFlow's global generator": lambda: (
        _sequential(Noise(lambda: tf.random.get_global_generator().normal([3]))),
        Task(),
    ),
    "a generator of a task": _task_generator,
    "a variable of a task": _task_variable,
    "a seed generator of a task": _task_seed_generator,
    "an augmenting layer of a task": _task_layer,
    "a module of a task": _task_module,
    "a generator of a tf.Module": lambda: (Module(), Task()),
    "generators of tf_keras layers": _keras_two,
}
# Not Keras' global seed generator, which is kept by thread: in a replica's thread TensorFlow lets
# none be made.
ON_REPLICAS = (
    "a seed generator of a Keras 3 layer",
    "a generator of a Keras 3 layer",
    "TensorFlow's global generator",
    "a variable of a task",
    "generators of tf_keras layers",
)


def select_kinds(replicas: int) -> list[str]:
    """Those to draw on so many replicas."""
    return [*KINDS] if replicas == 1 else [*ON_REPLICAS]


def draw_all(folder: str) -> None:
    """Draws the numbers of all steps, and saves a checkpoint in the middle."""
    _draw_on_replicas(folder, 0)


def draw_second_half(folder: str) -> None:
    """Draws the second half, from the checkpoint in the middle."""
    _draw_on_replicas(folder, STEPS // 2)


def _draw_on_replicas(folder: str, begin: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * max(REPLICAS)
    )
    for replicas in REPLICAS:
        draw(f"{folder}/{replicas}", begin, replicas)


def draw(folder: str, begin: int, replicas: int) -> None:
    """Draws the numbers of the steps after `begin`, and writes them to `<kind>/<begin>.json`.

    It goes on from the checkpoint of `begin`, and from the start saves the last step of the first
    half. A run that goes on has other seeds, as a process has that was started anew.
    """
    for kind in select_kinds(replicas):
        strategy = tf.distribute.get_strategy()
        scope: Any = contextlib.nullcontext()
        if replicas > 1:
            devices = [f"CPU:{number}" for number in range(replicas)]
            strategy = tf.distribute.MirroredStrategy(devices)
            scope = strategy.scope()

        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7 + begin)
        with scope:
            tf.random.set_global_generator(tf.random.Generator.from_seed(7 + begin))
            numbers = _draw_kind(KINDS[kind], f"{folder}/{kind}", begin, strategy)
        Path(f"{folder}/{kind}/{begin}.json").write_text(json.dumps(numbers))


def _draw_kind(
    build: Callable[[], tuple[Any, Any]], folder: str, begin: int, strategy: Any
) -> list[Any]:
    model, task = build()
    optimizer = keras.optimizers.SGD()
    optimizer.build(list(model.trainable_variables))
    step = tf.Variable(0, dtype=tf.int64)
    state = TrainState(step, model, optimizer, None, task, seed=begin)
    trainer = SavedTrainer(state.checkpoint, step, before_save=lambda _: state.python_state.store())
    manager = manager_of(trainer, folder, max_to_keep=STEPS)
    path = manager.restore_or_initialize()
    state.after_restore(path)
    assert int(step.numpy()) == begin
    Path(folder).mkdir(parents=True, exist_ok=True)

    def run_step() -> Any:
        return strategy.run(lambda: model(tf.ones([1, 3]), training=True) + task.draw())

    if strategy.num_replicas_in_sync > 1:  # elsewhere eager steps work, and are quicker
        run_step = tf.function(run_step)
    numbers = []
    for number in range(begin + 1, STEPS + 1):
        values = strategy.experimental_local_results(run_step())
        numbers.append([value.numpy().tobytes().hex() for value in values])
        step.assign(number)
        if not begin and number == STEPS // 2:
            manager.save(number)
    manager.sync()
    return numbers
