"""Named tensors: `expose` gives a tensor a name, and `collecting` receives the tensors of the names that are asked for.

A name that nobody asks for costs nothing: `expose` adds no operation, and TensorFlow prunes what only it would use.
The output of a Keras layer is known by the name of the layer, without a call of `expose`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError, suggestion
from trainer_kit.inputs.autograph import converted

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
      problem: Why a tensor that is asked for cannot be had; "" if there is no problem.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        self._wanted = wanted
        self._graph = tf.compat.v1.get_default_graph()
        self.tensors: dict[str, tf.Tensor] = {}
        self.known: set[str] = set()
        self.problem = ""

    def add(self, name: str, tensor: Any) -> None:
        """Records a tensor if its name is asked for, or the problem if it cannot be had.

        The problem is not raised here, since Keras would add the arguments of the layer to the message.
        """
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
            self.problem = f"expose({name!r}): a {kind} is not a dense tensor; expose one of its tensors"

    def add_output(self, name: str, outputs: Any) -> None:
        """Records the output of a layer."""
        if tf.nest.is_nested(outputs):
            kind = type(outputs).__name__
            self.problem = f"the layer {name!r} returns a {kind}; call trainer_kit.expose on one of its tensors"
        else:
            self.add(name, outputs)


class LayerOutputs:
    """Exposes the outputs of the layers of a model by the names of the layers, while one of its contexts is open.

    Args:
      model: A Keras 3 model, a tf_keras model or a tf.Module; layers inside layers count too.
    """

    def __init__(self, model: Any) -> None:
        self._layers: dict[str, list[Any]] = {}
        parts = {id(one): one for one in tf.train.TrackableView(model).descendants()}
        inner = {key for one in parts.values() if isinstance(one, keras.Sequential) for key in _unnamed_in(one)}
        for key, one in parts.items():
            is_called = callable(getattr(one, "call", None)) and type(one).__name__ != "InputLayer"
            if is_called and key not in inner and isinstance(getattr(one, "name", None), str):
                self._layers.setdefault(one.name, []).append(one)
        self._lock, self._open, self._exposing = threading.Lock(), 0, list[Any]()

    @property
    def names(self) -> list[str]:
        """The names of all layers."""
        return list(self._layers)

    @contextlib.contextmanager
    def exposed(self, wanted: Collection[str]) -> Iterator[None]:
        """A context in which the layers of these names expose their outputs; other names are ignored.

        The contexts of several replicas overlap: each replica is traced in a thread of its own.

        Raises:
          UsageError: when two layers have a name that is wanted.
        """
        with self._lock:
            if self._open == 0:
                self._exposing = [self._layer(name) for name in wanted if name in self._layers]
                for layer in self._exposing:
                    layer.call = _exposing(layer.name, layer.call)
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    for layer in self._exposing:
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


def _unnamed_in(model: keras.Sequential) -> set[int]:
    """Returns the `id` of the functional model that a Sequential of Keras holds, whose name the user does not know."""
    own = {id(layer) for layer in model.layers}
    return {id(part) for part in tf.train.TrackableView(model).children(model).values()} - own


def _exposing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `call` of a layer, which also exposes what it returns."""

    @tf.autograph.experimental.do_not_convert
    @functools.wraps(call)
    def exposing(*args: Any, **kwargs: Any) -> Any:
        outputs = converted(call)(*args, **kwargs)
        collector = _collector.get()
        if collector is not None:
            collector.add_output(name, outputs)
        return outputs

    return exposing
