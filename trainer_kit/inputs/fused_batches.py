"""Stacks batches into one element for one call of a fused loop.

The pipeline is asked once for many steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_structure import get_transformation_kind
from trainer_kit.inputs.sources.source_protocol import Source, build_dataset_at
from trainer_kit.runtime.tensorflow_internals import get_input_datasets

if TYPE_CHECKING:
    from trainer_kit.typing import NestedSpec

Data = TypeVar("Data")


def build_stacked_dataset_at(
    data: tf.data.Dataset | Source,
    position: Position,
    size: int,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns the data of one replica from `position` on, in stacks of `size` batches.

    A Source may have a method `stacked_at(position, size)` that makes the stacks at once, which is
    faster. It returns None where it cannot. Runs on the host.

    Args:
      data: The Source or tf.data.Dataset that a task's `build_inputs` returned.
      position: The position of the first batch.
      size: The number of batches in an element.
      input_context: The worker's place among the others. None for a single replica.

    Returns:
      A dataset as `stack_batches` returns it.

    Raises:
      UsageError: when the batches cannot be stacked.
    """
    stacked_at = getattr(data, "stacked_at", None)
    data = _remove_prefetch(data)
    ranges = position.iterate_ranges()
    begin, length = next(ranges)
    stacks = None
    # Such a stack has no gaps, so no batch after the position may be left out.
    if stacked_at is not None and length is None:
        stacks = stacked_at(begin, size)
    if stacks is None:
        batches = build_dataset_at(data, position, input_context)
        return stack_batches(batches, size)

    spec = stacks.element_spec
    if problem := describe_stacking_problem(spec):
        raise UsageError(f"trainer.fuse_steps: {problem}; set trainer.fuse_steps to 1")

    @tf.autograph.experimental.do_not_convert
    def add_count(*parts: object) -> tuple[int, Any]:
        return size, _element(parts, spec)

    counted_stacks = stacks.map(add_count)
    return counted_stacks.prefetch(tf.data.AUTOTUNE)


