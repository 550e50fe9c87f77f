"""ProgramGraph: the graph of a TensorFlow 1 program, from which functions for TensorFlow 2 are cut.

A program builds its graph once: placeholders, variables, towers, gradients and summaries. The graph
is that of a `tf.compat.v1.wrap_function`, so any part of it can be cut out as a function by
`prune(feeds, fetches)`. Such a function is the training step, the predictor and `Session.run` at
once. The variables of the graph live outside of it, as those of TensorFlow 2 do, so checkpoints
contain them by name.

As in TensorFlow 1, a program is in graph mode from the start: its thread enters the default graph
with the first name that it takes from tfv1. Functions are called under `tf.init_scope`.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from trainer_kit.compat.tensorpack.program_errors import UnknownTensorError, name_user_line
from trainer_kit.errors import UsageError
from trainer_kit.runtime.tensorflow_internals import (
    compare_tensors_by_identity,
    get_resource_variable_class,
    stateless_random_operations,
)

_KEYS = tf.compat.v1.GraphKeys
_SEED_NAME = "trainer_kit/step_seed"


_ResourceVariable: Any = get_resource_variable_class()


class GraphVariable(_ResourceVariable):
    """A variable of a program: it lives outside of the graph, and has what TensorFlow 1 gave it.

    Attributes:
      op: The operation of the graph that has the variable's name and reads it.
      initializer: The operation that sets the initial value.
      initial_value: The tensor of the initial value.
    """

    op: Any = None
    initializer: Any = None
    initial_value: Any = None

    # Programs keep variables in sets and compare them, as TensorFlow 1 allows.
    __hash__ = object.__hash__
    __eq__ = object.__eq__

    @property
    def graph(self) -> tf.Graph:
        """The graph that the variable was created in."""
        return self.op.graph

    def initialized_value(self) -> tf.Tensor:
        """Returns the tensor of the initial value."""
        return self.initial_value

    def eval(self, session: Any = None) -> np.ndarray:
        """Returns the value. Runs on the host."""
        get_program_graph(self.graph).initialize_variables()
        with tf.init_scope():
            return self.numpy()

    def load(self, value: Any, session: Any = None) -> None:
        """Sets the value. Runs on the host."""
        get_program_graph(self.graph).initialize_variables()
        with tf.init_scope():
            self.assign(value)


class Feeder(Protocol):
    """Gives placeholders their values where a caller feeds none, as a queue would.

    Attributes:
      placeholders: The placeholders, which get their values together.
      name: The name of the first one, under which checkpoints contain the place.
    """

    placeholders: Sequence[tf.Tensor]
    name: str

    def next_values(self) -> Sequence[Any]:
        """Returns the next value of each placeholder."""

    def state(self) -> Any:
        """Returns the place in the data, in JSON types."""

    def restore(self, state: Any) -> None:
        """Continues at the place that `state` returned."""


class _Seeds:
    """The seeds of the random operations of a graph, in the form of a tf.random.Generator.

    An operation of the graph draws from (the step's seed, its own number), and one of an initial
    value from (the graph's seed, the name of the variable). The body of a loop runs several times
    in a step, so an operation inside another function draws from its own generator, which
    checkpoints contain.
    """

    def __init__(self, program: ProgramGraph) -> None:
        self._program = program
        self._operations = 0
        self.variable_name = ""
        self.value_draws = 0

    def uniform_full_int(self, shape: Sequence[int], dtype: tf.DType) -> tf.Tensor:
        """Returns the seed of the next random operation, an int32 tensor of shape [2]."""
        self._operations += 1
        graph = self._program.graph
        base = graph.seed
        if self.variable_name:
            self.value_draws += 1
            name = f"{self.variable_name} {self.value_draws}"
            return tf.constant([base, _hash_name(name)], dtype)

        if tf.compat.v1.get_default_graph() is not graph:
            generator = self._program.create_generator(self._operations)
            return generator.uniform_full_int(shape, dtype)

        own = _hash_name(f"{base} {self._operations}")
        return tf.stack([self._program.step_seed, tf.constant(own, dtype)])


class _Building(threading.local):
    """Whether this thread builds the graph."""

    is_here = False


class ProgramGraph:
    """A graph, its variables by name, and the functions that are cut out of it.

    Attributes:
      graph: The graph.
      step_seed: The placeholder of the step's seed, an int32 scalar.
      variables: The variables, by name.
      feeders: What gives placeholders their values where a caller feeds none.
      next_seed: The step's seed of the next call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # Another thread may leave the graph for the engine meanwhile.
        self._building = _Building()
        self._functions: dict[Any, CutFunction] = {}
        self._uninitialized: list[GraphVariable] = []
        self.variables: dict[str, tf.Variable] = {}
        self.feeders: list[Feeder] = []
        self.next_seed = 0

        with tf.init_scope():
            self._wrapped = tf.compat.v1.wrap_function(lambda: None, [])
        self.graph: tf.Graph = self._wrapped.graph
        # tf.data takes a random seed where the graph has none.
        self.graph.seed = 0
        self.graph.program_graph = self
        self._enter_graph = self.graph.as_default
        self.graph.as_default = self.as_default
        self._find_element = self.graph.as_graph_element
        self.graph.as_graph_element = self._as_graph_element
        self._seeds = _Seeds(self)
        compare_tensors_by_identity(self.graph)
        with self.as_default():
            self.step_seed = tf.compat.v1.placeholder(tf.int32, [], _SEED_NAME)

    @contextlib.contextmanager
    def as_default(self) -> Iterator[tf.Graph]:
        """Makes the graph the default one, with its variables and its random operations."""
        is_default = tf.compat.v1.get_default_graph() is self.graph and not tf.executing_eagerly()
        if self._building.is_here and is_default:
            # TensorFlow enters the graph again for each operation, which would take longer than to
            # create the operation.
            yield self.graph
            return

        with (
            self._enter_graph() as graph,
            tf.variable_creator_scope(self._create_variable),
            stateless_random_operations(self._seeds),
        ):
            was_building = self._building.is_here
            self._building.is_here = True
            try:
                yield graph
            finally:
                self._building.is_here = was_building

    @contextlib.contextmanager
    def leave(self) -> Iterator[None]:
        """A context in eager mode, for the engine, whose variables are not those of the program.

        Optimizers of TensorFlow 1 create their slots under tf.init_scope, so eager mode alone does
        not show whose a variable is.
        """
        with tf.init_scope():
            was_building = self._building.is_here
            self._building.is_here = False
            try:
                yield
            finally:
                self._building.is_here = was_building

    def _as_graph_element(
        self, obj: Any, allow_tensor: bool = True, allow_operation: bool = True
    ) -> Any:
        """Replaces the method of the graph, so that an unknown name has advice."""
        try:
            return self._find_element(obj, allow_tensor, allow_operation)
        except KeyError as error:
            # A single tower has no scope.
            name = obj.removeprefix("tower0/")
            if name != obj:
                return self._as_graph_element(name, allow_tensor, allow_operation)
            raise UnknownTensorError(obj, self.graph) from error

    def create_generator(self, number: int) -> tf.random.Generator:
        """Returns a new random generator whose state is a variable of the graph."""
        name = f"random_generators/{number}"
        with tf.init_scope():
            seed = _hash_name(name) + self.graph.seed
            content = tf.random.create_rng_state(seed, "philox")
            # A function that is traced here, such as one of a tf.data.Dataset, lets nobody create
            # a tf.Variable.
            state = _ResourceVariable(content, trainable=False, name=name)
            generator = tf.random.Generator.from_state(state, "philox")
        self.variables[name] = state
        return generator

    def _create_variable(
        self, next_creator: Callable[..., tf.Variable], **keywords: Any
    ) -> tf.Variable:
        """Creates a variable outside of the graph, and the operations that belong to it inside."""
        if not self._building.is_here:
            return next_creator(**keywords)

        collections = keywords.get("collections")
        if collections is None:
            collections = [_KEYS.GLOBAL_VARIABLES]
        collections = list(collections)
        is_trainable = keywords.get("trainable") in (None, True)
        if is_trainable and _KEYS.TRAINABLE_VARIABLES not in collections:
            collections.append(_KEYS.TRAINABLE_VARIABLES)

        with self.as_default(), tf.control_dependencies(None):
            with tf.compat.v1.name_scope(keywords.get("name"), "Variable") as scope:
                name = scope.rstrip("/")
                value = self._build_initial_value(name, keywords)
                if value.shape.is_fully_defined():
                    with tf.init_scope():
                        content = tf.zeros(value.shape, value.dtype)
                else:
                    content = self.run([value], {})[0]

                is_shape_fixed = keywords.get("validate_shape", True)
                with tf.init_scope():
                    variable = GraphVariable(
                        content,
                        trainable=is_trainable,
                        name=f"{name}/",  # the whole name, whatever the scope is
                        dtype=value.dtype,
                        constraint=keywords.get("constraint"),
                        shape=keywords.get("shape") if is_shape_fixed else None,
                    )
                variable.initial_value = value
                variable.op = tf.identity(variable.read_value(), name=scope).op
                variable.initializer = tf.raw_ops.AssignVariableOp(
                    resource=variable.handle, value=value, name="Assign"
                )
            for collection in collections:
                tf.compat.v1.add_to_collection(collection, variable)

        self.variables[name] = variable
        self._uninitialized.append(variable)
        return variable

    def _build_initial_value(self, name: str, keywords: Mapping[str, Any]) -> tf.Tensor:
        value = keywords.get("initial_value")
        outer_name = self._seeds.variable_name
        self._seeds.variable_name = name
        self._seeds.value_draws = 0
        try:
            with tf.name_scope("Initializer"):
                if callable(value):
                    value = value()
                return tf.convert_to_tensor(value, keywords.get("dtype"))
        finally:
            self._seeds.variable_name = outer_name

    def initialize_variables(self) -> list[tf.Operation]:
        """Gives variables their initial values that do not have them yet.

        Returns:
          The initializers that have run.
        """
        if not self._uninitialized:
            return []
        with self._lock:
            together = []
            in_order = []
            for variable in self._uninitialized:
                types = {item.type for item in _iterate_dependencies([variable.initial_value], ())}
                # The program runs the initializers that need a value itself.
                if "Placeholder" in types and _find_placeholders(self, [], [variable.initializer]):
                    continue
                if "ReadVariableOp" in types:
                    in_order.append(variable.initializer)
                else:
                    together.append(variable.initializer)
            self.cut([], together)([], 0)
            for initializer in in_order:
                self.cut([], [initializer])([], 0)
            self._uninitialized = []
        return [*together, *in_order]

    def get_element(self, name: Any) -> Any:
        """Returns the tensor or operation of a name, or of a variable.

        Raises:
          UnknownTensorError: When the graph has none of this name.
        """
        if isinstance(name, GraphVariable):
            return name.op.outputs[0]
        if isinstance(name, tf.Variable):
            return name.value()
        if not isinstance(name, str):
            return name
        return self.graph.as_graph_element(name)

    def cut(self, feeds: Sequence[tf.Tensor], fetches: Sequence[Any]) -> CutFunction:
        """Returns the function from `feeds` to `fetches`. The same arguments give the same one.

        Args:
          feeds: Tensors.
          fetches: Tensors and operations.
        """
        key = (tuple(map(id, feeds)), tuple(map(id, fetches)))
        with self._lock:
            if key not in self._functions:
                self._functions[key] = CutFunction(self, feeds, fetches)
            return self._functions[key]

    def prune(self, feeds: Sequence[tf.Tensor], fetches: Sequence[Any]) -> Any:
        """Returns a new ConcreteFunction from `feeds` and the step's seed to `fetches`."""
        all_feeds = [*feeds, self.step_seed]
        # With a signature a call takes 0.2 ms in place of 1.1 ms: TensorFlow binds the arguments at
        # the first try.
        specs = []
        for index, tensor in enumerate(all_feeds):
            specs.append(tf.TensorSpec(tensor.shape, tensor.dtype, f"feed_{index}"))
        with tf.init_scope():
            return self._wrapped.prune(all_feeds, list(fetches), input_signature=(specs, {}))

    def run(self, fetches: Sequence[Any], feed_dict: Mapping[Any, Any]) -> list[Any]:
        """Runs a part of the graph and returns NumPy values. Runs on the host.

        Placeholders that the caller does not feed get values of a feeder, if the fetches depend on
        them.

        Args:
          fetches: Tensors and operations, whose values are None.
          feed_dict: The values of tensors.

        Raises:
          UsageError: When a placeholder has no value.
        """
        initializers = set(self.initialize_variables())
        groups = [fetch for fetch in fetches if getattr(fetch, "type", "") == "NoOp"]
        rest = [operation for group in groups for operation in group.control_inputs]
        if len(groups) == len(fetches) and initializers.issuperset(rest):
            # A program that begins with its initializers would run them a second time.
            return [None] * len(fetches)

        values = dict(feed_dict)
        function = self.cut(list(values), fetches)
        if function.unfed_placeholders:
            for feeder in self.find_feeders(function):
                fed = dict(zip(feeder.placeholders, feeder.next_values(), strict=True))
                # What the caller feeds counts.
                values = {**fed, **values}
            function = self.cut(list(values), fetches)
        function.check_placeholders()

        seed = self.next_seed
        self.next_seed += 1
        return function(list(values.values()), seed)

    def find_feeders(self, function: CutFunction) -> list[Feeder]:
        """Returns the feeders of the placeholders that a function has no values for."""
        unfed = function.unfed_placeholders
        feeders = []
        for feeder in self.feeders:
            placeholder_ids = map(id, feeder.placeholders)
            if unfed.intersection(placeholder_ids):
                feeders.append(feeder)
        return feeders


class CutFunction:
    """A part of a graph as a function.

    Attributes:
      feeds, fetches: The arguments.
      unfed_placeholders: The ids of the placeholders that the fetches depend on and that are not
        among the feeds.
    """

    def __init__(
        self, program: ProgramGraph, feeds: Sequence[tf.Tensor], fetches: Sequence[Any]
    ) -> None:
        self.feeds = list(feeds)
        self.fetches = list(fetches)
        self._unfed = _find_placeholders(program, feeds, fetches)
        self.unfed_placeholders = {id(tensor) for tensor in self._unfed}
        # A function that lacks a value is never called.
        self._function: Any = None if self._unfed else program.prune(feeds, fetches)

    def check_placeholders(self) -> None:
        """Raises UsageError when a placeholder has no value."""
        for tensor in self._unfed:
            message = f"the placeholder {tensor.op.name!r} needs a value; give one in feed_dict"
            raise UsageError(name_user_line(message, tensor.op.traceback))

    def __call__(self, values: Sequence[Any], seed: int) -> list[Any]:
        """Returns the fetches as NumPy values. Runs on the host, from any context."""
        with tf.init_scope():
            arguments = [
                _convert_value(value, tensor)
                for value, tensor in zip(values, self.feeds, strict=True)
            ]
            step_seed = tf.constant(seed % 2**31, tf.int32)
            results = self._function(*arguments, step_seed)
            if results is None:
                return [None] * len(self.fetches)
            return [_to_numpy(result) for result in results]

    def call_in_graph(self, values: Sequence[tf.Tensor], seed: tf.Tensor) -> None:
        """Calls the function from another function that is being traced."""
        self._function(*values, seed)


def _find_placeholders(
    program: ProgramGraph, feeds: Iterable[tf.Tensor], fetches: Iterable[Any]
) -> list[tf.Tensor]:
    """Returns the placeholders that the fetches depend on and that are not fed."""
    known_ids = {id(program.step_seed), *map(id, feeds)}
    known_ids.update(map(id, program.graph.internal_captures))
    placeholders = []
    for operation in _iterate_dependencies(fetches, known_ids):
        if operation.type == "Placeholder" and id(operation.outputs[0]) not in known_ids:
            placeholders.append(operation.outputs[0])
    return placeholders


def _iterate_dependencies(
    fetches: Iterable[Any], known_ids: Collection[int]
) -> Iterator[tf.Operation]:
    """Yields the operations that fetches depend on, but for those behind tensors of these ids."""
    visited: set[int] = set()
    waiting = [
        tensor for fetch in fetches for tensor in tf.nest.flatten(fetch, expand_composites=True)
    ]
    while waiting:
        element = waiting.pop()
        if id(element) in known_ids:
            continue
        operation = element if isinstance(element, tf.Operation) else element.op
        if id(operation) in visited:
            continue
        visited.add(id(operation))
        yield operation
        waiting += [*operation.inputs, *operation.control_inputs]


def _convert_value(value: Any, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a fed value as a tensor.

    Raises:
      ValueError: When its shape does not fit, with the words of TensorFlow 1.
    """
    if not tf.is_tensor(value):
        if tensor.dtype == tf.string:
            value = tf.convert_to_tensor(value, tf.string)
        else:
            value = tf.convert_to_tensor(np.asarray(value, tensor.dtype.as_numpy_dtype))
    if not tensor.shape.is_compatible_with(value.shape):
        raise ValueError(
            f"Cannot feed value of shape {tuple(value.shape)} for Tensor {tensor.name}, which has"
            f" shape {tensor.shape}"
        )
    return value


def _to_numpy(result: Any) -> Any:
    """Returns a result as Session.run of TensorFlow 1 does."""
    if isinstance(result, tf.SparseTensor):
        parts = (result.indices, result.values, result.dense_shape)
        return tf.compat.v1.SparseTensorValue(*(part.numpy() for part in parts))
    if result is None or not hasattr(result, "numpy"):
        return result
    return result.numpy()


def _hash_name(name: str) -> int:
    return zlib.crc32(name.encode()) % 2**31


def get_program_graph(graph: tf.Graph) -> ProgramGraph:
    """Returns the ProgramGraph of a graph, or of the graph that a function is traced in.

    Raises:
      UsageError: When it is no graph of a program.
    """
    outer: Any = graph
    while outer is not None:
        program = getattr(outer, "program_graph", None)
        if program is not None:
            return program
        outer = getattr(outer, "outer_graph", None)
    raise UsageError(
        "this needs the graph of a Tensorpack program, and the default graph is another one; use"
        " tf.Graph() of trainer_kit.compat.tensorpack.tfv1"
    )


class _DefaultGraph:
    """The default graph of the program, which its first thread is in."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.program: ProgramGraph | None = None

    def enter(self) -> None:
        """Puts the main thread in graph mode. Later calls do nothing."""
        if self.program is None:
            self.program = ProgramGraph()
            if threading.current_thread() is threading.main_thread():
                self._stack.enter_context(self.program.as_default())

    def leave(self) -> None:
        """Puts the thread in eager mode again, and forgets the graph."""
        self._stack.close()
        self.program = None


_DEFAULT = _DefaultGraph()


def enter_default_graph() -> None:
    """Puts the thread in graph mode, with the default graph of the program.

    Does nothing in a graph: a program may have made its own the default one.
    """
    if tf.executing_eagerly():
        _DEFAULT.enter()


def leave_default_graph() -> None:
    """Puts the thread in eager mode again, and forgets the default graph of the program."""
    _DEFAULT.leave()


def current_program_graph() -> ProgramGraph:
    """Returns the graph that the thread builds now: one that a program made, or the default one."""
    enter_default_graph()
    return get_program_graph(tf.compat.v1.get_default_graph())
