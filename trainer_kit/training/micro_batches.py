"""Accumulation: trains on a batch in several micro-batches that have one update.

The setting is trainer.accumulate_steps. The batch of each replica is split along its first axis.
The loop over the parts is outside of strategy.run, like the training loop, so that replicas can
meet in each part. It runs one part at a time, so that memory contains the activations of only one.
No part is empty.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradient_accumulator import GradientAccumulator, GradientSums
from trainer_kit.optimizers.named_optimizers import NamedOptimizers
from trainer_kit.process.error_report import describe_structure
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.training.base_trainer import CustomParts
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.training.trained_variables import layers_below
from trainer_kit.typing import FloatLike, IntLike, Model, Optimizers, TaskLike, Variable

_LOG = logging.getLogger(__name__)
_PATH = "trainer.accumulate_steps"


def check_micro_batch_support(
    class_name: str, custom_parts: CustomParts, optimizer: Optimizers | None, steps: int
) -> None:
    """Checks that a trainer can split its batches. Called in strategy scope.

    Args:
      class_name: The name of the trainer's class.
      custom_parts: The parts of the trainer that differ from those of a Trainer.
      optimizer: The trainer's optimizer, or its optimizers by name.
      steps: The number of micro-batches, above 1.

    Raises:
      UsageError: when the trainer, its strategy or its optimizer cannot split batches.
    """
    strategy = tf.distribute.get_strategy()
    optimizers = tf.nest.flatten(optimizer)
    problem = ""
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        problem = (
            "workers of a ParameterServerStrategy update by themselves; "
            "set it to 1, or take another strategy"
        )
    elif custom_parts.overrides_train_loop:
        problem = (
            f"{class_name} builds its own training loop in create_train_loop_fn; "
            "set it to 1, or remove that method"
        )
    elif custom_parts.overrides_replica_step:
        problem = (
            f"{class_name} has a training step of its own on each replica, "
            "which is not split into micro-batches; set it to 1"
        )
    elif any(hasattr(part, "get_scaled_loss") for part in optimizers):
        # Tasks recognise such an optimizer by its class, and would not scale.
        problem = (
            "an optimizer of tf_keras scales the loss, which cannot be split; "
            "train in float32 or bfloat16"
        )

    if problem:
        raise UsageError(f"{_PATH}={steps}: {problem}")


def less_memory_advice(steps: int, examples: int) -> str:
    """Returns the advice for a step that ran out of memory.

    Args:
      steps: The number of micro-batches that the step has.
      examples: The number of examples in a batch of a replica. 0: not known.
    """
    if 0 < examples <= steps:
        return (
            f"{_PATH}={steps} trains on one example at a time; "
            "take a smaller model or smaller examples"
        )
    return (
        f"try {_PATH}={2 * steps}, which trains on a batch in so many parts, "
        "one after the other, with one update"
    )


def warn_of_batch_normalization(model: Model, steps: int) -> None:
    """Warns when a model has batch normalization, whose layers see micro-batches."""
    names = []
    for layer in (model, *layers_below(model)):
        # A subclass may have any name, so the names of its base classes count too.
        class_names = [kind.__name__ for kind in type(layer).__mro__]
        if any("BatchNormalization" in class_name for class_name in class_names):
            name = getattr(layer, "name", type(layer).__name__)
            names.append(name)

    if names:
        other_count = len(names) - 1
        others = f" and {other_count} more" if other_count else ""
        _LOG.warning(
            "%s=%d: batch normalization (%s) takes mean and variance of micro-batches, "
            "so the result differs from that of whole batches; "
            "layer or group normalization does not depend on the batch",
            _PATH,
            steps,
            names[0] + others,
        )


class MicroBatches:
    """Runs a step on the parts of a batch, and then an update.

    Used in graph or eagerly, in cross-replica context.

    Args:
      parts: The number of parts of a batch. If it does not divide the known size of a batch, the
        batch has more parts, all of one size. A batch with fewer examples has a part for each.
      strategy: The strategy of the trainer.
      step: A function of a part, its share of the replica's batch, and whether it is the first part
        of the batch. The share is a float, or a float32 scalar if it is not known before. The third
        argument is a bool scalar. The function runs on a replica.
      update: A function that runs on a replica after the last part.
      get_metric_variables: A function that returns the variables of the metrics that `step`
        updates.
      options: The options of strategy.run.
      uses_xla: Whether all this is part of a program of XLA.
    """

    def __init__(
        self,
        parts: int,
        strategy: tf.distribute.Strategy,
        step: Callable[[Any, FloatLike, tf.Tensor], None],
        update: Callable[[], None],
        get_metric_variables: Callable[[], Sequence[Variable]] = list,
        options: tf.distribute.RunOptions | None = None,
        uses_xla: bool = False,
    ) -> None:
        self._parts = parts
        self._strategy = strategy
        self._step = step
        self._update = update
        self._get_metric_variables = get_metric_variables
        self._options = options
        self._uses_xla = uses_xla

    @tf.autograph.experimental.do_not_convert
    def __call__(self, inputs: Any) -> None:
        """Runs the step on the parts of `inputs`, and the update.

        Args:
          inputs: The batch, as strategy.run takes it. What has no first axis is passed to each part
            as it is.

        Raises:
          UsageError: when the batch cannot be split.
        """
        # The tensors of the batch by replica. What is not distributed has one value for all.
        leaves = tf.nest.flatten(inputs)
        local_values = [self._strategy.experimental_local_results(leaf) for leaf in leaves]
        value_counts = [len(values) for values in local_values]
        replica_count = max(value_counts, default=1)
        replicas = []
        for replica in range(replica_count):
            tensors = []
            for values in local_values:
                last_place = len(values) - 1
                place = min(replica, last_place)
                tensors.append(values[place])
            replicas.append(tensors)

        sizes = {find_static_batch_size(tensors) for tensors in replicas}
        has_static_size = len(sizes) == 1 and None not in sizes
        if self._uses_xla or has_static_size:
            example_count = batch_size(replicas[0])
            part_size = self._equal_size(example_count)
            count = example_count // part_size
            step = self._run_equal_part
        else:
            # Several replicas have to take the same number of parts.
            count = self._parts
            if self._strategy.num_replicas_in_sync == 1:
                example_count = batch_size(replicas[0])
                count = tf.clip_by_value(example_count, 1, self._parts)
            step = functools.partial(self._run_dynamic_part, count=count)

        def is_left(number: tf.Tensor) -> tf.Tensor:
            return number < count

        def run_part(number: tf.Tensor) -> tuple[tf.Tensor]:
            # Otherwise "while/" would stand before the names of the task's summaries.
            with tf.name_scope(""):
                self._strategy.run(step, args=(inputs, number), options=self._options)
            return (number + 1,)

        # More than one iteration at a time would keep the activations of several parts in memory.
        first_number = tf.constant(0)
        tf.while_loop(is_left, run_part, (first_number,), parallel_iterations=1)
        self._strategy.run(self._update, options=self._options)

    def _equal_size(self, n: IntLike) -> IntLike:
        """Returns the size of the parts of n examples, a divisor of n.

        XLA needs one static shape for all parts.
        """
        if isinstance(n, int):
            # The parts are as large as possible.
            for count in range(self._parts, n):
                if n % count == 0:
                    return n // count
            return 1

        size = tf.maximum(n // self._parts, 1)
        is_divisible = n % self._parts == 0
        return tf.where(is_divisible, size, 1)

    @tf.autograph.experimental.do_not_convert
    def _run_equal_part(self, inputs: Any, number: tf.Tensor) -> None:
        """Runs the step on a part of a batch whose parts are all of one size."""
        leaves = tf.nest.flatten(inputs)
        example_count = batch_size(leaves)
        size = self._equal_size(example_count)
        start = number * size
        part = slice_batch(inputs, start, size)
        is_first = tf.equal(number, 0)
        share = _share(size, example_count)
        self._step(part, share, is_first)

    @tf.autograph.experimental.do_not_convert
    def _run_dynamic_part(self, inputs: Any, number: tf.Tensor, count: IntLike) -> None:
        """Runs the step on a part of a batch whose size is known only when it runs.

        Replicas take the same number of parts. A replica with fewer examples repeats some of them,
        with a weight of 0.
        """
        leaves = tf.nest.flatten(inputs)
        example_count = batch_size(leaves)
        start = number * example_count // count
        end = (number + 1) * example_count // count
        # At least one example, if there is any.
        smallest_size = tf.minimum(example_count, 1)
        size = tf.maximum(end - start, smallest_size)
        part = slice_batch(inputs, start, size)
        share = _share(end - start, example_count)
        is_first = tf.equal(number, 0)

        # The metrics of a repeated example keep their values.
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._strategy.num_replicas_in_sync > 1:
            is_repeated = tf.equal(start, end)
            context = restore_variables_where(is_repeated, self._get_metric_variables())
        with context:
            self._step(part, share, is_first)


@tf.autograph.experimental.do_not_convert
def find_static_batch_size(leaves: Sequence[Any]) -> int | None:
    """Returns the static number of examples in a replica's batch.

    None if it is not known before the step runs.

    Args:
      leaves: The tensors of the batch.

    Raises:
      UsageError: when no tensor has a first axis, or the first axes have different sizes.
    """
    batched_leaves = [leaf for leaf in leaves if _has_examples(leaf)]
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in batched_leaves}
    static_sizes = sizes - {None}
    if not batched_leaves or len(static_sizes) > 1:
        leaf_specs = [tf.type_spec_from_value(leaf) for leaf in leaves]
        specs = describe_structure(leaf_specs)
        raise UsageError(
            "trainer.accumulate_steps: the tensors of a batch need first axes of one size, "
            f"along which to split it: {specs}; give each tensor an entry for each example, "
            "or set trainer.accumulate_steps=1"
        )
    if len(sizes) == 1:
        return sizes.pop()
    return None


@tf.autograph.experimental.do_not_convert
def batch_size(leaves: Sequence[Any]) -> IntLike:
    """Returns the number of examples in a replica's batch.

    It is an int if it is static, else an int32 scalar.
    """
    size = find_static_batch_size(leaves)
    if size is not None:
        return size
    first_leaf = next(leaf for leaf in leaves if _has_examples(leaf))
    shape = tf.shape(first_leaf)
    return tf.cast(shape[0], tf.int32)


@tf.autograph.experimental.do_not_convert
def slice_batch(inputs: Any, start: IntLike, size: IntLike) -> Any:
    """Returns `size` examples of a nested batch from `start` on.

    What has no first axis stays as it is.
    """

    def slice_value(value: Any) -> Any:
        if not _has_examples(value):
            return value
        if isinstance(value, tf.RaggedTensor):
            return value[start : start + size]
        if isinstance(value, tf.SparseTensor):
            # The shape of a sparse tensor is int64.
            sparse_start = tf.cast(start, tf.int64)
            sparse_size = tf.cast(size, tf.int64)
            other_sizes = value.dense_shape[1:]
            begin, sizes = _bounds(sparse_start, sparse_size, other_sizes)
            return tf.sparse.slice(value, begin, sizes)

        shape = tf.shape(value)
        begin, sizes = _bounds(start, size, shape[1:])
        part = tf.slice(value, begin, sizes)
        if value.shape.rank is None:
            return part
        # A slice by tensors has lost the static shape.
        static_size = size if isinstance(size, int) else None
        static_shape = [static_size, *value.shape[1:]]
        return tf.ensure_shape(part, static_shape)

    return tf.nest.map_structure(slice_value, inputs)


@contextlib.contextmanager
def restore_variables_where(condition: tf.Tensor, variables: Sequence[Variable]) -> Iterator[None]:
    """A context after which variables have their earlier values if `condition` is true.

    Runs in graph, on a replica.
    """
    native_variables = list(map(native_variable, variables))
    old_values = [tf.identity(variable.read_value()) for variable in native_variables]
    yield
    for variable, old_value in zip(native_variables, old_values, strict=True):
        new_value = variable.read_value()
        value = tf.where(condition, old_value, new_value)
        variable.assign(value)


def _bounds(start: IntLike, size: IntLike, others: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns begin and sizes of a slice of the first axis that takes all of the other axes.

    Args:
      start: The first example.
      size: The number of examples.
      others: The sizes of the other axes, an int vector.
    """
    zeros = tf.zeros_like(others)
    begin = tf.concat([[start], zeros], 0)
    sizes = tf.concat([[size], others], 0)
    return begin, sizes


