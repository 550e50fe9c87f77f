"""Prepares a compiled model for training: all variables that its steps create are there before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.traced_writes import written
from trainer_kit.distribution.keras_internals import of_keras_2
from trainer_kit.distribution.tensorflow_internals import converted_by_autograph
from trainer_kit.distribution.tracing import traced
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import native_variable


def optimizers_of(model: Any) -> dict[str, Any]:
    """Returns the optimizers in the attributes of a model, of either Keras, by the name of the attribute."""
    found: dict[int, tuple[str, Any]] = {}
    for name, value in vars(model).items():
        if hasattr(value, "apply_gradients") and hasattr(value, "iterations"):
            found.setdefault(id(value), (name.lstrip("_"), value))
    return dict(found.values())


def flattened(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs with those of nested dicts among them, as Keras flattens them."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flattened(value) if isinstance(value, Mapping) else {str(name): value}
    return found


def traced_logs(step: Callable[[Any], Any], model: Any, batch: Any) -> dict[str, tf.TensorSpec]:
    """Traces a step once, so that model, optimizers and metrics create their variables; runs nothing. In scope.

    Args:
      step: `model.train_step` or `model.test_step`.
      model: The compiled model.
      batch: The spec of a batch.

    Returns:
      The specs of what the step returns, by name; empty if that is the results of the model's metrics.

    Raises:
      UsageError: when the step returns something else than a dict, or a value for each example.
      Exception: what the step raises.
    """
    if _is_of_keras(step, model):
        _build_for_step_of_keras(step, model, batch)
        return {}
    names: set[str] = set()
    specs: dict[str, tf.TensorSpec] = {}

    @tf.autograph.experimental.do_not_convert
    def recording(data: Any) -> None:
        logs = checked_logs(with_autograph(step, model)(data), step)
        names.update(logs)
        specs.update({name: _spec(value) for name, value in flattened(logs).items()})

    strategy = tf.distribute.get_strategy()
    graph = _trace(lambda data: strategy.run(recording, args=(data,)), batch).graph
    if names == model.get_metrics_result().keys() and _updates_all(model.metrics, graph):
        return {}
    if outputs := [name for name, spec in specs.items() if not spec.shape.is_fully_defined()]:
        raise UsageError(f"{step.__qualname__} returned {outputs[0]!r} for each example; return numbers only")
    return specs


def _updates_all(metrics: list[Any], graph: Any) -> bool:
    """Whether a traced step updates all metrics; it may return a loss of its own in place of the result of one."""
    changed = {id(handle) for handle in written(graph)}
    for metric in metrics:
        variables = map(native_variable, metric.variables)
        handles = [part.handle for variable in variables for part in getattr(variable, "values", [variable])]
        if handles and not any(id(handle) in changed for handle in handles):
            return False
    return True


def _is_of_keras(step: Callable[[Any], Any], model: Any) -> bool:
    """Whether the step is Keras 3's own, on one replica: what it does is known without a trace of its gradients."""
    one_replica = tf.distribute.get_strategy().num_replicas_in_sync == 1
    return isinstance(model, keras.Model) and one_replica and not is_overridden(model, step.__name__)


def _build_for_step_of_keras(step: Callable[[Any], Any], model: Any, batch: Any) -> None:
    """Creates the variables of a step of Keras 3; traces the losses and metrics, and no gradients. In scope."""
    trains = step.__name__ == "train_step"

    @tf.autograph.experimental.do_not_convert
    def losses_and_metrics(data: Any) -> None:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = model(x, training=trains)
        model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
        model.compute_metrics(x=x, y=y, y_pred=y_pred, sample_weight=weight)

    _trace(losses_and_metrics, batch)
    if trains and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def with_autograph(method: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns a method of a model as its own Keras calls it in graph.

    In tf_keras, AutoGraph converts layers, losses and metrics, and not the steps. In Keras 3 it converts nothing.
    """
    return converted_by_autograph(method, itself=False) if of_keras_2(model) else method


def checked_logs(logs: Any, step: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Returns what a step of a model has returned.

    Raises:
      UsageError: when it is no dict, as Keras asks for.
    """
    if isinstance(logs, Mapping):
        return logs
    raise UsageError(
        f"{step.__qualname__} returned a {type(logs).__name__}; it has to return a dict of logs by name: "
        'return {"loss": loss}'
    )


def check_can_train(model: Any) -> None:
    """Raises UsageError when a model lacks what its training step needs from `compile`."""
    if not getattr(model, "compiled", True):  # tf_keras does not tell
        raise UsageError(f"the model {model.name!r} is not compiled; call model.compile(optimizer, loss) before fit")
    if getattr(model, "optimizer", None) is None and not is_overridden(model, "train_step"):
        raise UsageError(
            f"the model {model.name!r} is compiled without an optimizer, so that it can only evaluate and predict; "
            'give one to train it: model.compile(optimizer="adam", ...)'
        )


def is_overridden(model: Any, name: str) -> bool:
    """Whether the class of a model, of either Keras, has its own attribute `name`."""
    owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
    return owner.__module__.partition(".")[0] not in ("keras", "tf_keras")


def _trace(function: Callable[[Any], Any], batch: Any) -> Any:
    return traced(lambda data: function(data) and None, batch)


def _spec(value: Any) -> tf.TensorSpec:
    tensor = tf.convert_to_tensor(value)  # a number or a variable, too
    return tf.TensorSpec(tensor.shape, tensor.dtype if tensor.dtype.is_floating else tf.float32)
