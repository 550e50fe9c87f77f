"""Stacks batches into one element for one call of a fused loop: the pipeline is asked once for many steps."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.batch_position import Position
from trainer_kit.inputs.dataset_structure import get_transformation_kind
from trainer_kit.inputs.sources.source_protocol import build_dataset_at
from trainer_kit.runtime.tensorflow_internals import get_input_datasets


def build_stacked_dataset_at(
    data: Any,
    position: Position,
    size: int,
    input_context: tf.distribute.InputContext | None = None,
) -> tf.data.Dataset:
    """Returns the data of one replica from `position` on, with `size` batches in each element. Runs on the host.

    A Source may have a method `stacked_at(position, size)` that makes the stack at once, which is
    faster; it returns None where it cannot.

    Args:
      data: The Source or tf.data.Dataset that a task's `build_inputs` returned.
      position: The position of the first batch.
      size: The number of batches in an element.
      input_context: The worker's place among the others.

    Returns:
      A dataset as `stack_batches` returns it.
    """
    at_once = getattr(data, "stacked_at", None)
    data = _remove_prefetch(data)
    begin, length = next(position.iterate_ranges())
    whole = at_once(begin, size) if at_once is not None and length is None else None
    if whole is None:
        return stack_batches(build_dataset_at(data, position, input_context), size)
    spec = whole.element_spec
    if problem := describe_stacking_problem(spec):
        raise UsageError(f"trainer.fuse_steps: {problem}; set trainer.fuse_steps to 1")
    return whole.map(lambda *parts: (size, _element(parts, spec))).prefetch(tf.data.AUTOTUNE)


def stack_batches(dataset: tf.data.Dataset, size: int) -> tf.data.Dataset:
    """Returns `dataset` with successive batches of one shape as (number of batches, batches), padded to `size`.

    Batches of fewer examples, such as the last of an epoch, end a stack and begin the next. The
    padding keeps the number of shapes small: XLA compiles a program for each.

    Raises:
      UsageError: when the batches cannot be stacked.
    """
    spec, dataset = dataset.element_spec, _remove_prefetch(dataset)
    if problem := describe_stacking_problem(spec):
        raise UsageError(f"trainer.fuse_steps: {problem}; set trainer.fuse_steps to 1")
    if all(part.shape.is_fully_defined() for part in tf.nest.flatten(spec)):
        return (
            dataset.batch(size)
            .map(lambda *parts: _pad_stack(_element(parts, spec), spec, size))
            .prefetch(tf.data.AUTOTUNE)
        )
    ragged = dataset.ragged_batch(size)
    return ragged.flat_map(
        lambda *parts: _split_by_size(_element(parts, spec), spec, size)
    ).prefetch(tf.data.AUTOTUNE)


def describe_stacking_problem(spec: Any) -> str:
    """Returns why batches of this spec cannot be stacked and compiled; "" if they can."""
    for part in tf.nest.flatten(spec):
        if not isinstance(part, tf.TensorSpec):
            return (
                f"the batches hold a {type(part).__name__.removesuffix('Spec')}, which XLA does not"
                " take"
            )
        if part.dtype in (tf.string, tf.variant, tf.resource):
            return f"the batches hold {part.dtype.name} tensors, which XLA does not take"
        if part.shape.rank is None or not part.shape[1:].is_fully_defined():
            return (
                f"the batches have no fixed shape ({part.shape}), and XLA compiles a program for"
                " each; pad or crop the examples to one shape"
            )
    return ""


def _remove_prefetch(data: Any) -> Any:
    """Returns a dataset without the prefetch that it ends with, if it does: stacks are prefetched, and a hand-over of
    each batch between threads costs as much as a small step.
    """
    if not isinstance(data, tf.data.Dataset) or get_transformation_kind(data) not in (
        "Prefetch",
        "Options",
    ):
        return data
    (before,) = get_input_datasets(data)
    return (
        before
        if get_transformation_kind(data) == "Prefetch"
        else _remove_prefetch(before).with_options(data.options())
    )


@tf.autograph.experimental.do_not_convert
def _element(parts: tuple[Any, ...], spec: Any) -> Any:
    """The element that tf.data hands to a function in parts if it is a tuple."""
    return tf.nest.pack_sequence_as(spec, tf.nest.flatten(parts))


@tf.autograph.experimental.do_not_convert
def _pad_stack(batches: Any, spec: Any, size: int) -> tuple[tf.Tensor, Any]:
    """Returns (how many, batches) with zeros in the place of those that lack to `size`."""
    count = tf.shape(tf.nest.flatten(batches)[0])[0]

    def fill(stack: tf.Tensor, part: tf.TensorSpec) -> tf.Tensor:
        missing = tf.concat([[[0, size - count]], tf.zeros([part.shape.rank, 2], tf.int32)], axis=0)
        whole = tf.cond(count < size, lambda: tf.pad(stack, missing), lambda: stack)
        return tf.ensure_shape(whole, [size, *part.shape])

    return count, tf.nest.map_structure(fill, batches, spec)


@tf.autograph.experimental.do_not_convert
def _split_by_size(batches: Any, spec: Any, size: int) -> tf.data.Dataset:
    """Returns, of up to `size` batches of several sizes, a ragged tensor each, the runs of equal ones."""
    ragged = [part for part in tf.nest.flatten(batches) if isinstance(part, tf.RaggedTensor)]
    lengths = tf.stack([part.row_lengths() for part in ragged], axis=1)
    changes = tf.where(tf.reduce_any(tf.not_equal(lengths[1:], lengths[:-1]), axis=1))[:, 0] + 1
    begins = tf.concat([[0], changes], axis=0)
    ends = tf.concat([changes, [tf.shape(lengths, tf.int64)[0]]], axis=0)

    @tf.autograph.experimental.do_not_convert
    def run(begin: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, Any]:
        def cut(part: Any) -> tf.Tensor:
            return (
                part[begin:end].to_tensor()
                if isinstance(part, tf.RaggedTensor)
                else part[begin:end]
            )

        return _pad_stack(tf.nest.map_structure(cut, batches), spec, size)

    return tf.data.Dataset.from_tensor_slices((begins, ends)).map(run)
