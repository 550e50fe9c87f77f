"""Named tensors: `expose` gives a tensor a name, and StepTensors hands out requested values.

A name that nobody requests costs nothing: `expose` adds no operation, and TensorFlow prunes what
only it would use. The output of a Keras layer is known by the name of the layer, without a call of
`expose`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.training.metric_set import MetricSet, create_configured_metrics
from trainer_kit.typing import ExperimentLike, Metric, Model

if TYPE_CHECKING:
    from trainer_kit.training.base_trainer import BaseTrainer
    from trainer_kit.training.evaluator import Evaluator

# A tensor or a variable. An output of a layer may be a structure of them.
Exposed = TypeVar("Exposed")
_collector: ContextVar[TensorCollector | None] = ContextVar("collector", default=None)


@tf.autograph.experimental.do_not_convert
def expose(name: object, tensor: Exposed) -> Exposed:
    """Gives a tensor of a model or a step a name.

    Summaries, metrics, callbacks and predictors request the tensor by this name. Runs in graph or
    eagerly, on a replica.

    It has to be called in the step itself or in the call of a layer: a tensor inside a tf.cond, a
    loop or another tf.function cannot leave it. If a step exposes several tensors by one name, such
    as in a layer that is called twice, the last one counts.

    Args:
      name: The name, a text.
      tensor: A dense tensor of any shape and dtype, or a variable.

    Returns:
      The tensor, unchanged.

    Raises:
      UsageError: when the name is not a text. At the end of the step, when the tensor is requested
        and cannot leave its graph.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"expose: the name {name!r} is not a text; call expose(name, tensor)")
    collector = _collector.get()
    if collector is not None:
        collector.add(name, tensor)
    return tensor


class TensorCollector:
    """The exposed tensors of one step, as far as they are requested.

    Used where the step is traced or run.

    Args:
      requested_names: The names that are requested.

    Attributes:
      tensors: The tensors by name.
      exposed_names: All names that the step has exposed.
      problem: Why a requested tensor is not available. "" if there is no problem. It is not raised
        at once, since Keras would add the arguments of the layer to the message.
    """

    def __init__(self, requested_names: Collection[str]) -> None:
        self._requested_names = requested_names
        self._graph = tf.compat.v1.get_default_graph()
        self.tensors: dict[str, tf.Tensor] = {}
        self.exposed_names: set[str] = set()
        self.problem = ""

    def add(self, name: str, tensor: object) -> None:
        """Records a tensor if its name is requested, or the problem if it is not available."""
        self.exposed_names.add(name)
        if name not in self._requested_names:
            return

        if tf.compat.v1.get_default_graph() is not self._graph:
            self.problem = (
                f"expose({name!r}) is called inside a tf.cond, a loop or a tf.function, "
                "which the tensor cannot leave; return the tensor from there, "
                "and expose what comes out"
            )
            return

        try:
            self.tensors[name] = tf.convert_to_tensor(tensor)
        except (TypeError, ValueError):
            kind = type(tensor).__name__
            self.problem = (
                f"{name!r} is a {kind}, no dense tensor; "
                "call trainer_kit.expose on one of its tensors"
            )


