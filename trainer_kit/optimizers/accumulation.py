"""Gradient accumulation: one update of the weights with the gradients of several micro-batches.

A training step gets a GradientAccumulator in place of its optimizer, a new one for each micro-batch. It adds gradients
to the GradientSums: variables of each replica, or tensors if no loop runs over the micro-batches of the one replica.
After the last micro-batch `GradientSums.update` makes the calls that the step has made, with the sums and on the
optimizer itself: clipping, weight decay, schedules and the loss scale see one update.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers import gradients as updates

Apply: TypeAlias = Callable[[list[Any]], Any]
Key: TypeAlias = tuple[Any, ...]  # of a call: the `id` of each variable, and how often the step has made it before

_OFFERED = "apply_gradients, apply, scale_loss, learning_rate, iterations and variables"
_LOW = (tf.float16, tf.bfloat16)  # gradients of these dtypes are summed in float32
_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


class UnavailableError(UsageError, AttributeError):
    """A training step uses an attribute of its optimizer that gradient accumulation cannot offer."""


@dataclasses.dataclass
class _Call:
    """One call by which a training step applies gradients.

    Attributes:
      apply: Makes the call on the optimizer itself, with other gradients.
      sums: The variable or the tensor that adds up each gradient; None for variables without a gradient.
      dtypes: The dtype of each gradient.
    """

    apply: Apply
    sums: list[tf.Variable | tf.Tensor | None]
    dtypes: list[Any]

    def values(self) -> list[tf.Tensor | None]:
        """Returns the sums of this replica, in the dtypes of the gradients."""
        pairs = zip(self.sums, self.dtypes, strict=True)
        return [None if one is None else tf.cast(one, dtype) for one, dtype in pairs]


class GradientSums:
    """The weighted sums of the gradients of micro-batches, on each replica. Checkpoints do not need them.

    Args:
      optimizer: The optimizer that makes the update.

    Attributes:
      optimizer: The argument of this name.

    Raises:
      UsageError: for a loss-scaling optimizer of tf_keras: tasks recognise it by its class, and would not scale.
    """

    def __init__(self, optimizer: Any) -> None:
        if hasattr(optimizer, "get_scaled_loss"):
            raise UsageError(
                f"trainer.accumulate_steps: {type(optimizer).__module__}.{type(optimizer).__name__} scales the loss in "
                "the way of tf_keras, which cannot be split into micro-batches; set trainer.accumulate_steps=1, or "
                "train in float32 or bfloat16"
            )
        self.optimizer = optimizer
        self._calls: dict[Key, _Call] = {}
        self._as_tensors = False
        self._made: dict[tuple[Key, int], tf.Variable] = {}  # by the call, and the number of the gradient in it

    @property
    def variables(self) -> list[tf.Variable]:
        """The variables of the sums that exist so far."""
        return list(self._made.values())

    @property
    def has_gradients(self) -> bool:
        """Whether the step has applied gradients."""
        return bool(self._calls)

    def begin(self, as_tensors: bool = False) -> None:
        """Forgets the calls of an earlier step; called before a step is traced, or runs eagerly.

        Args:
          as_tensors: Whether the micro-batches are in one graph, and on one replica, so that sums may be tensors:
            variables take a tenth of the time of a small step.
        """
        self._calls, self._as_tensors = {}, as_tensors

    @property
    def tensors(self) -> list[tf.Tensor]:
        """The sums so far that are tensors."""
        return [one for call in self._calls.values() for one in call.sums if isinstance(one, tf.Tensor)]

    def part(self, weight: Any, first: Any) -> GradientAccumulator:
        """Returns the stand-in for the optimizer in one micro-batch; runs in graph or eagerly, on a replica.

        Args:
          weight: The micro-batch's share of the batch: a float above 0, or a float32 scalar that may be 0.
          first: Whether the micro-batch is the first of its batch, so that its gradients replace the sums: a bool, or
            a bool scalar.
        """
        return GradientAccumulator(self, weight, first)

    @tf.autograph.experimental.do_not_convert
    def add(
        self,
        key: Key,
        apply: Apply,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        weight: Any,
        first: Any,
        inside: bool = False,
    ) -> None:
        """Adds weighted gradients to their sums; runs on a replica.

        Args:
          key: The key of the call, the same in each micro-batch and on each replica.
          apply: Makes the call on the optimizer itself, with other gradients.
          gradients: The gradients; None for variables that keep their values.
          variables: The variable of each gradient; None where the step does not name it.
          weight: See `part`.
          first: See `part`.
          inside: Whether the gradients are in a tf.function of the step, which only variables leave.
        """
        gradients, variables = self._kept(gradients, variables)
        call = self._calls.setdefault(key, _Call(apply, [None] * len(gradients), [None] * len(gradients)))
        pairs = []
        for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            call.dtypes[place] = gradient.dtype
            if self._as_tensors and isinstance(first, bool) and not inside:
                call.sums[place] = _added(call.sums[place], gradient, weight)
            else:
                call.sums[place] = self._sum(key, place, gradient, variable)
                pairs.append((call.sums[place], gradient))
        _add_to(pairs, weight, first)

    def _kept(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns what is added to sums, and the variable of each; runs in graph, on a replica."""
        return gradients, variables

    @tf.autograph.experimental.do_not_convert
    def update(self) -> None:
        """Applies the sums as the step has applied its gradients; runs on a replica, after the last micro-batch."""
        for call in self._calls.values():
            call.apply(call.values())

    def _sum(self, key: Key, place: int, gradient: Any, variable: Any) -> tf.Variable:
        """Returns the variable for the sum of a gradient, the same one on all replicas; creates it if it is new."""
        if (key, place) not in self._made:
            shape = gradient.shape if gradient.shape.is_fully_defined() else getattr(variable, "shape", None)
            if shape is None:
                raise UsageError(
                    f"trainer.accumulate_steps: the shape of gradient {place} is not known ({gradient.shape}); call "
                    "optimizer.apply_gradients, which names the variables"
                )
            with tf.init_scope():
                self._made[key, place] = tf.Variable(
                    tf.zeros(shape, _dtype_of_sum(gradient)),
                    trainable=False,
                    synchronization=tf.VariableSynchronization.ON_READ,
                    aggregation=tf.VariableAggregation.SUM,
                    name="accumulated_gradient",
                    experimental_enable_variable_lifting=False,  # else the whole training loop is traced twice
                )
        return self._made[key, place]


