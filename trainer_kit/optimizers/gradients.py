"""Updates weights by gradients, on one replica or several.

The gradients are summed over replicas, then the sum is processed and clipped, then the optimizer
updates the weights. Keras clips on each replica, before it sums, so that several replicas train
differently from one. Here the sum is clipped, and 1, 2 or 4 replicas with the same global batch
train alike.

`create_optimizer` puts the bounds into the attribute `clipping` of the optimizer. With several
replicas the clip arguments of a Keras optimizer are honoured in the same way. The attributes
`gradient_norms` and `gradient_processing` of an optimizer, where a config asks for them, see the
sum before it is clipped.

Functions without tensor conditions are marked `do_not_convert`, here and elsewhere: AutoGraph takes
20 to 60 ms to convert one.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.schema.optimizer_configs import AdamWeightDecayConfig, BaseOptimizerConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import variable_path
from trainer_kit.typing import FloatLike, Optimizer, Optimizers, Variable

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices
# A gradient with its variable. The gradient is None if the loss does not depend on the variable.
Pair: TypeAlias = tuple[Gradient | None, Variable]

# Called with the (gradient, variable) pairs of every call of apply_gradients, before they are
# clipped. It is set while a divergence is examined, eagerly, and is None otherwise.
on_gradients: Callable[[list[Pair]], None] | None = None


@dataclasses.dataclass(frozen=True)
class Clipping:
    """Bounds of gradients; None means no bound.

    Several bounds are applied in the order global_clipnorm, clipnorm, clipvalue.

    Attributes:
      clipnorm: The bound of the L2 norm of each gradient.
      clipvalue: The bound of the absolute value of each element.
      global_clipnorm: The bound of the L2 norm of all gradients together.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    @classmethod
    def from_config(cls, config: OptimizationConfig) -> Clipping:
        """Returns the clipping that the config of the chosen optimizer asks for.

        AdamW's gradient_clip_norm is a global norm.
        """
        section = config.optimizer.get()

        # No optimizer is chosen, or a registered one without settings of clipping.
        if not isinstance(section, BaseOptimizerConfig):
            return cls()

        global_bounds = [section.global_clipnorm]
        if isinstance(section, AdamWeightDecayConfig):
            global_bounds.append(section.gradient_clip_norm)
        # 0 and None mean no bound.
        used_bounds = [bound for bound in global_bounds if bound]
        smallest = min(used_bounds, default=None)
        return cls(section.clipnorm, section.clipvalue, smallest)

    @property
    def is_active(self) -> bool:
        """Whether any bound is set."""
        bounds = (self.clipnorm, self.clipvalue, self.global_clipnorm)
        return any(bound is not None for bound in bounds)


