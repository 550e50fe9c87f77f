"""Compiles the functions of loops, reads their results, and checks their graphs.

A loop that is traced again takes as long as the first time, so a warning says why. A step waits for
its batch before it writes a variable, so that no count changes when there is no batch. TensorFlow's
executor on one thread waits forever for conditions inside of conditions.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.runtime.tensorflow_internals import add_control_inputs
from trainer_kit.typing import NestedSpec

_LOG = logging.getLogger(__name__)
_NONE = object()

# Stacked scalars, and the tensors that are not scalars.
Packed = tuple[tf.Tensor, list[tf.Tensor]]

# The operations of a graph that read a batch, and those that write a variable or other state.
_READS = re.compile(r"(MultiDevice)?IteratorGetNext\w*")
_WRITES = re.compile(
    r"Assign\w*|Resource(Sparse)?Apply\w*|ResourceScatter\w*|ResourceStridedSliceAssign|Rng\w*|"
    r"(Eager)?PyFunc|Stateful(?!PartitionedCall)\w*|LookupTable(Insert|Remove|Import)\w*"
)
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase")


def graph_function(function: Callable[..., object]) -> tf.types.experimental.PolymorphicFunction:
    """Returns a function of trainer_kit as a tf.function, without AutoGraph."""
    return tf.function(function, autograph=False)


def eager(function: Callable[..., object]) -> Callable[..., Any]:
    """Returns `function` unchanged. Replaces graph_function where nothing is compiled."""
    return function


class LoopFunction:
    """A tf.function of a loop or a step that knows its graphs. Its first argument is an iterator.

    It is called eagerly, on the host.

    Args:
      function: The function of trainer_kit to compile.
      name: The name of the loop or step, for the warning.
      specs: A function of the iterator's element spec that returns the specs of the other
        arguments. With None, the arguments of the first call show them.
      check: A function that raises an error when a traced graph cannot be used.

    Attributes:
      function: The tf.function.
      newest_graph: The newest graph. None before the first trace.
    """

    def __init__(
        self,
        function: Callable[..., object],
        name: str,
        specs: Callable[..., Sequence[NestedSpec]] | None = None,
        check: Callable[[tf.Graph], None] | None = None,
    ) -> None:
        self.function = graph_function(function)
        self._name = name
        self._specs = specs
        self._check = check
        self._graphs: list[tf.Graph] = []
        self.newest_graph: tf.Graph | None = None

        # The spec of the elements of the newest graph's iterator.
        self._elements: Any = _NONE

        # The iterator of the last call, which other code deletes, and the concrete function for it.
        self._last_iterator: weakref.ref[Any] | None = None
        self._concrete: Any = None

    def __call__(self, iterator: Iterator[object], *arguments: Any) -> Any:
        if tf.config.functions_run_eagerly():
            return self.function(iterator, *arguments)

        if self._last_iterator is not None and self._last_iterator() is iterator:
            # To look the concrete function up again takes 0.15 ms, a quarter of the call of a loop
            # without steps.
            if self._concrete is None:
                trace_arguments = self._get_trace_arguments(iterator, arguments)
                self._concrete = self.function.get_concrete_function(iterator, *trace_arguments)
            return self._concrete(iterator, *arguments)

        if _get_element_spec(iterator) != self._elements:
            self.trace_graph(iterator, *arguments)
        self._last_iterator = None
        # Some Python iterators have no weak reference.
        with contextlib.suppress(TypeError):
            self._last_iterator = weakref.ref(iterator)
        self._concrete = None
        return self.function(iterator, *arguments)

    def trace_graph(self, iterator: Iterator[object], *arguments: Any) -> tf.Graph | None:
        """Returns the graph for such an iterator and arguments. None if functions run eagerly.

        Warns if the function is traced again for them. Runs eagerly, on the host.
        """
        if tf.config.functions_run_eagerly():
            return None

        trace_arguments = self._get_trace_arguments(iterator, arguments)
        graph = self.function.get_concrete_function(iterator, *trace_arguments).graph
        elements = _get_element_spec(iterator)

        if not any(graph is earlier for earlier in self._graphs):
            if self._graphs:
                _LOG.warning(
                    "%s is traced again, which takes as long as the first time: "
                    "its batches are now %s, and were %s before; "
                    "give all batches the same shape",
                    self._name,
                    _format_spec(elements),
                    _format_spec(self._elements),
                )

            # A refused graph is not remembered.
            if self._check is not None:
                self._check(graph)
            self._graphs.append(graph)
            self.newest_graph = graph

        self._elements = elements
        return graph

    def _get_trace_arguments(
        self, iterator: tf.data.Iterator, arguments: Sequence[object]
    ) -> Sequence[object]:
        """Returns what stands for the arguments after the iterator when the function is traced."""
        return self._specs(iterator.element_spec) if self._specs else arguments


def _get_element_spec(iterator: Iterator[object]) -> NestedSpec:
    return getattr(iterator, "element_spec", None)


def _format_spec(spec: NestedSpec) -> str:
    """Returns dtypes and shapes of the tensors in a spec, as text for a message."""
    texts = []
    for part in tf.nest.flatten(spec, expand_composites=True):
        if isinstance(part, tf.TensorSpec):
            shape = "[?]" if part.shape.rank is None else part.shape
            texts.append(f"{part.dtype.name}{shape}")
    return ", ".join(texts)


class Readback:
    """Brings nested results from graph to host in one transfer.

    The scalars are stacked as one float64 tensor.

    Args:
      results: A function that returns nested scalars, tensors or variables.
      wrapper: graph_function or eager.
    """

    def __init__(
        self,
        results: Callable[[], object],
        wrapper: Callable[[Callable[..., Packed]], Callable[..., Packed]],
    ) -> None:
        self._source = results
        self._structure: Any = None
        self._is_scalar: list[bool] = []
        self._dtypes: list[Any] = []
        self._compiled_pack = wrapper(self.pack)

    def __call__(self) -> Any:
        return self.unpack(self._compiled_pack())[0]

    def pack(self, *more: tf.Tensor) -> Packed:
        """Returns the stacked scalars and the other tensors.

        Remembers the structure when it is traced. Runs in graph or eagerly.

        Args:
          *more: Scalars to transfer with the results.
        """
        self._structure = self._source()
        scalars, others = self._pack_structure()
        if more:
            floats = [tf.cast(number, tf.float64) for number in more]
            numbers = tf.stack(floats)
            scalars = tf.concat([scalars, numbers], 0)
        return scalars, others

    @tf.autograph.experimental.do_not_convert
    def _pack_structure(self) -> Packed:
        leaves = tf.nest.flatten(self._structure)
        tensors = [tf.convert_to_tensor(leaf) for leaf in leaves]
        self._structure = tf.nest.map_structure(lambda leaf: None, self._structure)
        self._dtypes = [tensor.dtype.as_numpy_dtype for tensor in tensors]
        self._is_scalar = []

        scalars = []
        others = []
        for tensor in tensors:
            # The integers of 8 bytes are those that float64 does not represent exactly.
            dtype = tensor.dtype
            fits_float64 = dtype.is_floating or (dtype.is_integer and dtype.size < 8)
            is_scalar = tensor.shape.rank == 0 and fits_float64
            self._is_scalar.append(is_scalar)
            if is_scalar:
                scalars.append(tf.cast(tensor, tf.float64))
            else:
                others.append(tensor)
        stacked = tf.stack(scalars) if scalars else tf.zeros([0], tf.float64)
        return stacked, others

    def unpack(self, packed: Packed) -> tuple[Any, list[float]]:
        """Returns what `pack` has packed: the nested results, and the values of `more`.

        The results are NumPy values of their original dtypes. Runs eagerly, on the host.
        """
        stacked, tensors = packed
        scalars = iter(stacked.numpy())
        others = iter(tensors)

        # The leaves come in the order in which they were packed.
        leaves = []
        for is_scalar, dtype in zip(self._is_scalar, self._dtypes, strict=True):
            if is_scalar:
                leaves.append(dtype(next(scalars)))
            else:
                leaves.append(next(others).numpy())

        # The scalars that are left are those of `more`.
        numbers = [float(number) for number in scalars]
        return tf.nest.pack_sequence_as(self._structure, leaves), numbers


@contextlib.contextmanager
def control_dependencies_for_writes(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Makes operations created in this context write no variable before all `tensors` are ready.

    Eagerly it has no effect, since operations then run in the order of the code.

    tf.control_dependencies would also delay every operation without inputs, such as each read of a
    weight. That means one graph edge for each, and no work during the wait for a batch. It cost a
    small step 5 % of its time.

    Args:
      tensors: The tensors of a batch. Constants and variables among them are always ready.
    """
    if tf.executing_eagerly():
        yield
        return

    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield

    # Only tensors of this graph have to be waited for. The others are ready already.
    sources: dict[tf.Operation, None] = {}
    for tensor in tensors:
        if tf.is_symbolic_tensor(tensor) and tensor.graph is graph:
            sources[tensor.op] = None
    batch = list(sources)

    # The operations come in the order of their creation, so the inputs of one come before it.
    after = set(batch)
    for op in graph.get_operations()[before:]:
        waits = any(tensor.op in after for tensor in op.inputs)
        waits = waits or any(control in after for control in op.control_inputs)
        if waits:
            after.add(op)
        elif is_write_op(op):
            add_control_inputs(op, batch)
            after.add(op)


