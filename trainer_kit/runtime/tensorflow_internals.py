"""The names of TensorFlow that are not public and that trainer_kit still needs. No other module may use one.

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from trainer_kit.errors import TrainerKitError, UsageError

_LOG = logging.getLogger(__name__)
_DEFAULT_GRAPH_SEED = (
    87654321  # the global seed of an op that has a seed of its own, while no global one is set
)
_MISSING = "missing"  # of a setting that a dataset does not have


def single_threaded_executor() -> AbstractContextManager[Any]:
    """Returns a context in which TensorFlow functions run on one thread; runs eagerly, on the host.

    `tf.function` and `tf.config` choose no executor. Without the name the run does not begin.

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
    """Restarts the seeds of operations from the global seed inside, and restores their generator afterwards.

    Runs eagerly, on the host. `tf.random.set_seed` does the first, but then later operations draw
    the seeds of earlier ones again, and all random operations lose their state; what has been drawn
    cannot be asked for. Without the name nothing is done, and a warning says so: the seeds then
    depend on how many random operations were made before.
    """
    try:
        from tensorflow.python.eager import context

        eager, seed = context.context(), context.global_seed()
        kept = None if seed is None else eager._rng  # there is none before a seed is set
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
    eager._rng = random.Random(seed)
    try:
        yield
    finally:
        eager._rng = kept


def has_global_seed() -> bool:
    """Whether `tf.random.set_seed` was called; runs eagerly, on the host.

    TensorFlow has no public way to read the global seed; with a seed of its own, an op gets a
    constant in its place while none is set. In a release with another constant the answer is True.
    """
    return bool(tf.compat.v1.get_seed(1)[0] != _DEFAULT_GRAPH_SEED)


def convert_with_autograph(
    function: Callable[..., Any], *, convert_own_code: bool = True
) -> Callable[..., Any]:
    """Returns a function, model or layer as AutoGraph makes a graph of it, in code that is itself not converted.

    Runs in graph, in any context. What users have marked `do_not_convert`, and the layers of Keras
    3, stay as they are. `tf.autograph.to_graph` takes functions and methods with a source only, and
    converts the marked ones too; without the name it is used for those, and all else stays as it
    is: an `if` over a tensor in a model then fails.

    Args:
      function: What to convert.
      convert_own_code: Whether its own code is converted, or only what converts itself unless
        AutoGraph is off around it, as the layers, losses and metrics of tf_keras do.
    """
    if inspect.ismethod(function) and hasattr(function, "_tf_decorator"):
        # A method of a metric of tf_keras: AutoGraph would convert what is decorated, which is then
        # not called.
        function = functools.partial(function)
    try:
        neither_on_nor_off = _get_outer_control_status()
        convert = functools.partial(tf.__internal__.autograph.tf_convert, ctx=neither_on_nor_off)
        return (
            convert(function)
            if convert_own_code
            else convert(functools.partial(function), convert_by_default=False)
        )
    except AttributeError:
        return (
            tf.autograph.to_graph(function)
            if convert_own_code and inspect.isroutine(function)
            else function
        )


@functools.cache
def _get_outer_control_status() -> Any:
    """AutoGraph's state as it is outside of every tf.function."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # where no function is traced
        return thread.submit(tf.__internal__.autograph.control_status_ctx).result()


def get_trackable_class() -> type:
    """Returns the base class of all objects that a checkpoint can hold; without the name tf.Module, which covers fewer.

    Hash tables, optimizers and loaded models have no other class in common that is public. Without
    the name their variables are not found where a task holds them in an attribute.
    """
    return _get_tracking_class("Trackable")


def get_auto_trackable_class() -> type:
    """Returns the class of objects whose attributes a checkpoint holds, and which have no others.

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
    """Ends the thread of asynchronous saves after the save in flight, and frees its objects; a later save starts one.

    TensorFlow leaves the thread to the end of the process: it would keep the model, and its copy of
    every variable, while other runs follow in the same process. Without the names it does just
    that.

    Returns:
      The error of the last save, if it failed and no later save has raised it. Without the names
      None: the CheckpointManager still sees that the files of the save are missing, but not why.
    """
    saver = getattr(
        checkpoint, "_async_checkpointer_impl", None
    )  # None before the first asynchronous save
    join = getattr(saver, "_join_async_save_thread", None)
    if join is None:
        return None
    atexit.unregister(join)
    absl = logging.getLogger("absl")
    failure, silence = None, lambda record: False
    absl.addFilter(silence)  # the failure is returned, and TensorFlow need not log it
    try:
        join()
    except Exception as error:
        failure = error
    finally:
        absl.removeFilter(silence)
    checkpoint._async_checkpointer_impl = None
    return failure


