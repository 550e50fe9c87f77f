"""Named tensors: `expose` gives a tensor a name, and StepTensors hands out the values that are asked for by name.

A name that nobody asks for costs nothing: `expose` adds no operation, and TensorFlow prunes what only it would use.
The output of a Keras layer is known by the name of the layer, without a call of `expose`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError, suggestion
from trainer_kit.inputs.autograph import converted
from trainer_kit.training.metrics import MetricSet, configured_metrics

_KEY = "trainer_kit/tensors"  # of the results of a loop
_collector: ContextVar[TensorCollector | None] = ContextVar("collector", default=None)


@tf.autograph.experimental.do_not_convert
def expose(name: Any, tensor: Any) -> Any:
    """Gives a tensor of a model or a step a name, by which summaries, metrics, callbacks and predictors ask for it.

    In graph or eagerly, on a replica. It has to be called in the step itself or in the call of a layer: a tensor inside
    a tf.cond, a loop or another tf.function cannot leave it. If a step exposes several tensors by one name, such as in
    a layer that is called twice, the last one counts.

    Args:
      name: The name, a text.
      tensor: A dense tensor of any shape and dtype, or a variable.

    Returns:
      The tensor, unchanged.

    Raises:
      UsageError: when the name is not a text; at the end of the step, when the tensor is asked for and cannot leave its
        graph.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"expose: the name {name!r} is not a text; call expose(name, tensor)")
    collector = _collector.get()
    if collector is not None:
        collector.add(name, tensor)
    return tensor


