"""Gradient accumulation: one update of the weights with the gradients of several micro-batches.

A training step gets a GradientAccumulator in place of its optimizer. It adds gradients to the
GradientSums, variables of each replica. After the last micro-batch `GradientSums.update` repeats
the calls of the step, with the sums and on the optimizer itself: clipping, weight decay, schedules
and the loss scale see one update.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers import gradients as updates
from trainer_kit.optimizers.gradients import Gradient, Pair
from trainer_kit.runtime.keras_internals import get_trained_variables
from trainer_kit.typing import FloatLike, Optimizer, Variable

Apply: TypeAlias = Callable[[list[Pair]], object]

# The key of a call: the `id` of optimizer and variables, and how many equal calls came before it.
Key: TypeAlias = tuple[Any, ...]

_FORWARDED_ATTRIBUTES = (
    "learning_rate",
    "iterations",
    "variables",
    "dynamic_scale",
    "uses_every_gradient",
)
_OFFERED = "apply_gradients, apply, scale_loss, learning_rate, iterations and variables"

# Gradients of these dtypes are summed in float32.
_LOW = (tf.float16, tf.bfloat16)
_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


class UnavailableError(UsageError, AttributeError):
    """A training step uses an optimizer attribute that gradient accumulation cannot offer."""


# Keras's own gradient accumulation raises an error under MirroredStrategy.
class GradientSums:
    """The weighted sums of the gradients of micro-batches, on each replica.

    Checkpoints do not need the sums.

    Attributes:
      variables: The variables of the sums, by the call and the number of the gradient in it.
      calls: For each call of the step the pairs of gradients and variables, and the function that
        repeats the call on the optimizer itself, with other gradients. Has to be emptied before a
        step is traced, or runs eagerly.
    """

    def __init__(self) -> None:
        self.variables: dict[tuple[Key, int], tf.Variable] = {}
        self.calls: dict[Key, tuple[Sequence[Pair], Apply]] = {}

    @tf.autograph.experimental.do_not_convert
    def add(
        self,
        key: Key,
        pairs: Sequence[Pair],
        apply: Apply,
        weight: FloatLike,
        is_first: bool | tf.Tensor,
    ) -> None:
        """Adds weighted gradients to their sums; runs on a replica.

        Args:
          key: The key of the call, the same in each micro-batch and on each replica.
          pairs: The gradients with their variables. A gradient is None for a variable that keeps
            its value.
          apply: Repeats the call on the optimizer itself, with pairs of other gradients and the
            same variables.
          weight: The micro-batch's share of the batch: a float above 0, or a float32 scalar. 0
            makes even NaN a 0.
          is_first: Whether the micro-batch is the first of its batch, so that its gradients replace
            the sums, a bool scalar.
        """
        self.calls[key] = (pairs, apply)
        # A weight of a tensor may be 0, and 0 times NaN is NaN.
        multiply = tf.multiply if isinstance(weight, float) else tf.math.multiply_no_nan
        for place, (gradient, variable) in enumerate(pairs):
            if gradient is None:
                continue

            total = self._get_or_create_sum((key, place), gradient, variable)
            dtype = total.dtype
            dense = tf.cast(tf.convert_to_tensor(gradient), dtype)
            weighted = multiply(dense, tf.cast(weight, dtype))
            new_total = tf.where(is_first, weighted, total + weighted)
            total.assign(new_total)

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Applies the sums as the step has applied its gradients.

        Runs on a replica, after the last micro-batch.
        """
        for key, (pairs, apply) in self.calls.items():
            sums: list[Pair] = []
            for place, (gradient, variable) in enumerate(pairs):
                total = None
                if gradient is not None:
                    total = tf.cast(self.variables[key, place], gradient.dtype)
                sums.append((total, variable))
            apply(sums)

    def _get_or_create_sum(
        self, key: tuple[Key, int], gradient: Gradient, variable: Variable
    ) -> tf.Variable:
        """Returns the variable for the sum of a gradient, which all replicas share.

        Creates it if it does not exist.
        """
        if key not in self.variables:
            dtype = tf.float32 if gradient.dtype in _LOW else gradient.dtype
            # In a step that is traced the variable is created outside of its graph.
            with tf.init_scope():
                zeros = tf.zeros(variable.shape, dtype)
                self.variables[key] = tf.Variable(
                    zeros,
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                    name="accumulated_gradient",
                    # With lifting the whole training loop would be traced twice.
                    experimental_enable_variable_lifting=False,
                )
        return self.variables[key]