def global_norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns the L2 norm of all gradients together, a float32 scalar summed in float32.

    Runs eagerly or in graph.
    """
    values = []
    for gradient in gradients:
        gradient_values = get_values(gradient)
        values.append(tf.cast(gradient_values, tf.float32))
    return tf.linalg.global_norm(values)


def clip(gradients: Sequence[Gradient], clipping: Clipping) -> list[Gradient]:
    """Returns `gradients` within the bounds of `clipping`; runs eagerly or in graph.

    Norms are summed in float32. Indices of IndexedSlices must not repeat. Gradients that are not
    finite stay so, except under clipvalue, which bounds infinities like any number.
    """
    clipped = list(gradients)

    if clipping.global_clipnorm is not None:
        # The factor is 1 for norms within the bound, and no norm is divided by 0.
        bound = clipping.global_clipnorm
        norm = global_norm(clipped)
        divisor = tf.maximum(norm, bound)
        factor = bound / divisor
        clipped = [scale_gradient(gradient, factor) for gradient in clipped]

    if clipping.clipnorm is not None:
        bound = clipping.clipnorm
        clipped = [tf.clip_by_norm(gradient, bound) for gradient in clipped]

    if clipping.clipvalue is not None:
        bound = clipping.clipvalue
        clipped = [tf.clip_by_value(gradient, -bound, bound) for gradient in clipped]

    return clipped


@tf.autograph.experimental.do_not_convert
def scale_loss(optimizer: Optimizers, loss: tf.Tensor) -> tf.Tensor:
    """Returns the loss to differentiate, multiplied by the loss scale of `optimizer` if it has one.

    Runs eagerly or in graph, on a replica. `apply_gradients` undoes the scaling.

    Raises:
      UsageError: for a loss-scaling optimizer of tf_keras, which scales in another way.
    """
    if hasattr(optimizer, "get_scaled_loss"):
        optimizer_class = type(optimizer)
        raise UsageError(
            f"{optimizer_class.__module__}.{optimizer_class.__name__} is of tf_keras; scale the"
            " loss with trainer_kit.optimizers.loss_scale.LossScaleOptimizer around an optimizer"
            " of Keras 3"
        )
    scale = getattr(optimizer, "scale_loss", None)
    return loss if scale is None else scale(loss)


@tf.autograph.experimental.do_not_convert
def apply_gradients(optimizer: Optimizers, gradients_and_variables: Iterable[Pair]) -> None:
    """Updates variables by their gradients; runs eagerly or in graph, in a replica.

    Each replica passes the gradient of its share of the loss (its mean loss divided by the number
    of replicas). The gradients are summed over replicas, unscaled, clipped and applied. Variables
    without a gradient (None) keep their values. One warning, when the step is traced, names them.
    Rows of an IndexedSlices that are for the same index are summed first: Keras' optimizers would
    treat them as separate steps.

    Args:
      optimizer: An optimizer of Keras 3, created in the scope of the strategy. Its attribute
        `clipping` may be a Clipping. Or several optimizers with separate variables
        (`trainer.optimizers`): each gets the gradients of its variables.
      gradients_and_variables: Pairs. The variables are of Keras 3, of a tf_keras model or
        tf.Variables.

    Raises:
      UsageError: when no variable has a gradient, or the call is outside of a replica.
    """
    pairs = list(gradients_and_variables)

    if tf.distribute.get_replica_context() is None:
        raise UsageError(
            "apply_gradients was called in cross-replica context; call it inside strategy.run"
        )
    if isinstance(optimizer, Mapping):
        if not hasattr(optimizer, "apply_gradients"):
            raise UsageError(
                f"apply_gradients got the dict of the optimizers {', '.join(optimizer)}; call it"
                " with one of them, or let the task's method optimizer_variables say which"
                " variables each updates"
            )
        optimizer.apply_gradients(pairs)
        return

    # A GradientAccumulator has this method.
    add_gradients = getattr(optimizer, "add_gradients", None)
    if add_gradients is not None:
        add_gradients(pairs)
        return

    present = _drop_missing_gradients(pairs)

    # Built with all variables, so that one that is frozen for now can join later.
    if not getattr(optimizer, "built", True):
        all_variables = [variable for _, variable in pairs]
        with tf.init_scope():
            optimizer.build(all_variables)

    gradients = [gradient for gradient, _ in present]
    gradients = _with_unique_rows(gradients)
    variables = [variable for _, variable in present]

    if on_gradients is not None:
        unscaled = gradients
        # In float16 the optimizer has a scale of the loss.
        scale = getattr(optimizer, "dynamic_scale", None)
        if scale is not None:
            inverse = 1.0 / float(scale)
            unscaled = [scale_gradient(gradient, inverse) for gradient in gradients]
        unscaled_pairs = zip(unscaled, variables, strict=True)
        on_gradients(list(unscaled_pairs))

    update_variables(optimizer, gradients, variables)


@tf.autograph.experimental.do_not_convert
def needs_gradients(optimizer: Optimizers) -> tf.Tensor:
    """Returns whether an optimizer uses the gradients of this step, a bool scalar.

    Runs eagerly or in graph, in a replica. The result is false in the steps of a period whose
    gradients are left out (`trainer.optimizers.<name>.period`), so that a training step does not
    have to compute them.
    """
    # A PeriodicOptimizer has this method.
    needs = getattr(optimizer, "needs_gradients", None)
    return tf.constant(True) if needs is None else needs()


def update_variables(
    optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> None:
    """Updates variables by gradients that `apply_gradients` has prepared; in a replica.

    No gradient is None. An optimizer around another one (for a loss scale, or for an update in
    every n-th step) calls this for the inner optimizer.
    """
    # An optimizer around another one unscales first, then clips as its inner optimizer says.
    if hasattr(optimizer, "inner_optimizer"):
        pairs = list(zip(gradients, variables, strict=True))
        optimizer.apply_gradients(pairs)
    else:
        clip_and_apply(optimizer, gradients, variables)


def clip_and_apply(
    optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> None:
    """Sums unscaled gradients over replicas, processes, clips and applies them; in a replica.

    No gradient is None.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    process = getattr(optimizer, "gradient_processing", None)
    norms = getattr(optimizer, "gradient_norms", None)

    clipping = getattr(optimizer, "clipping", None)
    if clipping is None:
        # With several replicas, the bounds are those of the Keras optimizer itself. With one, it
        # clips by itself.
        bounds: dict[str, float | None] = {}
        if replicas > 1:
            for field in dataclasses.fields(Clipping):
                bounds[field.name] = getattr(optimizer, field.name, None)
        clipping = Clipping(**bounds)
    changes = clipping.is_active or process
    needs_sum = changes or norms is not None

    summed = list(gradients)
    # Keras would clip before it sums, so that 1 and 2 replicas would differ by 1e-2.
    if replicas > 1 and needs_sum:
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, summed)
    if norms is not None:
        norms.update(summed)
    if process is not None:
        summed = process(summed, variables, optimizer.iterations)
    if clipping.is_active:
        summed = clip(summed, clipping)

    # Without changes Keras gets what it would get without a report of norms, so that its sum has
    # the same bits.
    if changes:
        gradients = summed
        if replicas > 1:
            # Keras sums once more.
            share = 1.0 / replicas
            gradients = [scale_gradient(gradient, share) for gradient in summed]

    _apply_in_order(optimizer, gradients, variables)