def get_called_functions(graph: Any) -> dict[str, tf.Graph]:
    """Returns the graphs of the functions that a traced graph knows, by the names that its operations call them by.

    A graph's GraphDef has the functions too, but not the tensors that they capture. Without the
    name there are none: state that only an inner function writes is not found, and the FLOPs of
    called functions are not counted; the result names the calls.
    """
    known = getattr(graph, "_functions", {}).items()
    return {
        name: function.graph
        for name, function in known
        if getattr(function, "graph", None) is not None
    }


def add_control_inputs(operation: tf.Operation, others: Sequence[tf.Operation]) -> None:
    """Makes an existing operation of a graph wait for other operations.

    `tf.control_dependencies` is for operations that are yet to be made, and around the whole step
    it makes steps of 0.1 ms 4 to 16 % slower. Without the name nothing waits: a batch that cannot
    be read may then come after a write, and a run that fails there goes back to its last
    checkpoint.
    """
    if wait := getattr(operation, "_add_control_inputs", None):
        wait(list(others))


# By the name of a function that makes a random operation: the same draw from a seed of shape [2].
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
    """Returns the shape of `shape` samples for each value of a parameter, which a stateless operation is given."""
    return tf.concat([shape, tf.shape(parameter, out_type=shape.dtype)], 0)