def is_write_op(op: tf.Operation) -> bool:
    """Whether an operation may change a variable.

    Inside a TPU program nothing may wait for operations outside it, so no operation there counts.
    """
    return (
        op.op_def.is_stateful
        and op.type != "ReadVariableOp"
        and "_tpu_replicate" not in op.node_def.attr
    )


def reads_before_writes(graph: tf.Graph) -> bool:
    """Whether the steps of a loop write variables only after they have read all their batches.

    If so, an error of the data leaves the state of the last complete step. Operations before the
    first step, such as resetting metrics, do not count. Runs eagerly, on the host.

    Args:
      graph: The graph of a loop, or of one step.
    """
    definition = graph.as_graph_def()
    functions = _get_function_nodes(definition)

    @functools.cache
    def does(function: str, op: re.Pattern[str]) -> bool:
        return any(holds(node, op) for node in functions.get(function, ()))

    # A node counts as an operation that a function which it calls contains.
    def holds(node: tf.compat.v1.NodeDef, op: re.Pattern[str]) -> bool:
        if op.fullmatch(node.op) is not None:
            return True
        return any(does(function, op) for function in _called_functions(node))

    loops = [
        node.attr["body"].func.name
        for node in definition.node
        if node.op in ("While", "StatelessWhile")
    ]

    # Without a loop that reads batches, the graph is that of one step.
    steps = [functions[name] for name in loops if does(name, _READS)]
    if not steps:
        steps = [definition.node]
    return all(_has_ordered_writes(nodes, holds, functions) for nodes in steps)


