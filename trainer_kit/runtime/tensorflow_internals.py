"""The private names of TensorFlow that trainer_kit needs. No other module may use one.

Each is wrapped in one function, whose docstring says why no public way exists and what happens in a
release of TensorFlow without the name. When a name is gone or has changed,
tests/engine/runtime/test_tensorflow_internals.py fails. Imports are inside the functions, so that
one missing name costs one feature.
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

from trainer_kit.errors import TrainerKitError, UsageError

_LOG = logging.getLogger(__name__)

# The global seed of an operation that has a seed, while no global seed is set.
_DEFAULT_GRAPH_SEED = 87654321

# The value of a setting that a dataset does not have.
_MISSING = "missing"


def single_threaded_executor() -> AbstractContextManager[Any]:
    """Returns a context in which TensorFlow functions run on one thread.

    Runs eagerly, on the host. `tf.function` and `tf.config` choose no executor. Without the name
    the run does not begin.

    Raises:
      UsageError: when this TensorFlow cannot do it.
    """
    try:
        from tensorflow.python.eager import context

        return context.function_executor_type("SINGLE_THREADED_EXECUTOR")
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"runtime.executor=single_threaded: TensorFlow {tf.__version__} has no such executor"
            f" ({error}); set executor=default"
        ) from error


@contextlib.contextmanager
def restart_operation_seeds() -> Iterator[None]:
    """Restarts the seeds of operations from the global seed for the block.

    Afterwards the generator of the seeds is restored. Runs eagerly, on the host.

    `tf.random.set_seed` restarts the seeds too, but then later operations draw the seeds of earlier
    ones again, and all random operations lose their state. The seeds that were drawn cannot be
    read. Without the name nothing is done, and a warning says so: the seeds then depend on how many
    random operations were created before.
    """
    try:
        from tensorflow.python.eager import context

        eager_context = context.context()
        seed = context.global_seed()
        # No generator exists before a seed is set.
        generator = None if seed is None else eager_context._rng
    except (ImportError, AttributeError) as error:
        _LOG.warning(
            "TensorFlow %s does not expose its seed generator (%s): shuffles and random operations"
            " of the data without a seed of their own may differ after a rollback; give them seeds",
            *(tf.__version__, error),
        )
        yield
        return

    if seed is None:
        yield
        return

    eager_context._rng = random.Random(seed)
    try:
        yield
    finally:
        eager_context._rng = generator


def has_global_seed() -> bool:
    """Whether `tf.random.set_seed` was called; runs eagerly, on the host.

    TensorFlow has no public way to read the global seed. While none is set, an operation that has a
    seed gets a constant as the global one. In a release with another constant the answer is True.
    """
    return bool(tf.compat.v1.get_seed(1)[0] != _DEFAULT_GRAPH_SEED)


def convert_with_autograph(
    function: Callable[..., Any], *, convert_own_code: bool = True
) -> Callable[..., Any]:
    """Returns a function, model or layer converted by AutoGraph for callers that are not converted.

    Runs in graph, in any context. What users have marked `do_not_convert`, and the layers of Keras
    3, stay as they are.

    `tf.autograph.to_graph` takes functions and methods with a source only, and converts the marked
    ones too. Without the name it is used for those, and all else stays as it is: an `if` over a
    tensor in a model then fails.

    Args:
      function: What to convert.
      convert_own_code: Whether its own code is converted, or only what converts itself unless
        AutoGraph is off around it, as the layers, losses and metrics of tf_keras do.
    """
    # For a method of a metric of tf_keras AutoGraph would convert what is decorated, and then not
    # call the decorator.
    if inspect.ismethod(function) and hasattr(function, "_tf_decorator"):
        function = functools.partial(function)

    try:
        neither_on_nor_off = _get_outer_control_status()
        convert = functools.partial(tf.__internal__.autograph.tf_convert, ctx=neither_on_nor_off)
        if convert_own_code:
            return convert(function)
        return convert(functools.partial(function), convert_by_default=False)
    except AttributeError:
        if convert_own_code and inspect.isroutine(function):
            return tf.autograph.to_graph(function)
        return function


@functools.cache
def _get_outer_control_status() -> Any:
    """Returns AutoGraph's state outside of every tf.function."""
    # In a thread of its own no function is traced.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(tf.__internal__.autograph.control_status_ctx).result()


