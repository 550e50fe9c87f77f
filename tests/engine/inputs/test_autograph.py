"""User code in place of ours: `if tensor:` in it becomes graph, wherever it is called from."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.builders import replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.training.trainer import Trainer

_BRANCHED: set[str] = set()


def _branch_on_tensor(where: str, tensor: Any) -> None:
    """Fails in a graph unless AutoGraph has converted it and all that called it."""
    _BRANCHED.add(where)
    if tf.reduce_sum(tf.cast(tensor, tf.float32)) > 0.0:
        tf.no_op()


class _Metric(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        _branch_on_tensor("metric", y_pred)
        return super().update_state(tf.reduce_mean(y_pred))


class _Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones([8, 3]))

    def __call__(self, inputs: Any, training: bool = False) -> Any:
        _branch_on_tensor("module", inputs)
        return inputs @ self.kernel


class _Layer(tf_keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        _branch_on_tensor("layer", inputs)
        return inputs


class _Compiled(keras.Model):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        _branch_on_tensor("compute_loss", kwargs["y_pred"])
        return super().compute_loss(*args, **kwargs)

    def compute_metrics(self, *args: Any, **kwargs: Any) -> Any:
        _branch_on_tensor("compute_metrics", kwargs["y_pred"])
        return super().compute_metrics(*args, **kwargs)


class _Task(LinearTask):
    def build_metrics(self, training: bool = True) -> list[Any]:
        return [_Metric(name="mean")]

    def train_step(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _branch_on_tensor("train_step", inputs[0])
        return super().train_step(inputs, *args, **kwargs)

    def validation_step(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _branch_on_tensor("validation_step", inputs[0])
        return super().validation_step(inputs, *args, **kwargs)

    def inference_step(self, inputs: Any, model: Any) -> Any:
        _branch_on_tensor("inference_step", inputs)
        return super().inference_step(inputs, model)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        _branch_on_tensor("build_losses", model_outputs)
        return super().build_losses(labels, model_outputs, aux_losses)

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        _branch_on_tensor("process_metrics", model_outputs)
        super().process_metrics(metrics, labels, model_outputs, **kwargs)

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        _branch_on_tensor("aggregate_logs", step_logs["loss"][0])
        return step_logs["loss"][0] if state is None else state + step_logs["loss"][0]


class _Trainer(Trainer):
    def next_train_inputs(self, iterator: Any) -> Any:
        inputs = super().next_train_inputs(iterator)
        _branch_on_tensor("next_train_inputs", self.global_step)
        return inputs

    def train_step(self, iterator: Any) -> None:
        _branch_on_tensor("trainer.train_step", self.global_step)
        super().train_step(iterator)

    def next_eval_inputs(self, iterator: Any) -> Any:
        _branch_on_tensor("next_eval_inputs", self.global_step)
        return super().next_eval_inputs(iterator)

    def eval_step(self, iterator: Any) -> Any:
        logs = super().eval_step(iterator)
        _branch_on_tensor("eval_step", logs["loss"][0])
        return logs

    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        _branch_on_tensor("eval_reduce", step_outputs["loss"][0])
        return super().eval_reduce(state, step_outputs)


def _list_names(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def _build_module(task: Any) -> Any:
    return _Module()


def _build_tf_keras(task: Any) -> Any:
    inputs = tf_keras.Input((8,))
    return tf_keras.Model(inputs, tf_keras.layers.Dense(3)(_Layer()(inputs)))


def _run(
    task_type: type[LinearTask],
    model: Any,
    devices: int = 1,
    *,
    xla: bool = False,
    trainer_type: Any = Trainer,
) -> set[str]:
    """Returns where branches were traced in training and evaluating what `model` builds."""
    _BRANCHED.clear()
    config = dataclasses.replace(
        linear_experiment(eval_tf_while_loop=True), runtime=RuntimeConfig(enable_xla=xla)
    )
    with replicas(devices).scope():
        task = type("_TaskOfModel", (task_type,), {"build_model": model})(config.task)
        trainer = trainer_type(
            config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config)
        )
        trainer.train(tf.constant(2))
        trainer.evaluate(tf.constant(2))

    return set(_BRANCHED)


@pytest.mark.parametrize(
    ("model", "branched", "devices", "xla"),
    [(_build_module, "module", 2, False), (_build_tf_keras, "layer", 1, True)],
    ids=["two devices", "xla"],
)
def test_every_method_of_task_and_trainer_may_branch_on_tensors(
    model: Any, branched: str, devices: int, xla: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """And so may a tf.Module and a layer of tf_keras."""
    expected = {
        *(_list_names(_Task) - {"build_metrics", "loss"}),
        *(_list_names(_Trainer) - {"train_step"}),
        "trainer.train_step",
        "metric",
        branched,
    }

    assert _run(_Task, model, devices, xla=xla, trainer_type=_Trainer) == expected
    assert "step by step" not in caplog.text  # where eager code may branch anyhow


def test_a_compiled_model_may_branch_on_tensors() -> None:
    def build_compiled(task: Any) -> Any:
        inputs = keras.Input((8,))
        model = _Compiled(inputs, keras.layers.Dense(3)(inputs), name="compiled")
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert _run(LinearTask, build_compiled) == {"compute_loss", "compute_metrics"}


def test_a_function_is_itself_when_run_eagerly() -> None:
    assert apply_autograph(_branch_on_tensor) is _branch_on_tensor
