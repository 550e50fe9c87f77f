"""Counts the floating-point operations of a model for one example."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import tensorflow as tf

from trainer_kit.runtime.tensorflow_internals import get_called_functions
from trainer_kit.telemetry.model_stats import count_parameters

if TYPE_CHECKING:
    from trainer_kit.typing import NestedSpec

# Operations whose work is in another function, which the profiler does not count.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_CONTROL_FLOW = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
_PRODUCTS = (
    "MatMul",
    "BatchMatMulV2",
    "BatchMatMulV3",
    "Conv2D",
    "Conv3D",
    "DepthwiseConv2dNative",
    "Einsum",
)
# Characters of an error message in a problem.
_MAX_PROBLEM_LENGTH = 300


class CallableModel(Protocol):
    """A model, or any other object that is called with a batch of features."""

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        """Returns the outputs."""


class TrainedModel(Protocol):
    """A trainer, as far as the cost of its model depends on it."""

    @property
    def model(self) -> Any:
        """The model."""

    @property
    def batch_spec(self) -> NestedSpec | None:
        """The spec of a replica's training batch. None before it is known."""


class _ProfileNode(Protocol):
    """A node of the profile that TensorFlow's profiler returns, a GraphNodeProto."""

    name: str
    float_ops: int
    children: Sequence[_ProfileNode]


@dataclass(frozen=True)
class FlopsResult:
    """The floating-point operations of one forward pass for one example.

    Attributes:
      flops: The number of operations, with a multiplication and its addition counted as 2. None if
        it is not known.
      problem: Why the number is not known, or what it leaves out. Empty without a problem.
    """

    flops: int | None
    problem: str = ""

    def __str__(self) -> str:
        if self.flops is None:
            return f"FLOPs unknown: {self.problem}"
        note = f" ({self.problem})" if self.problem else ""
        return f"{self.flops:,} FLOPs{note}"


def count_flops(model: CallableModel, inputs_spec: NestedSpec) -> FlopsResult:
    """Returns the FLOPs of one forward pass of `model` on a batch of 1, in inference.

    TensorFlow's profiler counts: a product of [m, k] and [k, n] is 2mkn, a convolution likewise,
    plus the elementwise operations it knows (bias, softmax, normalisation). `Einsum`, which it does
    not know, counts as 2 for each combination of its indices. The bodies of loops and branches are
    not counted. Neither are products of unknown size, as in functions of a SavedModel. `problem`
    reports them.

    Traces the model, which takes seconds for a large one. Runs eagerly on the host and never
    raises: `problem` reports any failure.

    Args:
      model: The model, called with the inputs, and with training=False if it has that argument.
      inputs_spec: A tensor spec, or any structure of them, such as a data set's `element_spec` for
        the features. The first dimension is set to 1. The others must be known.
    """
    if not getattr(model, "built", True):
        return FlopsResult(None, "the model is not built yet; call it on a batch first")

    try:
        spec = tf.nest.map_structure(_set_batch_size_to_one, inputs_spec)
        graph = _trace(model, spec)
        flops, left_out = _count_graph(graph)
    except Exception as error:
        # Keras's messages have several lines, with colours.
        text = f"{type(error).__name__}: {error}"
        message = re.sub(r"\x1b\[[0-9;]*m", "", text)
        line = " ".join(message.split())
        return FlopsResult(None, line[:_MAX_PROBLEM_LENGTH])

    if not left_out:
        return FlopsResult(flops)
    rows = sorted(left_out.items())
    texts = [f"{count} {name}" for name, count in rows]
    names = ", ".join(texts)
    return FlopsResult(flops, f"a lower bound, these operations are not counted: {names}")


def _set_batch_size_to_one(spec: tf.TypeSpec) -> tf.TensorSpec:
    """Returns the spec with a batch size of 1. Raises ValueError if another size is not known."""
    shape = tf.TensorShape(spec.shape)
    if not shape.rank or not shape[1:].is_fully_defined():
        raise ValueError(f"the input {spec} needs a known size in every dimension after the batch")
    return tf.TensorSpec([1, *shape[1:]], spec.dtype)


