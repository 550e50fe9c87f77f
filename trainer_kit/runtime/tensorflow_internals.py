"""The private names of TensorFlow that trainer_kit needs. No other module may use one.

Each is wrapped in one function, whose docstring says why no public way exists. pyproject.toml
allows the minor releases of TensorFlow that have all of them. When a name is gone or has changed in
another release, tests/engine/runtime/test_tensorflow_internals.py fails.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import functools
import inspect
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.eager.polymorphic_function import function_context
from tensorflow.python.ops import gen_random_ops, summary_ops_v2
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

# The global seed of an operation that has a seed, while no global seed is set.
_DEFAULT_GRAPH_SEED = 87654321


def single_threaded_executor() -> AbstractContextManager[Any]:
    """Returns a context in which TensorFlow functions run on one thread.

    Runs eagerly, on the host. `tf.function` and `tf.config` choose no executor.
    """
    return context.function_executor_type("SINGLE_THREADED_EXECUTOR")


@contextlib.contextmanager
def restart_operation_seeds() -> Iterator[None]:
    """Restarts the seeds of operations from the global seed for the block.

    Afterwards the generator of the seeds is restored. Runs eagerly, on the host.

    `tf.random.set_seed` restarts the seeds too, but then later operations draw the seeds of earlier
    ones again, and all random operations lose their state. The seeds that were drawn cannot be
    read.
    """
    eager_context = context.context()
    seed = context.global_seed()
    # No generator exists before a seed is set.
    if seed is None:
        yield
        return

    generator = eager_context._rng
    eager_context._rng = random.Random(seed)
    try:
        yield
    finally:
        eager_context._rng = generator


def has_global_seed() -> bool:
    """Whether `tf.random.set_seed` was called; runs eagerly, on the host.

    TensorFlow has no public way to read the global seed. While none is set, an operation that has a
    seed gets a constant as the global one.
    """
    return bool(tf.compat.v1.get_seed(1)[0] != _DEFAULT_GRAPH_SEED)


def convert_with_autograph(
    function: Callable[..., Any], *, convert_own_code: bool = True
) -> Callable[..., Any]:
    """Returns a function, model or layer converted by AutoGraph for callers that are not converted.

    Runs in graph, in any context. What users have marked `do_not_convert`, and the layers of Keras
    3, stay as they are.

    `tf.autograph.to_graph` takes functions and methods with a source only, and converts the marked
    ones too.

    Args:
      function: What to convert.
      convert_own_code: Whether its own code is converted, or only what converts itself unless
        AutoGraph is off around it, as the layers, losses and metrics of tf_keras do.
    """
    # For a method of a metric of tf_keras AutoGraph would convert what is decorated, and then not
    # call the decorator.
    if inspect.ismethod(function) and hasattr(function, "_tf_decorator"):
        function = functools.partial(function)

    neither_on_nor_off = _get_outer_control_status()
    convert = functools.partial(tf.__internal__.autograph.tf_convert, ctx=neither_on_nor_off)
    if convert_own_code:
        return convert(function)
    return convert(functools.partial(function), convert_by_default=False)


@functools.cache
def _get_outer_control_status() -> Any:
    """Returns AutoGraph's state outside of every tf.function."""
    # In a thread of its own no function is traced.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(tf.__internal__.autograph.control_status_ctx).result()


def get_trackable_class() -> type:
    """Returns the base class of all objects that a checkpoint can contain.

    Hash tables, optimizers and loaded models have no other class in common that is public.
    """
    return tf.__internal__.tracking.Trackable


def get_auto_trackable_class() -> type:
    """Returns the class of objects that a checkpoint tracks by their attributes, and only by these.

    Objects of the public class tf.Module have attributes of their own, such as `name`.
    """
    return tf.__internal__.tracking.AutoTrackable


def stop_async_saver(checkpoint: tf.train.Checkpoint) -> Exception | None:
    """Ends the thread of asynchronous saves after the save in flight, and frees its objects.

    A later save starts another thread. TensorFlow leaves the thread to the end of the process: it
    would keep the model, and its copy of every variable, while other runs follow in the same
    process.

    Returns:
      The error of the last save, if it failed and no later save has raised it.
    """
    # None before the first asynchronous save.
    saver = checkpoint._async_checkpointer_impl
    if saver is None:
        return None

    join = saver._join_async_save_thread
    atexit.unregister(join)

    # The failure is returned, so TensorFlow need not log it.
    def drop_record(record: logging.LogRecord) -> bool:
        return False

    absl = logging.getLogger("absl")
    failure = None
    absl.addFilter(drop_record)
    try:
        join()
    except Exception as error:
        failure = error
    finally:
        absl.removeFilter(drop_record)

    checkpoint._async_checkpointer_impl = None
    return failure