def stack_batches(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns `dataset` with successive batches of one shape stacked and padded to `size`.

    Batches of fewer examples, such as the last of an epoch, end a stack and begin the next. The
    padding keeps the number of shapes small, since XLA compiles a program for each.

    Returns:
      A dataset of (number of batches, batches). The number is an int32 scalar, and each tensor of
      the batches has the shape [size, *shape of one batch].

    Raises:
      UsageError: when the batches cannot be stacked.
    """
    spec = dataset.element_spec
    dataset = _remove_prefetch(dataset)
    if problem := describe_stacking_problem(spec):
        raise UsageError(f"trainer.fuse_steps: {problem}; set trainer.fuse_steps to 1")

    parts_of_spec = tf.nest.flatten(spec)
    have_one_size = all(part.shape.is_fully_defined() for part in parts_of_spec)
    if have_one_size:

        @tf.autograph.experimental.do_not_convert
        def pad(*parts: object) -> tuple[tf.Tensor, Any]:
            batches = _element(parts, spec)
            return _pad_stack(batches, spec, size)

        unpadded = dataset.batch(size)
        stacks = unpadded.map(pad)
        return stacks.prefetch(tf.data.AUTOTUNE)

    @tf.autograph.experimental.do_not_convert
    def split(*parts: object) -> tf.data.Dataset:
        batches = _element(parts, spec)
        return _split_by_size(batches, spec, size)

    # The sizes of batches differ, so they are put together as ragged tensors first.
    ragged = dataset.ragged_batch(size)
    stacks = ragged.flat_map(split)
    return stacks.prefetch(tf.data.AUTOTUNE)


def describe_stacking_problem(spec: NestedSpec) -> str:
    """Returns why batches of this spec cannot be stacked and compiled, or "" if they can."""
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            kind = type(part).__name__.removesuffix("Spec")
            return f"the batches hold a {kind}, which XLA does not take"
        if part.dtype in (tf.string, tf.variant, tf.resource):
            return f"the batches hold {part.dtype.name} tensors, which XLA does not take"

        # The first dimension counts the examples, and may differ between batches.
        shape = part.shape
        if shape.rank is None or not shape[1:].is_fully_defined():
            return (
                f"the batches have no fixed shape ({shape}), and XLA compiles a program for"
                " each; pad or crop the examples to one shape"
            )
    return ""


def _remove_prefetch(data: Data) -> Data:
    """Returns a dataset without the prefetch that it ends with.

    Stacks are prefetched. Passing each batch between threads costs as much as a small step.
    """
    if not isinstance(data, tf.data.Dataset):
        return data
    kind = get_transformation_kind(data)
    if kind not in ("Prefetch", "Options"):
        return data

    (input_dataset,) = get_input_datasets(data)
    if kind == "Prefetch":
        return input_dataset
    # The options of a dataset may stand after its prefetch.
    options = data.options()
    return _remove_prefetch(input_dataset).with_options(options)


@tf.autograph.experimental.do_not_convert
def _element(parts: tuple[object, ...], spec: NestedSpec) -> Any:
    """Returns the element that tf.data passes to a function in parts if it is a tuple."""
    tensors = tf.nest.flatten(parts)
    return tf.nest.pack_sequence_as(spec, tensors)


@tf.autograph.experimental.do_not_convert
def _pad_stack(batches: Any, spec: NestedSpec, size: int) -> tuple[tf.Tensor, Any]:
    """Returns (number of batches, batches), padded with zeros to `size` batches. Runs in graph."""
    first_stack = tf.nest.flatten(batches)[0]
    count = tf.shape(first_stack)[0]

    def fill(stack: tf.Tensor, part: tf.TensorSpec) -> tf.Tensor:
        # Only the first dimension, the number of batches, is padded.
        added_batches = [[0, size - count]]
        added_inside = tf.zeros([part.shape.rank, 2], tf.int32)
        paddings = tf.concat([added_batches, added_inside], axis=0)

        is_short = count < size
        padded = tf.cond(is_short, lambda: tf.pad(stack, paddings), lambda: stack)
        static_shape = [size, *part.shape]
        return tf.ensure_shape(padded, static_shape)

    return count, tf.nest.map_structure(fill, batches, spec)


@tf.autograph.experimental.do_not_convert
def _split_by_size(batches: Any, spec: NestedSpec, size: int) -> tf.data.Dataset:
    """Returns a dataset of the runs of equal batch sizes in up to `size` batches. Runs in graph.

    Args:
      batches: Batches of several sizes, as ragged tensors.
      spec: The spec of one batch.
      size: The number of batches that each run is padded to.
    """
    parts = tf.nest.flatten(batches)
    ragged_parts = [part for part in parts if isinstance(part, tf.RaggedTensor)]
    row_lengths = [part.row_lengths() for part in ragged_parts]
    lengths = tf.stack(row_lengths, axis=1)

    # A run begins with each batch whose size differs from the one before it.
    differences = tf.not_equal(lengths[1:], lengths[:-1])
    is_change = tf.reduce_any(differences, axis=1)
    places = tf.where(is_change)[:, 0]
    changes = places + 1
    num_batches = tf.shape(lengths, tf.int64)[0]
    begins = tf.concat([[0], changes], axis=0)
    ends = tf.concat([changes, [num_batches]], axis=0)

    @tf.autograph.experimental.do_not_convert
    def run(begin: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def cut(part: tf.Tensor | tf.RaggedTensor) -> tf.Tensor:
            rows = part[begin:end]
            if isinstance(part, tf.RaggedTensor):
                return rows.to_tensor()
            return rows

        batches_of_run = tf.nest.map_structure(cut, batches)
        return _pad_stack(batches_of_run, spec, size)

    ranges = tf.data.Dataset.from_tensor_slices((begins, ends))
    return ranges.map(run)