def _trace(model: CallableModel, spec: NestedSpec) -> tf.Graph:
    # The signature of a Keras model's __call__ does not show the arguments of its call.
    call = getattr(model, "call", None) or model.__call__
    takes_training = "training" in inspect.signature(call).parameters

    def forward(inputs: Any) -> object:
        if takes_training:
            return model(inputs, training=False)
        return model(inputs)

    function = tf.function(forward, autograph=False)
    return function.get_concrete_function(spec).graph


def _count_graph(graph: tf.Graph) -> tuple[int, Counter[str]]:
    """Counts the FLOPs of a graph with its called functions.

    Returns:
      The FLOPs, and the number of uncounted operations of each type.
    """
    profile = _profile(graph)
    # Importing Model Garden adds a rule for Einsum to the profiler. The number must not depend on
    # that.
    total_flops = int(profile.total_float_ops)
    flops = total_flops - _sum_profiled_flops(profile, "Einsum")
    left_out = Counter[str]()
    functions = get_called_functions(graph)

    for operation in graph.get_operations():
        is_call = operation.type in _CALLS
        called = None
        if is_call:
            function = operation.get_attr("f")
            called = functions.get(function.name)
        if called is not None:
            called_flops, called_left_out = _count_graph(called)
            flops += called_flops
            left_out += called_left_out
            continue

        is_control_flow = operation.type in _CONTROL_FLOW
        is_unknown_product = False
        if operation.type in _PRODUCTS:
            tensors = (*operation.inputs, *operation.outputs)
            is_unknown_product = not all(tensor.shape.is_fully_defined() for tensor in tensors)
        if is_call or is_control_flow or is_unknown_product:
            left_out[operation.type] += 1
        elif operation.type == "Einsum":
            flops += _einsum_flops(operation)

    return flops, left_out


def _profile(graph: tf.Graph) -> Any:
    options = tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    # The profiler would print its table.
    options["output"] = "none"

    # The profiler uses old functions. The user cannot change that, so TensorFlow's warning is
    # suppressed.
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        run_meta = tf.compat.v1.RunMetadata()
        return tf.compat.v1.profiler.profile(graph, run_meta, cmd="op", options=options)
    finally:
        logger.setLevel(level)


def _sum_profiled_flops(node: _ProfileNode, name: str) -> int:
    """Returns the FLOPs of all operations of type `name` below `node` of the profile."""
    flops = 0
    for child in node.children:
        if child.name == name:
            flops += int(child.float_ops)
        flops += _sum_profiled_flops(child, name)
    return flops


def _einsum_flops(operation: tf.Operation) -> int:
    """Returns 2 for each element of a product and each combination of its summed indices.

    Returns 0 for a single input.
    """
    if len(operation.inputs) < 2:
        return 0

    equation = operation.get_attr("equation").decode()
    equation = equation.replace(" ", "")
    inputs, output = equation.split("->")
    first_input = inputs.split(",")[0]
    letters_before, _, letters_after = first_input.partition("...")
    shape = operation.inputs[0].shape.as_list()

    # The dimensions of an ellipsis are in the product too, so only letters are summed.
    begin_after = len(shape) - len(letters_after)
    sizes_before = shape[: len(letters_before)]
    sizes_after = shape[begin_after:]
    letters = letters_before + letters_after
    sizes = sizes_before + sizes_after
    combinations = 1
    for letter, size in zip(letters, sizes, strict=True):
        if letter not in output:
            combinations *= size
    product_size = operation.outputs[0].shape.num_elements()
    return 2 * product_size * combinations


def describe_model_cost(trainer: TrainedModel) -> str:
    """Returns the size of the trainer's model and, after training, its FLOPs for one example.

    The text is for the log. It traces the model again, so call it last.
    """
    parameters = count_parameters(trainer.model)
    if trainer.batch_spec is None:
        return str(parameters)
    flops = count_example_flops(trainer)
    return f"{parameters}; {flops} for one example"


def count_example_flops(trainer: TrainedModel) -> FlopsResult:
    """Returns the FLOPs of the trainer's model for one example. See `count_flops`."""
    features = trainer.batch_spec
    if features is None:
        return FlopsResult(None, "the batch is not known")
    # Labels and weights may follow the features.
    if isinstance(features, tuple) and len(features) <= 3:
        features = features[0]
    # A generator is called on latents, not on the batch.
    features = getattr(trainer.model, "latents_spec", features)
    return count_flops(trainer.model, features)
