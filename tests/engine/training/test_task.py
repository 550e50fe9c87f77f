"""The defaults of Task, with models of every kind and without a trainer."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.errors import UsageError
from trainer_kit.testing import TinyConfig, TinyTask
from trainer_kit.training.task import Task, full_precision, scalar_loss, split_batch

_X = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 1.0]], np.float32)
_Y = np.array([[1.0], [0.0], [2.0]], np.float32)
_KERNEL = np.array([[0.5], [-0.25]], np.float32)


class _Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(_KERNEL)

    def __call__(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return inputs @ self.kernel


def _build_keras(library: Any, added: float = 0.0) -> Any:
    class Added(library.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(added + 0.0 * tf.reduce_sum(inputs))
            return inputs

    inputs = library.Input((2,))
    outputs = library.layers.Dense(1, use_bias=False, name="dense")(
        Added()(inputs) if added else inputs
    )
    model = library.Model(inputs, outputs)
    model.set_weights([_KERNEL])
    return model


class _Regression(Task):
    """Mean squared error; the smallest task."""

    def build_model(self) -> Any:
        return _build_keras(keras)

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return tf.data.Dataset.from_tensors((_X, _Y))

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return tf.reduce_mean((model_outputs - labels) ** 2) + super().build_losses(
            labels, model_outputs, aux_losses
        )


class _OwnLossOnly(_Regression):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return Task.build_losses(self, labels, model_outputs, aux_losses)


_LOSS = float(np.mean((_X @ _KERNEL - _Y) ** 2))
_GRADIENT = 2 / 3 * _X.T @ (_X @ _KERNEL - _Y)


@pytest.mark.parametrize(
    "make", [_Module, lambda: _build_keras(keras), lambda: _build_keras(tf_keras)]
)
def test_step_follows_the_mean_loss_gradient_for_every_model(make: Any) -> None:
    model = make()
    metrics = [keras.metrics.MeanSquaredError(name="error")]

    logs = _Regression(None).train_step((_X, _Y), model, keras.optimizers.SGD(0.1), metrics)

    assert float(logs["loss"]) == pytest.approx(_LOSS, rel=1e-6)
    np.testing.assert_allclose(
        model.trainable_variables[0].numpy(), _KERNEL - 0.1 * _GRADIENT, rtol=1e-5
    )
    assert float(metrics[0].result()) == pytest.approx(_LOSS, rel=1e-6)


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.parametrize("compiled", [False, True])
def test_losses_of_layers_are_counted_once(library: Any, compiled: bool) -> None:
    model = _build_keras(library, added=0.5)
    if compiled:
        model.compile(loss="mse")
    task = (_OwnLossOnly if compiled else _Regression)(None)
    batch = (tf.constant(_X), tf.constant(_Y))
    validated = task.validation_step(batch, model)

    trained = task.train_step(batch, model, keras.optimizers.SGD(0.1))

    assert (
        float(validated["loss"]) == float(trained["loss"]) == pytest.approx(_LOSS + 0.5, rel=1e-6)
    )


def test_validation_changes_no_weight_and_updates_the_metrics() -> None:
    model = _build_keras(keras)
    metric = keras.metrics.MeanSquaredError()

    logs = _Regression(None).validation_step((_X, _Y), model, [metric])

    assert float(logs["loss"]) == float(metric.result()) == pytest.approx(_LOSS, rel=1e-6)
    np.testing.assert_array_equal(model.get_weights()[0], _KERNEL)


def test_low_precision_outputs_become_float32_and_others_stay() -> None:
    low = {
        "a": tf.ones(1, tf.bfloat16),
        "b": (tf.ones(1, tf.float16), tf.ones(1, tf.int32), "text"),
    }
    high = full_precision(low)

    assert high["a"].dtype == tf.float32
    assert high["b"][0].dtype == tf.float32
    assert high["b"][1].dtype == tf.int32
    assert high["b"][2] == "text"


def test_a_pair_is_features_and_labels_and_anything_else_is_both() -> None:
    assert split_batch((1, 2)) == (1, 2)
    assert split_batch({"a": 1}) == ({"a": 1}, {"a": 1})
    assert split_batch((1, 2, 3)) == ((1, 2, 3), (1, 2, 3))


def test_a_task_is_named_by_argument_config_or_class() -> None:
    assert _Regression(None).name == "_Regression"
    assert TinyTask(TinyConfig(name="configured")).name == "configured"
    assert TinyTask(TinyConfig(name="configured"), name="given").name == "given"
    assert _Regression(None).logging_dir == ""
    assert _Regression(None, "runs/a").logging_dir == "runs/a"


class _VectorLoss(TinyTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(labels, model_outputs, from_logits=True)


@pytest.mark.parametrize("loss", [None, "mse", {"loss": 0.5}, [0.5, "mse"]])
def test_a_loss_that_is_no_number_is_refused(loss: Any) -> None:
    told = f"T.build_losses has to return a scalar; it returned {loss!r}, which is not a number"
    with pytest.raises(UsageError, match=f"^{re.escape(told)}$"):
        scalar_loss(loss, "T.build_losses")


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    task = _VectorLoss(TinyConfig())
    batch = (tf.zeros([4, 8]), tf.zeros([4], tf.int32))

    with pytest.raises(
        UsageError, match=r"_VectorLoss.build_losses has to return a scalar; .*of shape \(4,\)"
    ):
        task.validation_step(batch, task.build_model())