def get_called_functions(graph: tf.Graph) -> dict[str, tf.Graph]:
    """Returns the graphs of the functions that a traced graph can call, by name.

    The names are those that operations of the graph call the functions by. A graph's GraphDef has
    the functions too, but not the tensors that they capture.
    """
    return {
        name: function.graph
        for name, function in graph._functions.items()
        if getattr(function, "graph", None) is not None
    }


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an existing operation of a graph wait for other operations; runs in graph.

    `tf.control_dependencies` is for operations that are created inside it, and around the whole
    step it makes steps of 0.1 ms 4 to 16 % slower.
    """
    operation._add_control_inputs(list(others))


# Stateless operations that draw from a seed of shape [2], by the name of the function that makes
# the random operation of the same distribution.
_STATELESS_TWINS: dict[str, Callable[..., tf.Tensor]] = {
    "random_standard_normal": tf.raw_ops.StatelessRandomNormal,
    "random_uniform": tf.raw_ops.StatelessRandomUniform,
    "truncated_normal": tf.raw_ops.StatelessTruncatedNormal,
    "random_uniform_int": tf.raw_ops.StatelessRandomUniformInt,
    "multinomial": tf.raw_ops.StatelessMultinomial,
    "random_gamma": lambda seed, shape, alpha: tf.raw_ops.StatelessRandomGammaV2(
        shape=_samples_shape(shape, alpha), seed=seed, alpha=alpha
    ),
    "random_poisson_v2": lambda seed, shape, rate, dtype: tf.raw_ops.StatelessRandomPoisson(
        shape=_samples_shape(shape, rate), seed=seed, lam=rate, dtype=dtype
    ),
    "random_shuffle": tf.random.experimental.stateless_shuffle,
}


def _samples_shape(shape: tf.Tensor, parameter: tf.Tensor) -> tf.Tensor:
    """Returns the shape of `shape` samples for each value of a parameter.

    A stateless operation takes this whole shape.
    """
    return tf.concat([shape, tf.shape(parameter, out_type=shape.dtype)], 0)


@contextlib.contextmanager
def stateless_random_operations(generator: tf.random.Generator | None) -> Iterator[None]:
    """Makes random operations of the graph that is being traced draw from a generator.

    In eager mode nothing changes. `tf.random.normal`, `tf.nn.dropout` and the like keep their state
    in their kernels, where no checkpoint reaches it, and TensorFlow has no public place to replace
    them. Here they become stateless operations with seeds of the generator, also in loops, branches
    and functions, which are traced again.

    Each replica has a separate stream. As in TensorFlow, operations of one graph that have the same
    seed draw the same numbers: two shuffles stay in step. Operations that run across replicas are
    left as they are, since the generator differs between replicas.

    Args:
      generator: The generator, created in the scope of the strategy. None: no operation is
        replaced.
    """
    if generator is None or tf.executing_eagerly():
        yield
        return

    make_context = function_context.make_function_context
    functions = {name: getattr(gen_random_ops, name) for name in _STATELESS_TWINS}
    outer = tf.compat.v1.get_default_graph()
    seeds: dict[Any, tf.Tensor] = {}

    def next_seed(graph: tf.Graph, *op_seeds: int | None) -> tf.Tensor:
        key = (graph, tf.distribute.get_replica_context(), op_seeds)
        # An operation without a seed draws a new one. Operations with the same seed share it.
        if key not in seeds or not any(op_seeds):
            # XLA takes no other dtype.
            seeds[key] = generator.uniform_full_int([2], dtype=tf.int32)
        return seeds[key]

    def replace(name: str) -> Callable[..., tf.Tensor]:
        # A block inside another one wraps the functions of that one.
        @functools.wraps(functions[name])
        def draw(
            *arguments: Any, seed: int | None = 0, seed2: int | None = 0, **options: Any
        ) -> tf.Tensor:
            graph = tf.compat.v1.get_default_graph()
            if not _is_inside(graph, outer) or tf.distribute.in_cross_replica_context():
                return functions[name](*arguments, seed=seed, seed2=seed2, **options)

            signature = inspect.signature(functions[name])
            named = signature.bind(*arguments, **options).arguments
            return _STATELESS_TWINS[name](seed=next_seed(graph, seed, seed2), **named)

        return draw

    def make_own_context(*arguments: Any) -> Any:
        """Returns the key under which a tf.function stores a trace.

        A trace of this block has the generator in its key, so that it is used only here.
        """
        key = make_context(*arguments)
        if not _is_inside(tf.compat.v1.get_default_graph(), outer):
            return key
        return key._replace(context=(key.context, generator))

    function_context.make_function_context = make_own_context
    for name in functions:
        setattr(gen_random_ops, name, replace(name))
    try:
        yield
    finally:
        function_context.make_function_context = make_context
        for name, function in functions.items():
            setattr(gen_random_ops, name, function)


def get_resource_variable_class() -> type:
    """Returns the class of the variables that TensorFlow 2 creates on one device.

    `tf.Variable` is an abstract class, whose constructor cannot be used by a subclass.
    """
    return ResourceVariable


def compare_tensors_by_identity(graph: tf.Graph) -> None:
    """Makes the tensors of a graph hashable, and `==` between them a comparison of objects.

    `tf.compat.v1.disable_tensor_equality` does this for the whole process, in which Keras and other
    code then fail. Only tensors of this graph change, so the rest of the process keeps the
    operators of TensorFlow 2.
    """
    graph.compares_by_identity = True
    if getattr(tf.Tensor, "compares_by_identity", False):
        return

    tensor_hash = tf.Tensor.__hash__
    tensor_equal = tf.Tensor.__eq__
    tensor_not_equal = tf.Tensor.__ne__

    def is_compared(tensor: tf.Tensor) -> bool:
        # An eager tensor has no graph, and raises an AttributeError.
        graph = getattr(tensor, "graph", None)
        while graph is not None:
            if getattr(graph, "compares_by_identity", False):
                return True
            graph = getattr(graph, "outer_graph", None)
        return False

    def compute_hash(self: tf.Tensor) -> int:
        return id(self) if is_compared(self) else tensor_hash(self)

    def equal(self: tf.Tensor, other: object) -> Any:
        return self is other if is_compared(self) else tensor_equal(self, other)

    def not_equal(self: tf.Tensor, other: object) -> Any:
        return self is not other if is_compared(self) else tensor_not_equal(self, other)

    tf.Tensor.compares_by_identity = True
    tf.Tensor.__hash__ = compute_hash
    tf.Tensor.__eq__ = equal
    tf.Tensor.__ne__ = not_equal


def freeze_function(
    function: Any, variables: Sequence[tf.Variable], operations: Sequence[str]
) -> Any:
    """Returns the graph of a ConcreteFunction as a GraphDef whose variables are constants.

    Runs eagerly, on the host. The public `tf.compat.v1.graph_util` only converts variables of
    sessions.

    Args:
      function: The function.
      variables: Its variables, and any others.
      operations: The names of the operations to keep, along with what they depend on.
    """
    # Only an export needs this module.
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    # A function that was cut out of another one does not know its variables.
    captured_ids = {id(tensor) for tensor in function.captured_inputs}
    function.graph.variables = [
        variable for variable in variables if id(variable.handle) in captured_ids
    ]
    with tf.init_scope():
        frozen = convert_variables_to_constants_v2(function, lower_control_flow=False)
    graph_def = frozen.graph.as_graph_def()
    return tf.compat.v1.graph_util.extract_sub_graph(graph_def, list(operations))


def _is_inside(graph: tf.Graph | None, outer: tf.Graph) -> bool:
    """Whether a graph is `outer`, or is traced inside it."""
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


# The functions below read what a tf.data.Dataset is made of. `tf.raw_ops.DatasetToGraphV2` writes
# it too, but contains all arrays of a dataset in memory, fails above 2 GiB, and has lost the Python
# functions.


def get_input_datasets(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns the datasets that a dataset is made from directly."""
    return list(dataset._inputs())


