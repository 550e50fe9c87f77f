"""Makes a step wait for its batch before it writes a variable, so that no count changes when there is no batch."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.distribution.tensorflow_internals import run_after

_READS = re.compile(r"(MultiDevice)?IteratorGetNext\w*")
_WRITES = re.compile(
    r"Assign\w*|Resource(Sparse)?Apply\w*|ResourceScatter\w*|ResourceStridedSliceAssign|Rng\w*|(Eager)?PyFunc|"
    r"Stateful(?!PartitionedCall)\w*|LookupTable(Insert|Remove|Import)\w*"
)


@contextlib.contextmanager
def writes_after(tensors: Sequence[tf.Tensor]) -> Iterator[None]:
    """Makes operations created in this context write no variable before all `tensors` are ready.

    Eagerly it has no effect: operations then run in the order of the code.

    tf.control_dependencies would also delay every operation without inputs, such as each read of a weight: one graph
    edge for each, and no work during the wait for a batch. That cost a small step 5 % of its time.

    Args:
      tensors: The tensors of a batch; constants and variables among them are always ready.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    made_here = (tensor for tensor in tensors if tf.is_symbolic_tensor(tensor) and tensor.graph is graph)
    batch = list(dict.fromkeys(tensor.op for tensor in made_here))  # the other tensors are ready already
    after = set(batch)
    for op in graph.get_operations()[before:]:  # in the order they were made: inputs first
        if any(tensor.op in after for tensor in op.inputs) or any(one in after for one in op.control_inputs):
            after.add(op)
        elif writes(op):
            run_after(op, batch)
            after.add(op)


def writes(op: tf.Operation) -> bool:
    """Whether an operation may change a variable. Inside a TPU program nothing may wait for operations outside it."""
    return op.op_def.is_stateful and op.type != "ReadVariableOp" and "_tpu_replicate" not in op.node_def.attr


def reads_before_writes(graph: tf.Graph) -> bool:
    """Whether the steps of a loop write variables only after they have read all their batches.

    Runs eagerly, on the host.

    If so, an error of the data leaves the state of the last complete step. Operations before the first step, such as
    resetting metrics, do not count.

    Args:
      graph: The graph of a loop, or of one step.
    """
    definition = graph.as_graph_def()
    functions = {one.signature.name: one.node_def for one in definition.library.function}

    @functools.cache
    def does(function: str, op: re.Pattern[str]) -> bool:
        return any(holds(node, op) for node in functions.get(function, ()))

    def holds(node: Any, op: re.Pattern[str]) -> bool:
        return op.fullmatch(node.op) is not None or any(does(function, op) for function in _called(node))

    loops = [node.attr["body"].func.name for node in definition.node if node.op in ("While", "StatelessWhile")]
    steps = [functions[name] for name in loops if does(name, _READS)] or [definition.node]
    return all(_ordered(nodes, holds, functions) for nodes in steps)


def _ordered(nodes: Sequence[Any], holds: Callable[[Any, re.Pattern[str]], bool], functions: dict[str, Any]) -> bool:
    """Whether every node that writes depends on every node that reads, in each function that does both."""
    reading, writing = ([node for node in nodes if holds(node, op)] for op in (_READS, _WRITES))
    for read in reading:
        after, before = {read.name}, 0
        while len(after) > before:
            before = len(after)
            after |= {node.name for node in nodes if any(_source(name) in after for name in node.input)}
        if any(node.name not in after for node in writing):
            return False
    both = [node for node in reading if node in writing]
    return all(_ordered(functions[name], holds, functions) for node in both for name in _called(node))


def _called(node: Any) -> list[str]:
    """Returns the names of the functions that a node calls."""
    found = [value.func.name for value in node.attr.values() if value.HasField("func")]
    return found + [one.name for value in node.attr.values() for one in value.list.func]


def _source(name: str) -> str:
    """Returns the name of the node that an input comes from: "node" for both "^node" and "node:output:0"."""
    return name.removeprefix("^").split(":")[0]
