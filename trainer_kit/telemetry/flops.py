"""Counts the floating-point operations of a model for one example."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer_kit.telemetry.flops_graph import CALLS, with_calls_inlined
from trainer_kit.telemetry.model_stats import count_parameters

# Operations whose work is in another function, which the profiler does not count.
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_PRODUCTS = ("MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Einsum")


@dataclass(frozen=True)
class FlopsResult:
    """The floating-point operations of one forward pass for one example.

    Attributes:
      flops: The number of operations, with a multiplication and its addition counted as 2; None if it is not known.
      problem: Why the number is not known, or what it leaves out; empty without a problem.
    """

    flops: int | None
    problem: str = ""

    def __str__(self) -> str:
        if self.flops is None:
            return f"FLOPs unknown: {self.problem}"
        return f"{self.flops:,} FLOPs" + (f" ({self.problem})" if self.problem else "")


def count_flops(model: Callable[..., Any], inputs_spec: Any) -> FlopsResult:
    """Returns the FLOPs of one forward pass of `model` on a batch of 1, in inference.

    TensorFlow's profiler counts: a product of [m, k] and [k, n] is 2mkn, a convolution likewise, plus the elementwise
    operations it knows (bias, softmax, normalisation). `Einsum`, which it does not know, counts as 2 for each
    combination of its indices. The bodies of loops and branches are not counted; `problem` says so. Traces the model,
    which takes seconds for a large one. Runs eagerly on the host and never raises: `problem` reports any failure.

    Args:
      model: The model, called with the inputs, and with training=False if it has that argument.
      inputs_spec: A tensor spec, or any structure of them, such as a data set's `element_spec` for the features. The
        first dimension is set to 1; the others must be known.
    """
    if not getattr(model, "built", True):
        return FlopsResult(None, "the model is not built yet; call it on a batch first")
    try:
        spec = tf.nest.map_structure(_one_example, inputs_spec)
        return _count(with_calls_inlined(_trace(model, spec).graph))
    except Exception as error:
        return FlopsResult(None, _plain(f"{type(error).__name__}: {error}"))


def _plain(text: str, longest: int = 300) -> str:
    """Returns the text as one line, without the colours of Keras's messages."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())[:longest]


def _one_example(spec: Any) -> tf.TensorSpec:
    shape = tf.TensorShape(spec.shape)
    if shape.rank is None or shape.rank == 0 or not shape[1:].is_fully_defined():
        raise ValueError(f"the input {spec} needs a known size in every dimension after the batch")
    return tf.TensorSpec([1, *shape[1:]], spec.dtype)


def _trace(model: Callable[..., Any], spec: Any) -> Any:
    def forward(inputs: Any) -> Any:
        return model(inputs, training=False) if takes_training else model(inputs)

    takes_training = _takes_training(model)
    return tf.function(forward, autograph=False).get_concrete_function(spec)


def _takes_training(model: Any) -> bool:
    call = getattr(model, "call", None) or model.__call__
    return "training" in inspect.signature(call).parameters


def _count(graph: tf.Graph) -> FlopsResult:
    node = _profile(graph)
    operations = graph.get_operations()
    # Importing Model Garden adds a rule for Einsum to the profiler; the number must not depend on that.
    total = int(node.total_float_ops) - _profiled(node, "Einsum")
    total += sum(_einsum_flops(operation) for operation in operations if operation.type == "Einsum")
    left_out = Counter(op.type for op in operations if op.type in CALLS + _CONTROL_FLOW or _is_unknown(op))
    if not left_out:
        return FlopsResult(total)
    names = ", ".join(f"{number} {name}" for name, number in sorted(left_out.items()))
    return FlopsResult(total, f"a lower bound, these operations are not counted: {names}")


def _profile(graph: tf.Graph) -> Any:
    options = {**tf.compat.v1.profiler.ProfileOptionBuilder.float_operation(), "output": "none"}
    with _quiet():
        return tf.compat.v1.profiler.profile(
            graph=graph, run_meta=tf.compat.v1.RunMetadata(), cmd="op", options=options
        )


def _profiled(node: Any, name: str) -> int:
    """Returns the sum of the FLOPs of all operations of type `name` below `node` of the profile."""
    return sum((int(child.float_ops) if child.name == name else 0) + _profiled(child, name) for child in node.children)


def _is_unknown(operation: tf.Operation) -> bool:
    tensors = [*operation.inputs, *operation.outputs]
    return operation.type in _PRODUCTS and not all(tensor.shape.is_fully_defined() for tensor in tensors)


def _einsum_flops(operation: tf.Operation) -> int:
    """Returns 2 for each combination of a product's indices; an ellipsis stands for the dimensions it covers."""
    shapes = [tensor.shape for tensor in operation.inputs]
    if len(shapes) < 2 or _is_unknown(operation):
        return 0
    sizes: dict[str, int] = {}
    terms = operation.get_attr("equation").decode().replace(" ", "").split("->")[0].split(",")
    for term, shape in zip(terms, shapes, strict=True):
        for label, size in zip(_labels(term, shape.rank), shape.as_list(), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return 2 * math.prod(sizes.values())


def _labels(term: str, rank: int) -> list[str]:
    before, ellipsis, after = term.partition("...")
    covered = rank - len(before) - len(after) if ellipsis else 0
    # Dimensions under an ellipsis are aligned from the right.
    return [*before, *(f"...{place}" for place in range(covered, 0, -1)), *after]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The profiler uses old functions; the user cannot change that, so TensorFlow's warning is suppressed.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def model_cost(trainer: Any) -> str:
    """Returns the size of the trainer's model and, after training, its FLOPs for one example, for the log.

    It traces the model again, so call it last.
    """
    parameters, spec = str(count_parameters(trainer.model)), trainer.batch_spec
    if spec is None:
        return parameters
    features = spec[0] if isinstance(spec, tuple) and len(spec) <= 3 else spec  # labels and weights may follow
    features = getattr(trainer.model, "latents_spec", features)  # a generator is not called on the batch
    return f"{parameters}; {count_flops(trainer.model, features)} for one example"