def get_dataset_functions(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that a dataset calls itself, such as that of a map."""
    return [wrapper.function.graph for wrapper in dataset._functions()]


def is_nondeterministic(dataset: tf.data.Dataset) -> bool:
    """Whether a parallel map, batch or file reader was made with deterministic=False.

    The graph of the dataset has the setting too, but contains all arrays in memory: 2 s for 256
    MiB, and an error from 2 GiB on. Other datasets have no such attribute.
    """
    deterministic = getattr(dataset, "_deterministic", "")
    return str(deterministic).lower() == "false"


def is_unseeded(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset draws random numbers that neither its own seed nor the global seed fixes.

    With neither, tf.data keeps two zeros. Both names are needed: a global seed of 0 makes the first
    a zero, and a seed of 0 the second. The graph of the dataset has the seeds too, but contains all
    arrays in memory.
    """
    seeds: list[Any] = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    return all(tf.is_tensor(seed) and int(seed) == 0 for seed in seeds)


def is_reshuffled_each_iteration(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a shuffle that draws another order for each new iterator.

    The graph of the dataset has the setting too, but contains all arrays in memory.
    """
    return getattr(dataset, "_reshuffle_each_iteration", False) is not False


class SummaryState:
    """A separate default summary writer, step and condition, for code that sets its own.

    A callback may begin `writer.as_default()` in one method and end it in another, and the engine's
    contexts begin and end between the two. TensorFlow offers contexts only, which have to be
    nested.
    """

    _FIELDS = ("is_recording", "is_recording_distribution_strategy", "writer", "step")

    def __init__(self) -> None:
        self._values = self._read_values()

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        """Puts this summary state into the thread while the context is open.

        Code of the user that runs in the context sees and changes this state. When the context
        ends, its changes are kept here, and the thread has the summary state of trainer_kit again.
        """
        engine_values = self._read_values()
        self._write_values(self._values)
        try:
            yield
        finally:
            self._values = self._read_values()
            self._write_values(engine_values)

    def _read_values(self) -> dict[str, Any]:
        state = summary_ops_v2._summary_state
        return {name: getattr(state, name) for name in self._FIELDS}

    def _write_values(self, values: Mapping[str, object]) -> None:
        for name, value in values.items():
            setattr(summary_ops_v2._summary_state, name, value)