class GradientAccumulator:
    """Takes the place of a step's optimizer: adds gradients up and changes no weight.

    Args:
      sums: The sums that gradients are added to.
      optimizer: The optimizer that makes the update.
      weight: See `GradientSums.add`.
      is_first: See `GradientSums.add`.
    """

    def __init__(
        self,
        sums: GradientSums,
        optimizer: Optimizer,
        weight: FloatLike,
        is_first: bool | tf.Tensor,
    ) -> None:
        self._sums = sums
        self._optimizer = optimizer
        self._weight = weight
        self._is_first = is_first
        self._graph = tf.compat.v1.get_default_graph()
        # The number of calls, by the graph in which they are traced and their variables.
        self._call_counts: Counter[Any] = Counter()

    @tf.autograph.experimental.do_not_convert
    def needs_gradients(self) -> tf.Tensor:
        """Returns whether the gradients of this step are used, a bool scalar; runs on a replica."""
        return updates.needs_gradients(self._optimizer)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss times the optimizer's loss scale, if it has one."""
        return updates.scale_loss(self._optimizer, loss)

    @tf.autograph.experimental.do_not_convert
    def add_gradients(self, pairs: Sequence[Pair]) -> None:
        """Adds the gradients of `trainer_kit.apply_gradients` to the sums; runs on a replica."""
        apply = functools.partial(updates.apply_gradients, self._optimizer)
        self._add(pairs, apply)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(
        self, grads_and_vars: Iterable[Pair], *arguments: Any, **options: Any
    ) -> Any:
        """Adds the gradients of a micro-batch to the sums; runs on a replica.

        After the last micro-batch of a batch, the optimizer gets the sums and the further
        arguments.

        Returns:
          The number of updates so far: `iterations` of the optimizer, which its own
          `apply_gradients` returns too.
        """
        self._add(
            list(grads_and_vars),
            lambda sums: self._optimizer.apply_gradients(sums, *arguments, **options),
        )
        return self._optimizer.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(
        self,
        grads: Iterable[Gradient | None],
        trainable_variables: Iterable[Variable] | None = None,
    ) -> None:
        """Adds gradients to the sums; runs on a replica.

        Args:
          grads: The gradients.
          trainable_variables: The variable of each gradient. None: those that the optimizer was
            built with.
        """
        if trainable_variables is None:
            trainable_variables = get_trained_variables(self._optimizer)
        # Only optimizers of Keras 3 have the method.
        optimizer: keras.Optimizer = self._optimizer
        self._add(
            list(zip(grads, trainable_variables, strict=True)),
            lambda sums: optimizer.apply(*zip(*sums, strict=True)),
        )

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED_ATTRIBUTES and hasattr(self._optimizer, name):
            return getattr(self._optimizer, name)
        raise UnavailableError(
            f"trainer.accumulate_steps: the training step uses optimizer.{name};"
            f" with micro-batches an optimizer has only {_OFFERED}."
            " Change the step, or set trainer.accumulate_steps=1"
        )

    def _add(self, pairs: Sequence[Pair], apply: Apply) -> None:
        _check_unconditional(self._graph)
        variable_ids = [id(variable) for _, variable in pairs]
        ids = (id(self._optimizer), *variable_ids)
        # Counted by graph, since a tf.function in the step may be traced more than once.
        graph = tf.compat.v1.get_default_graph()
        call = (graph, ids)
        key = (ids, self._call_counts[call])
        self._sums.add(key, pairs, apply, self._weight, self._is_first)
        self._call_counts[call] += 1


def _check_unconditional(outer: tf.Graph) -> None:
    """Raises UsageError inside a condition or a loop of the step.

    The update would run in any case, and once.
    """
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        if type(graph).__name__ in _BRANCHES:
            raise UsageError(
                "trainer.accumulate_steps: the training step applies gradients inside a condition"
                " or a loop, and the micro-batches of a batch have one update; apply them in every"
                " step, or set trainer.accumulate_steps=1"
            )
        graph = getattr(graph, "outer_graph", None)