class LayerOutputs:
    """Exposes the outputs of the layers of a model by the names of the layers.

    It does so only while tensors are collected.

    Args:
      model: A Keras 3 model, a tf_keras model or a tf.Module. Layers inside layers count too.

    Attributes:
      model: The argument of this name.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._layers: dict[str, list[keras.layers.Layer]] = {}
        # The contexts of replicas overlap, because replicas are traced in turns.
        self._open_contexts = 0

        # Functional models inside of a Sequential of Keras, whose names users do not know.
        unnamed: set[int] = set()
        for part in tf.train.TrackableView(model).descendants():
            if isinstance(part, keras.Sequential):
                view = tf.train.TrackableView(part)
                child_ids = {id(child) for child in view.children(part).values()}
                unnamed |= child_ids - {id(layer) for layer in part.layers}

            # An input layer has a method `call`, which nothing calls.
            is_input = type(part).__name__ == "InputLayer"
            is_called = callable(getattr(part, "call", None)) and not is_input
            if not is_called or id(part) in unnamed:
                continue
            name = getattr(part, "name", None)
            if isinstance(name, str):
                namesakes = self._layers.setdefault(name, [])
                namesakes.append(part)

    @property
    def names(self) -> list[str]:
        """The names of all layers."""
        return list(self._layers)

    @contextlib.contextmanager
    def collect(self, requested_names: Collection[str]) -> Iterator[TensorCollector]:
        """A context that collects the tensors of these names. A context inside it hides it.

        Raises:
          UsageError: when two layers have a requested name. At the end of the context, when a
            requested tensor is not available.
        """
        layers = []
        for name in requested_names:
            namesakes = self._layers.get(name, [])
            if len(namesakes) > 1:
                raise UsageError(
                    f"{len(namesakes)} layers are called {name!r}; "
                    "give each layer a name of its own"
                )
            layers += namesakes

        collector = TensorCollector(requested_names)
        token = _collector.set(collector)
        self._open_contexts += 1
        if self._open_contexts == 1:
            for layer in layers:
                layer.call = _wrap_layer_call(layer.name, layer.call)

        try:
            yield collector
        finally:
            self._open_contexts -= 1
            if self._open_contexts == 0:
                for layer in layers:
                    # The method of the layer's class is visible again.
                    del layer.call
            _collector.reset(token)

        if collector.problem:
            raise UsageError(collector.problem)


def unknown_tensor(
    name: str, known_names: Collection[str], where: str, advice: str = ""
) -> UsageError:
    """Returns the error for a name that nothing exposes.

    Args:
      name: The name.
      known_names: The names of exposed tensors and of layers.
      where: What was searched, such as "the training step".
      advice: What to do beyond choosing a known name, from "; " on.
    """
    return UsageError(
        f"{where} exposes no tensor {name!r}, and no layer has this name; "
        f"{suggest_names(name, list(known_names))}{advice}"
    )


def check_evaluation_tensors(trainer: BaseTrainer) -> None:
    """Traces the evaluation step if tensors of it are requested by name.

    A missing tensor then ends a run before it trains. Runs eagerly, on the host.

    Args:
      trainer: The trainer. A trainer that does not evaluate, or has its own evaluations, is not
        checked.

    Raises:
      UsageError: when the step exposes no tensor of such a name.
    """
    if trainer.custom_parts.replaces_steps:
        return
    # Only an Evaluator has steps that are not its own.
    evaluator = cast("Evaluator", trainer)
    if not evaluator.eval_tensors.has_requests:
        return
    if not (evaluator.can_evaluate and evaluator.config.trainer.eval_tf_function):
        return

    for validation_set in evaluator.validation:
        selected_set = evaluator.select_validation_set(validation_set.name)
        iterator = selected_set.data.iterator(fresh=False)
        eval_step = tf.function(evaluator.eval_step, autograph=False)
        eval_step.get_concrete_function(iterator)


class LastValue:
    """The value of a tensor in the last step, on each replica.

    It is updated like a metric, and never reset. Created in strategy scope.

    Args:
      name: The name of the tensor.
      field: Who requests it.
      is_fused: Whether steps are fused: a program of XLA cannot change the shape of a variable.

    Attributes:
      variable: The variable that contains the value. None before a step is traced. No checkpoint
        needs it.
    """

    def __init__(self, name: str, field: str, *, is_fused: bool) -> None:
        self._name = name
        self._field = field
        self._is_fused = is_fused
        self._dtype = tf.float32
        self.variable: tf.Variable | None = None

    @tf.autograph.experimental.do_not_convert
    def update_state(self, value: tf.Tensor) -> None:
        """Stores the value. Runs in graph, on a replica."""
        tf.distribute.get_replica_context().merge_call(self._store, args=(value,))

    @tf.autograph.experimental.do_not_convert
    def _store(self, strategy: tf.distribute.Strategy, value: tf.Tensor) -> None:
        parts = strategy.experimental_local_results(value)
        self._dtype = parts[0].dtype
        shape = parts[0].shape if self._is_fused else tf.TensorShape(None)
        if self._is_fused and not shape.is_fully_defined():
            raise UsageError(
                f"{self._field}: the tensor {self._name!r} has the shape {shape}, "
                "and fused steps need a shape that is known before they run; "
                "batch with drop_remainder=True, or set trainer.fuse_steps=1"
            )

        # TensorFlow keeps int32 variables on the CPU, where a compiled program on a GPU cannot
        # reach them.
        dtype = tf.int64 if self._dtype == tf.int32 else self._dtype
        variable = self.variable
        if (
            variable is None
            or variable.dtype != dtype
            or not variable.shape.is_compatible_with(shape)
        ):
            # A variable of any shape begins as a scalar.
            first_shape = shape if self._is_fused else []
            with tf.init_scope(), strategy.scope():
                self.variable = tf.Variable(
                    tf.zeros(first_shape, dtype),
                    trainable=False,
                    shape=shape,
                    name="exposed",
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                )

        local_variables = strategy.experimental_local_results(self.variable)
        for local_variable, part in zip(local_variables, parts, strict=True):
            new_value = tf.cast(part, local_variable.dtype)
            local_variable.assign(new_value)

    def read_value(self, strategy: tf.distribute.Strategy) -> np.ndarray:
        """Returns the value over the replicas of this worker, as a NumPy array.

        Scalars are averaged, other values are concatenated. Runs eagerly, on the host.

        Args:
          strategy: The strategy of the trainer.
        """
        dtype = self._dtype.as_numpy_dtype
        replicas = strategy.experimental_local_results(self.variable)
        parts = [np.asarray(replica.numpy(), dtype) for replica in replicas]
        if len(parts) == 1:
            return parts[0]
        if parts[0].ndim:
            return np.concatenate(parts)

        # The mean of integers is a float.
        mean_dtype = np.result_type(parts[0], np.float32)
        return np.asarray(np.mean(parts, dtype=mean_dtype))


class StepTensors:
    """Updates metrics with tensors that steps expose.

    The metrics are those of the config, and the values of the last step. Created in strategy scope.
    Without a requested name it has no variables, and adds no operation to a step.

    Args:
      phase: "training" or "evaluation", for messages.
      config: The experiment's config, whose `trainer.metrics` may name tensors.
      metrics: The set of the metrics of these steps, which resets and reports the metrics of
        tensors.

    Attributes:
      values: The values of the last loop, as NumPy arrays by name. With several validation sets, by
        set and name.

    Raises:
      UsageError: when two of its metrics have the same name.
    """

    def __init__(self, phase: str, config: ExperimentLike, metrics: MetricSet) -> None:
        self._phase = phase
        self._metric_set = metrics
        self._strategy = tf.distribute.get_strategy()
        # Only training steps are fused.
        fuse_steps = getattr(config.trainer, "fuse_steps", 1)
        self._is_fused = phase == "training" and fuse_steps > 1
        # Each metric with its tensor, and with who requests it.
        self._tensor_metrics: list[tuple[Metric, str, str]] = []
        # Who requests the last value of a tensor, by the name of the tensor.
        self._fields: dict[str, str] = {}
        # By validation set and tensor: steps of other sets may expose another dtype by the same
        # name.
        self._last_values: dict[tuple[str, str], LastValue] = {}
        self._layers: LayerOutputs | None = None
        self._is_traced = False
        self.values: dict[str, Any] = {}

        for metric, name, field in create_configured_metrics(config, for_tensors=True):
            metrics.add_metric(metric, field)
            self._tensor_metrics.append((metric, name, field))

    def request_value(self, name: str, where: str) -> None:
        """Requests the value of a tensor in the last step of each loop.

        Called before the step is traced.

        Args:
          name: The name that a step or a model exposes, or the name of a layer.
          where: Who requests it, for messages, such as "trainer.summaries".

        Raises:
          UsageError: when the step is traced already, or the trainer cannot hand out tensors.
        """
        if name in self._fields:
            return
        if self._is_traced:
            raise UsageError(
                f"{where}: the tensor {name!r} is asked for after the first {self._phase} step; "
                "ask before"
            )
        if isinstance(self._strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise UsageError(
                f"{where}: asynchronous training has no last step; "
                "feed the tensor to a metric instead"
            )
        self._fields[name] = where

    @property
    def has_requests(self) -> bool:
        """Whether any tensor is requested."""
        return bool(self._requested_fields)

    @property
    def value_variables(self) -> list[tf.Variable]:
        """The variables that contain the values, which no checkpoint needs."""
        variables = [last_value.variable for last_value in self._last_values.values()]
        return [variable for variable in variables if variable is not None]

    def read_values(self, validation_set: str = "") -> None:
        """Reads the values after a loop. Runs eagerly, on the host.

        Args:
          validation_set: The name of the evaluated set, if there are several.

        Raises:
          UsageError: when a subclass of the trainer has its own step, which captures no tensors.
        """
        values: dict[str, Any] = {}
        for name, field in self._fields.items():
            last_value = self._last_values.get((validation_set, name))
            if last_value is not None:
                values[name] = last_value.read_value(self._strategy)
            elif self._metric_set.loss.is_updated:
                raise UsageError(
                    f"{field}: the tensor {name!r} has no value, because the trainer's "
                    f"{self._phase} step is its own; call the method of the superclass there"
                )

        # The values of other validation sets stay.
        if validation_set:
            values = {**self.values, validation_set: values}
        self.values = values

    @contextlib.contextmanager
    def capture_tensors(self, model: Model) -> Iterator[Mapping[str, tf.Tensor]]:
        """A context of a step on a replica, which yields a mapping for `update_metrics`.

        After the context, the mapping contains the requested tensors by name.

        Args:
          model: The model of the step, whose layers are known by name.

        Raises:
          UsageError: at the end of the context, when a requested tensor is not available.
        """
        self._is_traced = True
        requested_fields = self._requested_fields
        if not requested_fields:
            yield {}
            return

        if self._layers is None or self._layers.model is not model:
            self._layers = LayerOutputs(model)
        layers = self._layers
        with layers.collect(requested_fields) as collector:
            yield collector.tensors

        for name, field in requested_fields.items():
            if name in collector.tensors:
                continue
            advice = ""
            if self._phase == "evaluation":
                advice = (
                    "; a tensor of train_step has to be exposed in validation_step, too, "
                    "for evaluations"
                )
            names = {*collector.exposed_names, *layers.names}
            raise unknown_tensor(name, names, f"{field}: the {self._phase} step", advice)

    @tf.autograph.experimental.do_not_convert
    def update_metrics(self, tensors: Mapping[str, tf.Tensor], validation_set: str = "") -> None:
        """Updates metrics and last values with the tensors of a step.

        Runs in graph, on a replica.

        Args:
          tensors: The tensors of `capture_tensors`.
          validation_set: The name of the evaluated set, if there are several.
        """
        for metric, name, _ in self._tensor_metrics:
            metric.update_state(tensors[name])
        for name, field in self._fields.items():
            key = (validation_set, name)
            new_value = LastValue(name, field, is_fused=self._is_fused)
            last_value = self._last_values.setdefault(key, new_value)
            last_value.update_state(tensors[name])

    @property
    def _requested_fields(self) -> dict[str, str]:
        """The requested names, each with who requests it."""
        metric_fields = {name: field for _, name, field in self._tensor_metrics}
        return {**metric_fields, **self._fields}


def _wrap_layer_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `call` of a layer, which also exposes what it returns."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(call)
    def exposing(*args: Any, **kwargs: Any) -> Any:
        output = apply_autograph(call)(*args, **kwargs)
        return expose(name, output)

    return exposing