def _share(size: IntLike, n: IntLike) -> FloatLike:
    """Returns a part's share of a batch of n examples.

    It is a float if it is known now, else a float32 scalar.
    """
    if isinstance(n, int):
        return size / n
    # A replica may have no examples.
    count = tf.maximum(n, 1)
    part_size = tf.cast(size, tf.float32)
    count = tf.cast(count, tf.float32)
    return part_size / count


def _has_examples(value: Any) -> bool:
    """Whether a part of a batch has a first axis: any tensor that is no scalar."""
    return tf.is_tensor(value) and value.shape.rank != 0


class Accumulation:
    """Splits the batch of each training step into micro-batches. Created in strategy scope.

    Args:
      steps: The number of micro-batches in a batch. 1 means that batches are not split.
      class_name: The name of the trainer's class, for messages.
      task: The task.
      metrics: The training metrics.
      is_fused: Whether steps are fused in a program of XLA.

    Attributes:
      steps: The argument of this name.
    """

    def __init__(
        self, steps: int, class_name: str, task: TaskLike, metrics: MetricSet, *, is_fused: bool
    ) -> None:
        self.steps = steps
        self._class_name = class_name
        self._task = task
        self._metrics = metrics
        self._is_fused = is_fused
        self._strategy = tf.distribute.get_strategy()
        self._sums = GradientSums()
        self._is_used = False

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the gradients' sums, which no checkpoint needs."""
        return list(self._sums.variables.values())

    def check_first_step(self) -> None:
        """Checks, after the first step, that the step was split.

        Runs eagerly, on the host.

        Raises:
          UsageError: when it was not split, because a subclass has its own train_step.
        """
        if self.steps > 1 and not self._is_used:
            raise UsageError(
                f"trainer.accumulate_steps={self.steps}: {self._class_name}.train_step does not "
                "call super().train_step, which splits the batch; call it, "
                "or set trainer.accumulate_steps=1"
            )

    @tf.autograph.experimental.do_not_convert
    def train(
        self,
        step: Callable[..., None],
        optimizer: Optimizers,
        inputs: Any,
        options: tf.distribute.RunOptions,
    ) -> None:
        """Trains on a batch, with one update. Runs in graph, in cross-replica context.

        Args:
          step: A function of a replica's batch, an optimizer and the batch's share that runs a
            training step.
          optimizer: The optimizer, or a dict of optimizers by name.
          inputs: The batch, as strategy.run takes it.
          options: The options of strategy.run.
        """
        self._is_used = True
        self._sums.calls = {}

        @tf.autograph.experimental.do_not_convert
        def run_part(part: Any, share: FloatLike, is_first: tf.Tensor) -> None:
            if not isinstance(optimizer, Mapping):
                accumulator = GradientAccumulator(self._sums, optimizer, share, is_first)
                step(part, accumulator, share)
                return

            accumulators = {
                name: GradientAccumulator(self._sums, named_optimizer, share, is_first)
                for name, named_optimizer in optimizer.items()
            }
            if isinstance(optimizer, NamedOptimizers):
                named_accumulators = optimizer.with_optimizers(accumulators)
                step(part, named_accumulators, share)
            else:
                step(part, accumulators, share)

        batches = MicroBatches(
            self.steps,
            self._strategy,
            run_part,
            self._update,
            get_metric_variables=self._metrics.variables,
            options=options,
            uses_xla=self._is_fused,
        )
        batches(inputs)

    @tf.autograph.experimental.do_not_convert
    def _update(self) -> None:
        if not self._sums.calls:
            raise UsageError(
                f"trainer.accumulate_steps: {type(self._task).__name__}.train_step applied no "
                "gradients through the optimizer that it was called with; "
                "call trainer_kit.apply_gradients(optimizer, ...) with that argument"
            )
        self._sums.update()