class DiscardedGradients(GradientSums):
    """Computes gradients and keeps nothing of them; for a trial of the memory that a whole batch needs."""

    def _kept(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Reduces gradients to one number, for which all of them are in memory at the same time, as for clipping."""
        present = [tf.cast(tf.convert_to_tensor(one), tf.float32) for one in gradients if one is not None]
        norm = tf.linalg.global_norm(present)
        total = tf.add_n([tf.reduce_sum(norm * one) for one in present])
        return [total], [total]


class GradientAccumulator:
    """What a training step gets in place of its optimizer: gradients are added up, and no weight changes.

    Args:
      sums: The sums that gradients are added to.
      weight: See `GradientSums.part`.
      first: See `GradientSums.part`.
    """

    def __init__(self, sums: GradientSums, weight: Any, first: Any) -> None:
        self._sums, self._optimizer, self._weight, self._first = sums, sums.optimizer, weight, first
        self._graph = tf.compat.v1.get_default_graph()
        self._seen: Counter[Any] = Counter()  # calls by the graph in which they are traced, and their variables

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the update."""
        return self._optimizer.learning_rate

    @property
    def iterations(self) -> Any:
        """The number of updates so far."""
        return self._optimizer.iterations

    @property
    def variables(self) -> Any:
        """The variables of the optimizer."""
        return self._optimizer.variables

    @property
    def dynamic_scale(self) -> Any:
        """The loss scale of the optimizer; None if it has none."""
        return getattr(self._optimizer, "dynamic_scale", None)

    @property
    def uses_every_gradient(self) -> bool:
        """Whether the optimizer uses the gradients of all steps."""
        return bool(getattr(self._optimizer, "uses_every_gradient", True))

    @tf.autograph.experimental.do_not_convert
    def needs_gradients(self) -> tf.Tensor:
        """Returns whether the gradients of this step will be used, a bool scalar; runs on a replica."""
        return updates.needs_gradients(self._optimizer)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: Any) -> Any:
        """Returns the loss times the optimizer's loss scale, if it has one."""
        return updates.scale_loss(self._optimizer, loss)

    @tf.autograph.experimental.do_not_convert
    def add_gradients(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Adds the gradients of `trainer_kit.apply_gradients` to the sums; runs on a replica."""
        optimizer, variables = self._optimizer, [variable for _, variable in pairs]

        def apply(sums: list[Any]) -> None:
            updates.apply_gradients(optimizer, list(zip(sums, variables, strict=True)))

        self._add(apply, [gradient for gradient, _ in pairs], variables)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Any]], *arguments: Any, **options: Any) -> Any:
        """Adds the gradients of a micro-batch to the sums; runs on a replica.

        After the last micro-batch of a batch, the optimizer gets the sums and the further arguments.

        Returns:
          The number of updates so far: `iterations` of the optimizer, which its own `apply_gradients` returns too.
        """
        pairs, optimizer = list(grads_and_vars), self._optimizer
        variables = [variable for _, variable in pairs]

        def apply(sums: list[Any]) -> None:
            optimizer.apply_gradients(list(zip(sums, variables, strict=True)), *arguments, **options)

        self._add(apply, [gradient for gradient, _ in pairs], variables)
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Adds gradients to the sums; runs on a replica.

        Args:
          grads: The gradients.
          trainable_variables: The variable of each gradient; None: those that the optimizer was built with.
        """
        optimizer, gradients = self._optimizer, list(grads)
        named = None if trainable_variables is None else list(trainable_variables)

        def apply(sums: list[Any]) -> None:
            optimizer.apply(sums, *([] if named is None else [named]))

        self._add(apply, gradients, [None] * len(gradients) if named is None else named)

    def __getattr__(self, name: str) -> Any:
        raise UnavailableError(
            f"trainer.accumulate_steps: the training step uses optimizer.{name}; with micro-batches an optimizer has "
            f"only {_OFFERED}. Change the step, or set trainer.accumulate_steps=1"
        )

    def _add(self, apply: Apply, gradients: list[Any], variables: list[Any]) -> None:
        _check_unconditional(self._graph)
        names = tuple(map(id, variables))
        of_graph = tf.compat.v1.get_default_graph(), names  # a tf.function in the step may be traced more than once
        key, inside = (names, self._seen[of_graph]), of_graph[0] is not self._graph
        self._sums.add(key, apply, gradients, variables, self._weight, self._first, inside)
        self._seen[of_graph] += 1


def _add_to(pairs: Sequence[tuple[tf.Variable, Any]], weight: Any, first: Any) -> None:
    """Adds weighted gradients to variables, or replaces the variables by them. A weight of 0 makes even NaN a 0."""
    parts = [_weighted(one, weight) for _, one in pairs]

    def replace() -> None:
        for (variable, _), part in zip(pairs, parts, strict=True):
            variable.assign(part)

    def add() -> None:
        for (variable, _), part in zip(pairs, parts, strict=True):
            variable.assign_add(part)

    if isinstance(first, bool):
        replace() if first else add()
    else:
        tf.cond(first, replace, add)


def _added(total: tf.Tensor | None, gradient: Any, weight: float) -> tf.Tensor:
    weighted = _weighted(gradient, weight)
    return weighted if total is None else total + weighted


def _weighted(gradient: Any, weight: Any) -> tf.Tensor:
    dtype, product = _dtype_of_sum(gradient), tf.multiply if isinstance(weight, float) else tf.math.multiply_no_nan
    return product(tf.cast(tf.convert_to_tensor(gradient), dtype), tf.cast(weight, dtype))


def _dtype_of_sum(gradient: Any) -> tf.DType:
    return tf.float32 if gradient.dtype in _LOW else gradient.dtype


def _check_unconditional(outer: Any) -> None:
    """Raises UsageError inside a condition or a loop of the step: the update would come in any case, and once."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not outer:
        if type(graph).__name__ in _BRANCHES:
            raise UsageError(
                "trainer.accumulate_steps: the training step applies gradients inside a condition or a loop, and the "
                "micro-batches of a batch have one update; apply them in every step, or set trainer.accumulate_steps=1"
            )
        graph = getattr(graph, "outer_graph", None)
