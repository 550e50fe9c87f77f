"""Tasks whose training step changes what neither the model's weights nor the optimizer show; run in
processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import trainer_kit
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.runtime.determinism import seed_everything
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
        return 1.0

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
    """A variable of a module in a list of a plain object of the task, whose attributes are not
    saved.
    """

    def make(self) -> None:
        super().make()
        module = tf.Module()
        module.count = tf.Variable(1.0)
        self.parts = SimpleNamespace(modules={"a": [module]})

    def factor(self) -> Any:
        return super().factor() * self.parts.modules["a"][0].count.assign_add(0.5)


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
            keras.random.SeedGenerator(1)  # Keras counts seed generators in their names
        seeds = keras.random.SeedGenerator(3)

        def noise(x: Any) -> Any:
            return x + keras.random.normal((CLASSES,), seed=seeds)

        model = _dense()
        return keras.Sequential(
            [keras.Input((FEATURES,)), *model.layers, keras.layers.Lambda(noise)]
        )


class SecondOptimizer(SeedOfLambda):
    """A second optimizer as an attribute of the model, made in the first step. The model draws
    random numbers.
    """

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
        self.critic = _dense(1)
        self.critic_optimizer = keras.optimizers.Adam(0.05)
        self.critic_optimizer.build(self.critic.trainable_variables)
        self.fixed_critic = _dense(1)
        return super().build_model()

    def second(self) -> tuple[Any, Any]:
        """Returns the second model and its optimizer."""
        return self.critic, self.critic_optimizer

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        logs = super().train_step(inputs, model, optimizer, metrics)
        critic, critic_optimizer = self.second()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                (critic(inputs[0]) - self.fixed_critic(inputs[0]) - logs["loss"]) ** 2
            )
        gradients = tape.gradient(loss, critic.trainable_variables)
        critic_optimizer.apply(gradients, critic.trainable_variables)
        return {"loss": loss}

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> Any:
        logs = super().validation_step(inputs, model, metrics)
        critic, _ = self.second()
        return {"loss": logs["loss"] + tf.reduce_mean(critic(inputs[0]))}


class TwoModelsOfClosure(TwoModels):
    """A second model and its optimizer, which only the closure of a function leads to."""

    def build_model(self) -> Any:
        model = super().build_model()
        critic = self.critic
        optimizer = self.critic_optimizer
        del self.critic, self.critic_optimizer

        def second() -> tuple[Any, Any]:
            return critic, optimizer

        self.second = second  # type: ignore[method-assign]
        return model


class HostWrites(LinearTask):
    """Second models that steps only read: an action writes to two of them, `initialize` to one,
    nothing to another.
    """

    def build_model(self) -> Any:
        self.target = _dense()
        self.evaluated = _dense()
        self.teacher = _dense()
        self.fixed = _dense()
        self.learned = super().build_model()
        return self.learned

    def initialize(self, model: Any) -> None:
        self.teacher.set_weights([0.5 * weight for weight in self.teacher.get_weights()])

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        features, labels = inputs
        with tf.GradientTape() as tape:
            outputs = model(features, training=True)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            loss = self.build_losses(labels, outputs) / replicas
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


class TwoModelsAndHostWrites(TwoModelsOfClosure, HostWrites):
    """Second models of which the step changes one, and an action others."""


class Table(_Scaled):
    """A hash table of the task."""

    def make(self) -> None:
        super().make()
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 1.0)

    def factor(self) -> Any:
        value = tf.ensure_shape(self.table.lookup(tf.constant("a")), []) + 0.5
        with tf.control_dependencies([self.table.insert(tf.constant("a"), value)]):
            return super().factor() * tf.identity(value)


class TwoModelsAndModules(TwoModels, ModuleOfTask, GlobalModule):
    """A second model with its optimizer, and variables of modules."""


class KerasTwoUnbuilt(LinearTask):
    """A model of tf_keras with a second optimizer, which makes its slots in the first step."""

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


class KerasTwo(KerasTwoUnbuilt):
    """A third optimizer stands in a list of the task, with its slots, and trains what the loss does
    not ask for.
    """

    def build_model(self) -> Any:
        model = super().build_model()
        self.optimizers = [tf_keras.optimizers.Adam(0.05)]
        self.optimizers[0].build(model.trainable_variables)
        return model

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        logs = super().train_step(inputs, model, optimizer, metrics)
        decay = [(0.1 * variable, variable) for variable in model.trainable_variables]
        self.optimizers[0].apply_gradients(decay)
        return logs


class TwoModelsAndKerasTwo(TwoModels, KerasTwoUnbuilt):
    """A second model with its optimizer, and an optimizer without slots before the first step."""


_EAGER = {"train_tf_function": False, "train_tf_while_loop": False}
# By form, the task of a run, its mode, its replicas, and options of its trainer. What goes together
# is in one run. Runs are evaluated where the trained weights do not show all that they change.
FORMS: dict[str, tuple[Callable[..., Any], str, int, dict[str, Any]]] = {
    "compiled": (TwoModelsAndModules, "train_and_eval", 1, {}),
    "compiled, Keras 2": (KerasTwo, "train", 1, {}),
    "two replicas": (TwoModelsAndHostWrites, "train_and_eval", 2, {}),
    "fused": (SecondOptimizer, "train", 1, {"fuse_steps": 2}),
    "eager": (TwoModelsAndKerasTwo, "train_and_eval", 1, _EAGER),
}


def train_all(base: str, which: str, from_step: int | None) -> None:
    """Trains each form in `base/form which`, resumed from `from_step`; writes weights and metrics
    to its ends.json.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    for form in FORMS:
        _train(form, f"{base}/{form} {which}", from_step)


def _train(form: str, folder: str, from_step: int | None) -> None:
    kind, mode, replicas, options = FORMS[form]
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = tf.distribute.MirroredStrategy(
            ["CPU:0", "CPU:1"], tf.distribute.HierarchicalCopyAllReduce()
        )
    tf.config.run_functions_eagerly(options.get("train_tf_function") is False)
    keras.utils.clear_session(free_memory=False)
    seed_everything(7)
    loops = dict.fromkeys(
        ("steps_per_loop", "checkpoint_interval", "validation_interval", "summary_interval"), 4
    )
    best = {
        "best_checkpoint_eval_metric": "validation_loss",
        "best_checkpoint_metric_comp": "lower",
    }
    config = linear_experiment(**{**loops, **best, "train_steps": STEPS, **options})
    with strategy.scope():
        task = kind(config.task)
    actions = [task.after_loop] if hasattr(task, "after_loop") else None
    model, logs = trainer_kit.run_experiment(
        strategy, task, mode, config, folder, train_actions=actions, from_step=from_step
    )
    weights = [variable.numpy().tobytes().hex() for variable in model.trainable_variables]
    logs = {name: float(value) for name, value in logs.items() if not name.startswith("best")}
    Path(f"{folder}/ends.json").write_text(json.dumps([weights, logs]))
