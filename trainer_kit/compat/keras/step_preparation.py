"""Prepares a compiled model for training: all variables that its steps create are there before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.traced_writes import find_written_handles
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import native_variable
from trainer_kit.runtime.keras_internals import is_keras_2_model
from trainer_kit.runtime.tensorflow_internals import convert_with_autograph
from trainer_kit.runtime.variable_creation import trace_concrete_function


def flatten_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns logs with those of nested dicts among them, as Keras flattens them."""
    found: dict[str, Any] = {}
    for name, value in logs.items():
        found |= flatten_logs(value) if isinstance(value, Mapping) else {str(name): value}
    return found


def prepare_step(step: Callable[[Any], Any], model: Any, data: Any) -> dict[str, tf.TensorSpec]:
    """Has model, optimizers and metrics create the variables of a step; runs nothing. Called in strategy scope.

    Args:
      step: `model.train_step` or `model.test_step`.
      model: The compiled model.
      data: A dataset or a Source of global batches.

    Returns:
      The specs of what the step returns, by name; empty if that is the results of the model's
      metrics.

    Raises:
      UsageError: when the step returns something else than a dict, or a value for each example.
      Exception: what the step raises.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync

    def spec_of_replica(spec: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return spec
        is_known = spec.shape[0] and spec.shape[0] % replicas == 0
        return tf.TensorSpec(
            [spec.shape[0] // replicas if is_known else None, *spec.shape[1:]], spec.dtype
        )

    spec = (
        data.element_spec if hasattr(data, "element_spec") else data.at(0).element_spec
    )  # a Source may have none
    batch = tf.nest.map_structure(spec_of_replica, spec)

    # What a step of Keras 3 does is known without a trace of its gradients.
    if replicas == 1 and isinstance(model, keras.Model) and not is_overridden(model, step.__name__):
        trains = step.__name__ == "train_step"

        @tf.autograph.experimental.do_not_convert
        def losses_and_metrics(inputs: Any) -> None:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(inputs)
            y_pred = model(x, training=trains)
            model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
            model.compute_metrics(x=x, y=y, y_pred=y_pred, sample_weight=weight)

        trace_concrete_function(losses_and_metrics, batch)
        if trains and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return {}

    logs: dict[str, Any] = {}

    @tf.autograph.experimental.do_not_convert
    def record_logs(inputs: Any) -> None:
        returned = apply_keras_autograph(step, model)(inputs)
        if not isinstance(returned, Mapping):
            raise UsageError(
                f"{step.__qualname__} returned a {type(returned).__name__}; it has to return a dict"
                ' of logs by name: return {"loss": loss}'
            )
        logs.update(returned)

    graph = trace_concrete_function(
        lambda inputs: strategy.run(record_logs, args=(inputs,)) and None, batch
    ).graph
    if logs.keys() == model.get_metrics_result().keys() and _updates_all(model.metrics, graph):
        return {}
    specs: dict[str, tf.TensorSpec] = {}
    for name, value in flatten_logs(logs).items():
        tensor = tf.convert_to_tensor(value)  # a number or a variable, too
        if not tensor.shape.is_fully_defined():
            raise UsageError(
                f"{step.__qualname__} returned {name!r} for each example; return numbers only"
            )
        specs[name] = tf.TensorSpec(
            tensor.shape, tensor.dtype if tensor.dtype.is_floating else tf.float32
        )
    return specs


def _updates_all(metrics: list[Any], graph: Any) -> bool:
    """Whether a traced step updates all metrics; it may return a loss of its own in place of the result of one."""
    changed = {id(handle) for handle in find_written_handles(graph)}
    for metric in metrics:
        variables = [native_variable(variable) for variable in metric.variables]
        handles = [id(part.handle) for one in variables for part in getattr(one, "values", [one])]
        if handles and changed.isdisjoint(handles):
            return False
    return True


def apply_keras_autograph(method: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Returns a method of a model as its own Keras calls it in graph.

    In tf_keras, AutoGraph converts layers, losses and metrics, and not the steps. In Keras 3 it
    converts nothing.
    """
    return (
        convert_with_autograph(method, convert_own_code=False)
        if is_keras_2_model(model)
        else method
    )


def is_overridden(model: Any, name: str) -> bool:
    """Whether the class of a model, of either Keras, has its own attribute `name`."""
    owner = next(kind for kind in type(model).__mro__ if name in vars(kind))
    return owner.__module__.partition(".")[0] not in ("keras", "tf_keras")