def _has_ordered_writes(
    nodes: Sequence[tf.compat.v1.NodeDef],
    holds: Callable[[tf.compat.v1.NodeDef, re.Pattern[str]], bool],
    functions: Mapping[str, Sequence[tf.compat.v1.NodeDef]],
) -> bool:
    """Whether every node that writes depends on every node that reads.

    This has to be so in each function that does both.
    """
    reading = [node for node in nodes if holds(node, _READS)]
    writing = [node for node in nodes if holds(node, _WRITES)]

    for read in reading:
        # The names of all nodes that depend on the read, found by passes until none is new.
        after = {read.name}
        before = 0
        while len(after) > before:
            before = len(after)
            for node in nodes:
                if any(_source(name) in after for name in node.input):
                    after.add(node.name)
        if any(node.name not in after for node in writing):
            return False

    # A node that does both calls a function, in which the order has to be the same.
    for node in reading:
        if node not in writing:
            continue
        for name in _called_functions(node):
            if not _has_ordered_writes(functions[name], holds, functions):
                return False
    return True


def _get_function_nodes(
    definition: tf.compat.v1.GraphDef,
) -> dict[str, Sequence[tf.compat.v1.NodeDef]]:
    """Returns the nodes of each function of a graph, by the function's name."""
    return {function.signature.name: function.node_def for function in definition.library.function}


def _called_functions(node: tf.compat.v1.NodeDef) -> Iterator[str]:
    """Yields the names of the functions that a node calls."""
    for value in node.attr.values():
        if value.HasField("func"):
            yield value.func.name
        yield from (function.name for function in value.list.func)


def _source(name: str) -> str:
    """Returns the name of the node that an input comes from.

    It is "node" for both "^node" and "node:output:0".
    """
    return name.removeprefix("^").split(":")[0]


def has_nested_conditions(graph: tf.Graph) -> bool:
    """Returns whether a graph has a tf.cond, tf.case or tf.switch_case inside of one.

    Loops and calls of functions between the two are followed. The graph is only read.

    Args:
      graph: The graph of a traced function.
    """
    definition = graph.as_graph_def()
    functions = _get_function_nodes(definition)

    # Each function is searched at most twice: once inside of a condition, and once outside.
    pending = [(definition.node, False)]
    visited = set[tuple[str, bool]]()
    while pending:
        operations, inside = pending.pop()
        for op in operations:
            is_condition = op.op in _CONDITIONS
            if is_condition and inside:
                return True

            in_condition = inside or is_condition
            for name in _called_functions(op):
                call = (name, in_condition)
                if call in visited:
                    continue
                visited.add(call)
                if name in functions:
                    pending.append((functions[name], in_condition))
    return False


def check_one_thread(graph: tf.Graph) -> None:
    """Raises UsageError when the executor on one thread would wait permanently in a graph.

    The graph is only read.
    """
    if has_nested_conditions(graph):
        raise UsageError(
            "runtime.executor=single_threaded: "
            "a step or a metric has a tf.cond, tf.case or tf.switch_case inside of another one, "
            "and TensorFlow's executor on one thread waits for ever in these; "
            "set executor=default"
        )