def get_trackable_class() -> type:
    """Returns the base class of all objects that a checkpoint can contain.

    Hash tables, optimizers and loaded models have no other class in common that is public. Without
    the name the result is tf.Module, which covers fewer: their variables are not found where a task
    has them in an attribute.
    """
    return _get_tracking_class("Trackable")


def get_auto_trackable_class() -> type:
    """Returns the class of objects that a checkpoint tracks by their attributes, and only by these.

    Without the name tf.Module is used: best weights of a model with an attribute of the same name
    as one of tf.Module, such as `name`, could not be written.
    """
    return _get_tracking_class("AutoTrackable")


def _get_tracking_class(name: str) -> type:
    try:
        return getattr(tf.__internal__.tracking, name)
    except AttributeError:
        return tf.Module


def stop_async_saver(checkpoint: tf.train.Checkpoint) -> Exception | None:
    """Ends the thread of asynchronous saves after the save in flight, and frees its objects.

    A later save starts another thread. TensorFlow leaves the thread to the end of the process: it
    would keep the model, and its copy of every variable, while other runs follow in the same
    process. Without the names that is what happens.

    Returns:
      The error of the last save, if it failed and no later save has raised it. Without the names
      None: the CheckpointManager still sees that the files of the save are missing, but not why.
    """
    # None before the first asynchronous save.
    saver = getattr(checkpoint, "_async_checkpointer_impl", None)
    join = getattr(saver, "_join_async_save_thread", None)
    if join is None:
        return None

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
    the functions too, but not the tensors that they capture. Without the private name the result is
    empty: state that only an inner function writes is not found, and the FLOPs of called functions
    are not counted. The result of that count names the calls.
    """
    functions = getattr(graph, "_functions", {})
    return {
        name: function.graph
        for name, function in functions.items()
        if getattr(function, "graph", None) is not None
    }


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an existing operation of a graph wait for other operations; runs in graph.

    `tf.control_dependencies` is for operations that are created inside it, and around the whole
    step it makes steps of 0.1 ms 4 to 16 % slower. Without the name nothing waits: a batch that
    cannot be read may then come after a write, and a run that fails there goes back to its last
    checkpoint.
    """
    add_inputs = getattr(operation, "_add_control_inputs", None)
    if add_inputs:
        add_inputs(list(others))


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
    left as they are, since the generator differs between replicas. Without the names all operations
    are left, and the check for an exact resume warns of them.

    Args:
      generator: The generator, created in the scope of the strategy. None: no operation is
        replaced.
    """
    if generator is None or tf.executing_eagerly():
        yield
        return

    try:
        from tensorflow.python.eager.polymorphic_function import function_context
        from tensorflow.python.ops import gen_random_ops

        make_context = function_context.make_function_context
        functions = {name: getattr(gen_random_ops, name) for name in _STATELESS_TWINS}
    except (ImportError, AttributeError):
        yield
        return

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

    `tf.Variable` is an abstract class, whose constructor cannot be used by a subclass. Without the
    name the class of a new variable is taken.
    """
    try:
        from tensorflow.python.ops.resource_variable_ops import ResourceVariable

        return ResourceVariable
    except ImportError:
        with tf.init_scope():
            return type(tf.Variable(0.0, trainable=False))


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
    sessions. Without the name nothing can be exported.

    Args:
      function: The function.
      variables: Its variables, and any others.
      operations: The names of the operations to keep, along with what they depend on.

    Raises:
      UsageError: when this TensorFlow cannot do it.
    """
    try:
        from tensorflow.python.framework.convert_to_constants import (
            convert_variables_to_constants_v2,
        )
    except ImportError as error:
        raise UsageError(
            f"TensorFlow {tf.__version__} cannot export a graph with its variables ({error}); save"
            " a checkpoint instead"
        ) from error
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
    """Returns the datasets that a dataset is made from directly.

    Raises:
      TrainerKitError: when this TensorFlow does not expose the inputs: whether a resume is exact is
        then unknown.
    """
    try:
        return list(dataset._inputs())
    except AttributeError as error:
        raise _build_not_exposed_error(dataset, error) from error


def get_dataset_functions(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that a dataset calls itself, such as that of a map.

    Raises:
      TrainerKitError: when this TensorFlow does not expose the functions, which could contain
        random numbers and Python.
    """
    try:
        return [wrapper.function.graph for wrapper in dataset._functions()]
    except AttributeError as error:
        raise _build_not_exposed_error(dataset, error) from error