class TensorCollector:
    """The exposed tensors of one step, as far as they are asked for. Used where the step is traced or run.

    Args:
      wanted: The names that are asked for.

    Attributes:
      tensors: The tensors by name.
      known: All names that the step has exposed.
      problem: Why a tensor that is asked for cannot be had; "" if there is no problem. It is not raised at once, since
        Keras would add the arguments of the layer to the message.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        self._graph = tf.compat.v1.get_default_graph()
        self.tensors: dict[str, tf.Tensor] = {}
        self.known: set[str] = set()
        self.problem = ""

    def add(self, name: str, tensor: Any) -> None:
        """Records a tensor if its name is asked for, or the problem if it cannot be had."""
        self.known.add(name)
        if name not in self._wanted:
            return
        if tf.compat.v1.get_default_graph() is not self._graph:
            self.problem = (
                f"expose({name!r}) is called inside a tf.cond, a loop or a tf.function, which the tensor cannot leave; "
                "return the tensor from there, and expose what comes out"
            )
            return
        try:
            self.tensors[name] = tf.convert_to_tensor(tensor)
        except (TypeError, ValueError):
            kind = type(tensor).__name__
            self.problem = f"{name!r} is a {kind}, no dense tensor; call trainer_kit.expose on one of its tensors"


class LayerOutputs:
    """Exposes the outputs of the layers of a model by the names of the layers, while one of its contexts is open.

    Args:
      model: A Keras 3 model, a tf_keras model or a tf.Module; layers inside layers count too.
    """

    def __init__(self, model: Any) -> None:
        self._layers: dict[str, list[Any]] = {}
        parts = {id(part): part for part in tf.train.TrackableView(model).descendants()}
        sequentials = [part for part in parts.values() if isinstance(part, keras.Sequential)]
        unnamed = {key for sequential in sequentials for key in _unnamed_in(sequential)}
        for key, part in parts.items():
            is_called = callable(getattr(part, "call", None)) and type(part).__name__ != "InputLayer"
            if is_called and key not in unnamed and isinstance(getattr(part, "name", None), str):
                self._layers.setdefault(part.name, []).append(part)
        self._open_contexts = 0  # those of replicas, which are traced in turns, overlap

    @property
    def names(self) -> list[str]:
        """The names of all layers."""
        return list(self._layers)

    @contextlib.contextmanager
    def exposed(self, wanted: Collection[str]) -> Iterator[None]:
        """A context in which the layers of these names expose their outputs; other names are ignored.

        Raises:
          UsageError: when two layers have a name that is wanted.
        """
        layers = [self._layer(name) for name in wanted if name in self._layers]
        self._open_contexts += 1
        if self._open_contexts == 1:
            for layer in layers:
                layer.call = _exposing(layer.name, layer.call)
        try:
            yield
        finally:
            self._open_contexts -= 1
            if self._open_contexts == 0:
                for layer in layers:
                    del layer.call  # the method of its class is visible again

    def _layer(self, name: str) -> Any:
        if len(self._layers[name]) > 1:
            raise UsageError(f"{len(self._layers[name])} layers are called {name!r}; give each layer a name of its own")
        return self._layers[name][0]


@contextlib.contextmanager
def collecting(wanted: Collection[str], layers: LayerOutputs) -> Iterator[TensorCollector]:
    """A context that collects the tensors of these names; a context inside it hides it.

    Raises:
      UsageError: at the end of the context, when a tensor that is asked for cannot be had.
    """
    collector = TensorCollector(wanted)
    token = _collector.set(collector)
    try:
        with layers.exposed(wanted):
            yield collector
    finally:
        _collector.reset(token)
    if collector.problem:
        raise UsageError(collector.problem)


def unknown_tensor(name: str, known: Collection[str], where: str, advice: str = "") -> UsageError:
    """Returns the error for a name that nothing exposes.

    Args:
      name: The name.
      known: The names of exposed tensors and of layers.
      where: What was searched, such as "the training step".
      advice: What to do beyond choosing a name that is known, from "; " on.
    """
    return UsageError(
        f"{where} exposes no tensor {name!r}, and no layer has this name; {suggestion(name, list(known))}{advice}"
    )


def check_evaluation_tensors(trainer: Any) -> None:
    """Traces the evaluation step if tensors of it are asked for by name, so that a miss ends a run before it trains.

    Runs eagerly, on the host.

    Args:
      trainer: The trainer; one that does not evaluate, or has evaluations of its own, is not checked.

    Raises:
      UsageError: when the step exposes no tensor of such a name.
    """
    if trainer.own.steps or not trainer.eval_tensors.is_asked:
        return
    if not (trainer.evaluates and trainer.config.trainer.eval_tf_function):
        return
    for validation_set in trainer.validation:
        iterator = trainer.turn_to(validation_set.name).feed.iterator(fresh=False)
        tf.function(trainer.eval_step, autograph=False).get_concrete_function(iterator)


class StepTensors:
    """Keeps the values of tensors that the last step of a loop exposes, and updates metrics with tensors.

    Created in the scope of the strategy. Without a name that is asked for it has no variables, and adds no operation to
    a step.

    Args:
      what: "training" or "evaluation", for messages.
      config: The experiment's config, whose `trainer.metrics` may name tensors.
      metrics: The set of the metrics of these steps, which resets and reports the metrics of tensors.

    Attributes:
      values: The values of the last loop, as NumPy arrays by name; of several validation sets, by set and name.

    Raises:
      UsageError: when two of its metrics have the same name.
    """

    def __init__(self, what: str, config: Any, metrics: MetricSet) -> None:
        self._what = what
        self._metric_set = metrics
        self._strategy = tf.distribute.get_strategy()
        # A program of XLA cannot change the shape of a variable.
        self._is_fused = what == "training" and getattr(config.trainer, "fuse_steps", 1) > 1
        self._fields: dict[str, str] = {}  # by the tensor whose value is asked for: who asks
        self._variables: dict[str, tf.Variable] = {}
        self._dtypes: dict[str, tf.DType] = {}
        self._layers: tuple[Any, LayerOutputs] | None = None
        self._is_traced = False
        self.values: dict[str, Any] = {}

        self._metrics = configured_metrics(config, of_tensors=True)
        for metric, _, field in self._metrics:
            metrics.add_tensor_metric(metric, field)

    def ask(self, name: str, where: str) -> None:
        """Asks for the value of a tensor in the last step of each loop; called before the step is traced.

        Args:
          name: The name that a step or a model exposes, or the name of a layer.
          where: Who asks, for messages, such as "trainer.summaries".

        Raises:
          UsageError: when the step is traced already, or the trainer cannot hand out tensors.
        """
        if name in self._fields:
            return
        if self._is_traced:
            raise UsageError(f"{where}: the tensor {name!r} is asked for after the first {self._what} step; ask before")
        if isinstance(self._strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise UsageError(f"{where}: asynchronous training has no last step; feed the tensor to a metric instead")
        self._fields[name] = where

    @property
    def is_asked(self) -> bool:
        """Whether any tensor is asked for."""
        return bool(self._wanted)

    @property
    def value_variables(self) -> list[tf.Variable]:
        """The variables that hold the values, which no checkpoint needs."""
        return list(self._variables.values())

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns an entry for the results of a loop, which `read` takes; called in cross-replica context."""
        values = {}
        for name, variable in self._variables.items():
            parts = self._strategy.experimental_local_results(variable)
            values[name] = {
                replica: tf.cast(part.read_value(), self._dtypes[name]) for replica, part in enumerate(parts)
            }
        return {_KEY: values} if values else {}

    def read(self, results: dict[str, Any], validation_set: str = "") -> None:
        """Takes the values from the results of a loop; runs eagerly, on the host.

        Args:
          results: The results of a loop, NumPy values.
          validation_set: The name of the evaluated set, if there are several.

        Raises:
          UsageError: when a subclass of the trainer has a step of its own, which captures no tensors.
        """
        values = {name: _over_replicas(list(parts.values())) for name, parts in results.pop(_KEY, {}).items()}
        for name, field in self._fields.items():
            if name not in values and self._metric_set.loss.reported:
                raise UsageError(
                    f"{field}: the tensor {name!r} has no value, because the trainer's {self._what} step is its own; "
                    "call the method of the superclass there"
                )
        if validation_set:
            self.values[validation_set] = values
        else:
            self.values = values

    @contextlib.contextmanager
    def captured(self, model: Any) -> Iterator[dict[str, tf.Tensor]]:
        """A context of a step on a replica, which yields a dict for `store_tensors`.

        After the context the dict has the tensors that are asked for, by name.

        Args:
          model: The model of the step, whose layers are known by name.

        Raises:
          UsageError: at the end of the context, when a tensor that is asked for cannot be had.
        """
        self._is_traced = True
        tensors: dict[str, tf.Tensor] = {}
        wanted = self._wanted
        if not wanted:
            yield tensors
            return

        if self._layers is None or self._layers[0] is not model:
            self._layers = model, LayerOutputs(model)
        layers = self._layers[1]
        with collecting(wanted, layers) as collector:
            yield tensors
        for name, field in wanted.items():
            if name not in collector.tensors:
                advice = "; a tensor of train_step has to be exposed in validation_step, too, for evaluations"
                advice = advice if self._what == "evaluation" else ""
                known = {*collector.known, *layers.names}
                raise unknown_tensor(name, known, f"{field}: the {self._what} step", advice)
        tensors.update(collector.tensors)

    @tf.autograph.experimental.do_not_convert
    def store_tensors(self, tensors: Mapping[str, tf.Tensor]) -> None:
        """Updates the metrics and stores the values of the tensors of a step; runs in graph, on a replica.

        Args:
          tensors: The tensors of `captured`.
        """
        if not tensors:
            return
        for metric, name, _ in self._metrics:
            metric.update_state(tensors[name])
        if self._fields:
            values = {name: tensors[name] for name in self._fields}
            tf.distribute.get_replica_context().merge_call(self._store, args=(values,))

    @property
    def _wanted(self) -> dict[str, str]:
        """The names that are asked for, each with who asks."""
        return {**{name: field for _, name, field in self._metrics}, **self._fields}

    @tf.autograph.experimental.do_not_convert
    def _store(self, strategy: tf.distribute.Strategy, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            parts = strategy.experimental_local_results(value)
            variable = self._variable(name, parts[0])
            for local, part in zip(strategy.experimental_local_results(variable), parts, strict=True):
                local.assign(tf.cast(part, local.dtype))

    def _variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        """Returns the variable that holds a value for each replica; it is created when the step is traced."""
        shape = value.shape if self._is_fused else tf.TensorShape(None)
        if self._is_fused and not shape.is_fully_defined():
            raise UsageError(
                f"{self._fields[name]}: the tensor {name!r} has the shape {shape}, and fused steps need "
                "a shape that is known before they run; batch with drop_remainder=True, or set "
                "trainer.fuse_steps=1"
            )
        self._dtypes[name] = value.dtype
        # TensorFlow keeps int32 variables on the CPU, where a compiled program on a GPU cannot reach them.
        dtype = tf.int64 if self._is_fused and value.dtype == tf.int32 else value.dtype
        variable = self._variables.get(name)
        if variable is not None and variable.dtype == dtype and variable.shape.is_compatible_with(shape):
            return variable
        with tf.init_scope(), self._strategy.scope():
            self._variables[name] = tf.Variable(
                tf.zeros(shape if self._is_fused else [], dtype),
                trainable=False,
                shape=shape,
                name="exposed",
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
            )
        return self._variables[name]


def _over_replicas(parts: Sequence[Any]) -> Any:
    """Returns the value over the replicas of this worker: scalars are averaged, others concatenated."""
    if len(parts) == 1:
        return parts[0]
    if np.ndim(parts[0]):
        return np.concatenate(parts)
    return np.mean(parts, dtype=np.result_type(parts[0], np.float32))


def _unnamed_in(model: keras.Sequential) -> set[int]:
    """Returns the `id` of the functional model that a Sequential of Keras holds, whose name the user does not know."""
    own = {id(layer) for layer in model.layers}
    return {id(part) for part in tf.train.TrackableView(model).children(model).values()} - own


def _exposing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `call` of a layer, which also exposes what it returns."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(call)
    def exposing(*args: Any, **kwargs: Any) -> Any:
        return expose(name, converted(call)(*args, **kwargs))

    return exposing