@contextlib.contextmanager
def stateless_random_operations(generator: tf.random.Generator | None) -> Iterator[None]:
    """Makes random operations of the graph that is being traced draw from a generator; in eager mode nothing changes.

    `tf.random.normal`, `tf.nn.dropout` and the like keep their state in their kernels, where no
    checkpoint reaches it, and TensorFlow has no public place to replace them. Here they become
    stateless operations with seeds of the generator, also in loops, branches and functions, which
    are traced again. Each replica has a stream of its own. As in TensorFlow, operations of one
    graph that have the same seed draw the same numbers: two shuffles stay in step. Operations that
    run across replicas are left as they are, since the generator differs between replicas. Without
    the names all are, and the check for an exact resume warns of them.

    Args:
      generator: The generator, created in the scope of the strategy; None: no operation is
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
        key = graph, tf.distribute.get_replica_context(), op_seeds
        if key not in seeds or not any(op_seeds):
            seeds[key] = generator.uniform_full_int([2], dtype=tf.int32)  # XLA takes no other dtype
        return seeds[key]

    def replace(name: str) -> Callable[..., tf.Tensor]:
        def draw(
            *arguments: Any, seed: int | None = 0, seed2: int | None = 0, **options: Any
        ) -> tf.Tensor:
            graph = tf.compat.v1.get_default_graph()
            if not _is_inside(graph, outer) or tf.distribute.in_cross_replica_context():
                return functions[name](*arguments, seed=seed, seed2=seed2, **options)
            named = inspect.signature(functions[name]).bind(*arguments, **options).arguments
            return _STATELESS_TWINS[name](seed=next_seed(graph, seed, seed2), **named)

        return draw

    def make_own_context(*arguments: Any) -> Any:
        """Returns the key under which a tf.function stores a trace: one with the generator is used here only."""
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


def _is_inside(graph: Any, outer: tf.Graph) -> bool:
    """Whether a graph is `outer`, or is traced inside it."""
    while graph is not None and graph is not outer:
        graph = getattr(graph, "outer_graph", None)
    return graph is outer


# What a tf.data.Dataset is made of. What `tf.raw_ops.DatasetToGraphV2` writes tells it too, but
# holds all arrays of a dataset in memory, fails above 2 GiB, and has lost the Python functions.


def get_input_datasets(dataset: Any) -> list[Any]:
    """Returns the datasets that a dataset is made from directly.

    Raises:
      TrainerKitError: when this TensorFlow does not expose them: whether a resume is exact is then
        unknown.
    """
    try:
        return list(dataset._inputs())
    except AttributeError as error:
        raise _build_not_exposed_error(dataset, error) from error


def get_dataset_functions(dataset: Any) -> list[tf.Graph]:
    """Returns the graphs of the functions that a dataset calls itself, such as that of a map.

    Raises:
      TrainerKitError: when this TensorFlow does not expose them: random numbers and Python could be
        in them.
    """
    try:
        return [wrapper.function.graph for wrapper in dataset._functions()]
    except AttributeError as error:
        raise _build_not_exposed_error(dataset, error) from error


def is_nondeterministic(dataset: Any) -> bool:
    """Whether a parallel map, batch or file reader was made with deterministic=False.

    The graph of the dataset has it too, but holds all arrays in memory: 2 s for 256 MiB, and an
    error from 2 GiB on. Without an answer every parallel map over such arrays would have to count
    as one in any order.

    Raises:
      TrainerKitError: when this TensorFlow does not expose it for a parallel map.
    """
    deterministic = getattr(dataset, "_deterministic", _MISSING)
    _check_exposed(dataset, "ParallelMapDataset", deterministic)
    return str(deterministic).lower() == "false"


def is_unseeded(dataset: Any) -> bool:
    """Whether a dataset draws random numbers which neither a seed of its own nor the global seed fixes.

    With neither, tf.data keeps two zeros. Both names are needed: a global seed of 0 makes the first
    a zero, and a seed of 0 the second. The graph of the dataset has them too, but holds all arrays
    in memory.

    Raises:
      TrainerKitError: when this TensorFlow does not expose it for a shuffle or Dataset.random.
    """
    seeds = (getattr(dataset, "_seed", _MISSING), getattr(dataset, "_seed2", _MISSING))
    _check_exposed(dataset, "ShuffleDataset RandomDataset", *seeds)
    return all(tf.is_tensor(seed) and int(seed) == 0 for seed in seeds)


def is_reshuffled_each_iteration(dataset: Any) -> bool:
    """Whether a dataset is a shuffle that draws another order each time that an iterator of it is made.

    The graph of the dataset has it too, but holds all arrays in memory.

    Raises:
      TrainerKitError: when this TensorFlow does not expose it for a shuffle.
    """
    setting = getattr(dataset, "_reshuffle_each_iteration", _MISSING)
    _check_exposed(dataset, "ShuffleDataset", setting)
    return setting is not False and setting is not _MISSING


def _check_exposed(dataset: Any, class_names: str, *settings: Any) -> None:
    """Raises TrainerKitError when a dataset of one of these classes lacks a setting; others have none."""
    if type(dataset).__name__.lstrip("_") in class_names.split() and any(
        one is _MISSING for one in settings
    ):
        raise _build_not_exposed_error(dataset, "a setting is gone")


def _build_not_exposed_error(dataset: Any, error: AttributeError | str) -> TrainerKitError:
    return TrainerKitError(
        f"TensorFlow {tf.__version__} does not expose what a {type(dataset).__name__} is made of"
        f" ({error}), so trainer_kit cannot check whether a resume is exact; install the TensorFlow"
        " of requirements.lock, or return a Source such as ArraySource"
    )


class SummaryState:
    """A default summary writer, step and condition apart from those of the engine, for code that sets its own.

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
        """Has the code inside see and change this state; its thread has the engine's again afterwards."""
        before = self._read_values()
        self._write_values(self._values)
        try:
            yield
        finally:
            self._values = self._read_values()
            self._write_values(before)

    def _read_values(self) -> dict[str, Any]:
        return {
            name: getattr(self._get_tensorflow_state(), name)
            for name in self._FIELDS
            if hasattr(self._get_tensorflow_state(), name)
        }

    def _write_values(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self._get_tensorflow_state(), name, value)

    @staticmethod
    @functools.cache
    def _get_tensorflow_state() -> Any:
        try:
            from tensorflow.python.ops import summary_ops_v2

            return summary_ops_v2._summary_state
        except (ImportError, AttributeError):
            return None