def is_nondeterministic(dataset: tf.data.Dataset) -> bool:
    """Whether a parallel map, batch or file reader was made with deterministic=False.

    The graph of the dataset has the setting too, but contains all arrays in memory: 2 s for 256
    MiB, and an error from 2 GiB on. Without an answer every parallel map over such arrays would
    have to count as one in any order.

    Raises:
      TrainerKitError: when this TensorFlow does not expose the setting for a parallel map.
    """
    deterministic = getattr(dataset, "_deterministic", _MISSING)
    _check_settings_exist(dataset, "ParallelMapDataset", deterministic)
    return str(deterministic).lower() == "false"


def is_unseeded(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset draws random numbers that neither its own seed nor the global seed fixes.

    With neither, tf.data keeps two zeros. Both names are needed: a global seed of 0 makes the first
    a zero, and a seed of 0 the second. The graph of the dataset has the seeds too, but contains all
    arrays in memory.

    Raises:
      TrainerKitError: when this TensorFlow does not expose the seeds for a shuffle or
        Dataset.random.
    """
    seeds = [getattr(dataset, name, _MISSING) for name in ("_seed", "_seed2")]
    _check_settings_exist(dataset, "ShuffleDataset RandomDataset", *seeds)
    return all(tf.is_tensor(seed) and int(seed) == 0 for seed in seeds)


def is_reshuffled_each_iteration(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is a shuffle that draws another order for each new iterator.

    The graph of the dataset has the setting too, but contains all arrays in memory.

    Raises:
      TrainerKitError: when this TensorFlow does not expose the setting for a shuffle.
    """
    setting = getattr(dataset, "_reshuffle_each_iteration", _MISSING)
    _check_settings_exist(dataset, "ShuffleDataset", setting)
    return setting is not False and setting is not _MISSING


def _check_settings_exist(dataset: tf.data.Dataset, class_names: str, *settings: Any) -> None:
    """Raises TrainerKitError when a dataset of one of the classes lacks a setting.

    Datasets of other classes do not have the settings.
    """
    has_settings = type(dataset).__name__.lstrip("_") in class_names.split()
    if has_settings and any(setting is _MISSING for setting in settings):
        raise _build_not_exposed_error(dataset, "a setting is gone")


def _build_not_exposed_error(
    dataset: tf.data.Dataset, error: AttributeError | str
) -> TrainerKitError:
    return TrainerKitError(
        f"TensorFlow {tf.__version__} does not expose what a {type(dataset).__name__} is made of"
        f" ({error}), so trainer_kit cannot check whether a resume is exact;"
        " install the TensorFlow of requirements.lock, or return a Source such as ArraySource"
    )


class SummaryState:
    """A separate default summary writer, step and condition, for code that sets its own.

    A callback may begin `writer.as_default()` in one method and end it in another, and the engine's
    contexts begin and end between the two. TensorFlow offers contexts only, which have to be
    nested. Without the name the code shares the engine's state, and such a callback fails at the
    end of the training.
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
        state = self._get_tensorflow_state()
        values = {}
        for name in self._FIELDS:
            if hasattr(state, name):
                values[name] = getattr(state, name)
        return values

    def _write_values(self, values: Mapping[str, object]) -> None:
        state = self._get_tensorflow_state()
        for name, value in values.items():
            setattr(state, name, value)

    @staticmethod
    @functools.cache
    def _get_tensorflow_state() -> Any:
        try:
            from tensorflow.python.ops import summary_ops_v2

            return summary_ops_v2._summary_state
        except (ImportError, AttributeError):
            return None
