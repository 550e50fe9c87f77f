"""Tasks whose training step changes what neither the model's weights nor the optimizer show; run in processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import trainer_kit
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.distribution.seeds import seed_everything
from trainer_kit.testing.tiny_task import CLASSES, FEATURES

STEPS = 8
SCALE = tf.Module()  # reached through the globals of a method only


def _dense(outputs: int = CLASSES) -> Any:
    return keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(outputs)])


class _Scaled(LinearTask):
    """Multiplies the loss by what a variable has come to."""

    scale: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.make()

    def make(self) -> None:
        """Makes the variable."""

    def factor(self) -> Any:
        """Changes the variable and returns its value, a float32 scalar; in graph."""
        raise NotImplementedError

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.scale = self.factor()
        try:
            return super().train_step(inputs, model, optimizer, metrics)
        finally:
            self.scale = None

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss if self.scale is None else loss * self.scale


class ModuleOfTask(_Scaled):
    """A variable of a module in a list of a plain object of the task."""

    def make(self) -> None:
        module = tf.Module()
        module.count = tf.Variable(1.0)
        self.parts = SimpleNamespace(modules={"a": [module]})

    def factor(self) -> Any:
        return self.parts.modules["a"][0].count.assign_add(0.5)


class GlobalModule(_Scaled):
    """A variable that only the globals of a method lead to."""

    def make(self) -> None:
        SCALE.count = tf.Variable(1.0)

    def factor(self) -> Any:
        return SCALE.count.assign_add(0.5)


class SeedOfLambda(LinearTask):
    """A seed generator that the function of a Lambda layer closes over."""

    def build_model(self) -> Any:
        for _ in range(self.task_config.width % 7):
            keras.random.SeedGenerator(1)  # Keras counts them in their names
        seeds = keras.random.SeedGenerator(3)

        def noise(x: Any) -> Any:
            return x + keras.random.normal((CLASSES,), seed=seeds)

        model = _dense()
        return keras.Sequential([keras.Input((FEATURES,)), *model.layers, keras.layers.Lambda(noise)])


class SecondOptimizer(LinearTask):
    """A second optimizer as an attribute of the model, made in the first step."""

    second = "second"

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        features, labels = inputs
        if getattr(model, "second", None) is None:
            model.second = keras.optimizers.Adam(0.05)
            model.second.build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = self.build_losses(labels, model(features, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.second.apply(gradients, model.trainable_variables)
        return {self.loss: loss}


class TwoModels(LinearTask):
    """A second model of the task, trained by an optimizer of the task."""

    def build_model(self) -> Any:
        self.critic, self.critic_optimizer = _dense(1), keras.optimizers.Adam(0.05)
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.fixed = _dense(1)
        return super().build_model()

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        logs = super().train_step(inputs, model, optimizer, metrics)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.critic(inputs[0]) - self.fixed(inputs[0]) - logs["loss"]) ** 2)
        gradients = tape.gradient(loss, self.critic.trainable_variables)
        self.critic_optimizer.apply(gradients, self.critic.trainable_variables)
        return {"loss": loss}

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        logs = super().validation_step(inputs, model, metrics)
        return {"loss": logs["loss"] + tf.reduce_mean(self.critic(inputs[0]))}


class HostWrites(LinearTask):
    """Second models that steps only read: an action writes to two of them, `initialize` to one, nothing to another."""

    def build_model(self) -> Any:
        self.target, self.evaluated, self.teacher, self.fixed = (_dense() for _ in range(4))
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)
        self.learned = _dense()
        return self.learned

    def initialize(self, model: Any) -> None:
        self.teacher.set_weights([0.5 * weight for weight in self.teacher.get_weights()])

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        return loss * tf.ensure_shape(self.table.lookup(tf.constant("a")), [])

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            outputs = model(features, training=True)
            loss = self.build_losses(labels, outputs) / tf.distribute.get_strategy().num_replicas_in_sync
            for other in (self.target, self.teacher, self.fixed):
                loss += tf.reduce_mean((outputs - other(features)) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return {self.loss: loss}

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        logs = super().validation_step(inputs, model, metrics)
        return {"loss": logs["loss"] + tf.reduce_mean(self.evaluated(inputs[0]))}

    def after_loop(self, logs: Any) -> None:
        """Is called after each training loop."""
        self.target.set_weights(self.learned.get_weights())
        self.evaluated.set_weights([weight + 0.5 for weight in self.evaluated.get_weights()])
        self.table.insert(tf.constant("a"), self.table.lookup(tf.constant("a")) + 0.5)


class Table(_Scaled):
    """A hash table of the task."""

    def make(self) -> None:
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)

    def factor(self) -> Any:
        value = tf.ensure_shape(self.table.lookup(tf.constant("a")), []) + 0.5
        with tf.control_dependencies([self.table.insert(tf.constant("a"), value)]):
            return tf.identity(value)


class KerasTwo(_Scaled):
    """A model of tf_keras, whose second optimizer stands in a list of the task."""

    def build_model(self) -> Any:
        model = tf_keras.Sequential([tf_keras.layers.Dense(CLASSES, input_shape=(FEATURES,))])
        self.optimizers = [tf_keras.optimizers.Adam(0.05)]
        self.optimizers[0].build(model.trainable_variables)
        return model

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        with tf.GradientTape() as tape:
            loss = LinearTask.build_losses(self, inputs[1], model(inputs[0], training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        self.optimizers[0].apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {self.loss: loss}

    def factor(self) -> Any:
        return 1.0


class KerasTwoUnbuilt(LinearTask):
    """A model of tf_keras that holds a second optimizer, which makes its slots in the first step."""

    def build_model(self) -> Any:
        model = tf_keras.Sequential([tf_keras.layers.Dense(CLASSES, input_shape=(FEATURES,))])
        model.second = self.make_second()
        return model

    def make_second(self) -> Any:
        """Returns the optimizer of the bias."""
        return tf_keras.optimizers.Adam(0.05)

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        with tf.GradientTape() as tape:
            loss = self.build_losses(inputs[1], model(inputs[0], training=True))
        kernel, bias = model.trainable_variables
        of_kernel, of_bias = tape.gradient(loss, [kernel, bias])
        optimizer.apply([of_kernel, tf.zeros_like(bias)], [kernel, bias])
        model.second.apply_gradients([(of_bias, bias)])
        return {self.loss: loss}


class Unreachable(_Scaled):
    """A variable that no attribute leads to."""

    def make(self) -> None:
        sys.hidden = tf.Variable(1.0, name="hidden")  # type: ignore[attr-defined]

    def factor(self) -> Any:
        return sys.hidden.assign_add(0.5)  # type: ignore[attr-defined]


KINDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (
        ModuleOfTask, GlobalModule, SeedOfLambda, SecondOptimizer, TwoModels, HostWrites, Table, KerasTwo,
        KerasTwoUnbuilt,
    )
}  # fmt: skip


def train(folder: str, kinds: list[str], replicas: int, options: dict[str, Any], from_step: int | None) -> None:
    """Trains each kind in `folder/kind`, resumed from `from_step`; writes weights and metrics to its ends.json."""
    if replicas > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{n}" for n in range(replicas)], tf.distribute.HierarchicalCopyAllReduce()
        )
    else:
        strategy = tf.distribute.get_strategy()
    eager = options.get("train_tf_function") is False
    for kind in kinds:
        tf.config.run_functions_eagerly(eager)
        keras.utils.clear_session(free_memory=False)
        seed_everything(7)
        loops = dict.fromkeys(("steps_per_loop", "checkpoint_interval", "validation_interval", "summary_interval"), 4)
        best = {"best_checkpoint_eval_metric": "validation_loss", "best_checkpoint_metric_comp": "higher"}
        config = linear_experiment(**{**loops, **best, "train_steps": STEPS, **options})
        with strategy.scope():
            task = KINDS[kind](config.task)
        place = f"{folder}/{kind}"
        actions = [task.after_loop] if hasattr(task, "after_loop") else None
        model, logs = trainer_kit.run_experiment(
            strategy, task, "train_and_eval", config, place, train_actions=actions, from_step=from_step
        )
        weights = [variable.numpy().tobytes().hex() for variable in model.trainable_variables]
        logs = {name: float(value) for name, value in logs.items() if not name.startswith("best")}
        Path(f"{place}/ends.json").write_text(json.dumps([weights, logs]))