def _apply_in_order(
    optimizer: Optimizer, gradients: Sequence[Gradient], variables: Sequence[Variable]
) -> None:
    """Lets an optimizer update variables after all of their old values have been read.

    Runs in a replica. The order is enforced on one replica only.

    Keras sums gradients over replicas by one operation that joins all of them. While TensorFlow
    optimizes the graph it drops the control edge from a read to the update of the same variable
    where that operation joins the two as well, and then removes the operation. So an update may
    come before a read that none of its own gradient depends on, such as the penalty R1 has: in some
    processes, in some steps, the weights differ in their last digits.
    """
    # Under a strategy a sum that waits for all gradients would block: collective operations hold
    # the threads that others need.
    pairs = list(zip(gradients, variables, strict=True))
    if not isinstance(optimizer, keras.Optimizer) or tf.distribute.has_strategy():
        optimizer.apply_gradients(pairs)
        return

    @tf.autograph.experimental.do_not_convert
    def apply(_: tf.distribute.Strategy) -> None:
        optimizer.apply_gradients(pairs)

    # Inside a merge_call Keras sums nothing, and joins nothing. Outside, 1 start in 30 to 200 of a
    # GAN differed in its last digits, and here none of 150.
    context = tf.distribute.get_replica_context()
    context.merge_call(apply)


def scale_gradient(gradient: Gradient, factor: FloatLike) -> Gradient:
    """Returns `gradient` times a scalar, in the gradient's dtype and form."""
    values = get_values(gradient)
    factor = tf.cast(factor, values.dtype)
    scaled = values * factor
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(scaled, gradient.indices, gradient.dense_shape)
    return scaled


def _drop_missing_gradients(pairs: Sequence[Pair]) -> list[tuple[Gradient, Variable]]:
    present: list[tuple[Gradient, Variable]] = []
    missing_paths: list[str] = []
    for gradient, variable in pairs:
        if gradient is None:
            missing_paths.append(variable_path(variable))
        else:
            present.append((gradient, variable))
    missing = ", ".join(missing_paths)

    if not present:
        raise UsageError(
            f"no variable has a gradient (of: {missing or 'none given'});"
            " compute the loss from the model's outputs inside the GradientTape,"
            " and differentiate by the model's trainable variables"
        )

    if missing:
        # Python shows a text once.
        warnings.warn(
            f"these variables have no gradient and are not trained: {missing}", stacklevel=1
        )
    return present


def _with_unique_rows(gradients: Sequence[Gradient]) -> list[Gradient]:
    """Returns gradients in which no index has two rows: rows for the same index are summed."""
    # Keras would concatenate the rows of several replicas, so these become dense tensors.
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    results: list[Gradient] = []
    for gradient in gradients:
        if isinstance(gradient, tf.IndexedSlices):
            indices, places = tf.unique(gradient.indices)
            count = tf.size(indices)
            rows = tf.math.unsorted_segment_sum(gradient.values, places, count)
            gradient = tf.IndexedSlices(rows, indices, gradient.dense_shape)
        results.append(gradient)
    return results


def get_values(gradient: Gradient) -> tf.Tensor:
    """Returns the values of a gradient. Those of a sparse one are its rows."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
