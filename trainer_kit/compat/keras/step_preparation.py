"""Prepares a compiled model: all variables that its steps create exist before a restore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.checkpoints.state.traced_writes import find_written_handles
from trainer_kit.compat.keras.callback_state import is_defined_in_keras
from trainer_kit.compat.keras.keras_types import CompiledModel
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.runtime.keras_internals import is_keras_2_model
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.runtime.tensorflow_internals import convert_with_autograph
from trainer_kit.runtime.variable_creation import trace_concrete_function
from trainer_kit.typing import Metric


def flatten_logs(logs: Mapping[str, object]) -> dict[str, Any]:
    """Returns logs with those of nested dicts among them, as Keras flattens them."""
    flat_logs: dict[str, Any] = {}
    for name, value in logs.items():
        if isinstance(value, Mapping):
            flat_logs |= flatten_logs(value)
        else:
            flat_logs[str(name)] = value
    return flat_logs


def prepare_step(
    step: Callable[[Any], Mapping[str, Any]], model: CompiledModel, data: tf.data.Dataset | Source
) -> dict[str, tf.TensorSpec]:
    """Has model, optimizers and metrics create the variables of a step.

    The step is traced, and not run. Called in strategy scope, on the host.

    Args:
      step: `model.train_step` or `model.test_step`.
      model: The compiled model.
      data: A dataset or a Source of global batches.

    Returns:
      The specs of what the step returns, by name. Empty if that is the results of the model's
      metrics.

    Raises:
      UsageError: When the step returns something else than a dict, or a value for each example.
      Exception: What the step raises.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync

    def spec_of_replica(spec: tf.TypeSpec) -> tf.TypeSpec:
        if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
            return spec
        # The replicas of an uneven batch have batches of different sizes.
        size = spec.shape[0]
        replica_size = None
        if size and size % replicas == 0:
            replica_size = size // replicas
        example_shape = spec.shape[1:]
        return tf.TensorSpec([replica_size, *example_shape], spec.dtype)

    # A Source may have no spec.
    if not hasattr(data, "element_spec"):
        data = data.at(0)
    global_spec = data.element_spec
    batch_spec = tf.nest.map_structure(spec_of_replica, global_spec)

    # What a step of Keras 3 does is known without a trace of its gradients.
    if replicas == 1 and isinstance(model, keras.Model) and not is_overridden(model, step.__name__):
        trains = step.__name__ == "train_step"

        @tf.autograph.experimental.do_not_convert
        def losses_and_metrics(inputs: Any) -> None:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(inputs)
            y_pred = model(x, training=trains)
            model.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=weight)
            model.compute_metrics(x=x, y=y, y_pred=y_pred, sample_weight=weight)

        trace_concrete_function(losses_and_metrics, batch_spec)
        if trains and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return {}

    logs: dict[str, Any] = {}

    @tf.autograph.experimental.do_not_convert
    def record_logs(inputs: Any) -> None:
        call = apply_keras_autograph(step, model)
        returned = call(inputs)
        if not isinstance(returned, Mapping):
            kind = type(returned).__name__
            raise UsageError(
                f"{step.__qualname__} returned a {kind}; it has to return a dict"
                ' of logs by name: return {"loss": loss}'
            )
        logs.update(returned)

    function = trace_concrete_function(
        lambda inputs: strategy.run(record_logs, args=(inputs,)) and None, batch_spec
    )
    metric_results = model.get_metrics_result()
    has_metric_names = logs.keys() == metric_results.keys()
    if has_metric_names and _updates_all(model.metrics, function.graph):
        return {}

    specs: dict[str, tf.TensorSpec] = {}
    for name, value in flatten_logs(logs).items():
        # A step may return numbers and variables, too.
        tensor = tf.convert_to_tensor(value)
        if not tensor.shape.is_fully_defined():
            raise UsageError(
                f"{step.__qualname__} returned {name!r} for each example; return numbers only"
            )
        # The last logs are reported as means over replicas, also those of whole numbers.
        dtype = tensor.dtype if tensor.dtype.is_floating else tf.float32
        specs[name] = tf.TensorSpec(tensor.shape, dtype)
    return specs


def _updates_all(metrics: Sequence[Metric], graph: tf.Graph) -> bool:
    """Whether a traced step updates all metrics.

    If it does not, it may return another loss in place of the result of one of them.
    """
    written_handles = find_written_handles(graph)
    written_ids = {id(handle) for handle in written_handles}
    for metric in metrics:
        handle_ids: list[int] = []
        for variable in map(native_variable, metric.variables):
            # A distributed variable has one component for each replica.
            components = getattr(variable, "values", [variable])
            for component in components:
                handle_ids.append(id(component.handle))
        if handle_ids and written_ids.isdisjoint(handle_ids):
            return False
    return True


def apply_keras_autograph(method: Callable[..., Any], model: CompiledModel) -> Callable[..., Any]:
    """Returns a method of a model as its own Keras calls it in graph.

    In tf_keras, AutoGraph converts layers, losses and metrics, and not the steps. In Keras 3 it
    converts nothing.
    """
    if is_keras_2_model(model):
        return convert_with_autograph(method, convert_own_code=False)
    return method


def is_overridden(model: CompiledModel, name: str) -> bool:
    """Whether the class of a model, of either Keras, has its own attribute `name`."""
    owner = next(cls for cls in type(model).__mro__ if name in vars(cls))
    return not is_defined_in_keras(owner)
