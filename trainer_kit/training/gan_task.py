"""Generative adversarial networks: the model, the losses, and the task that trains them."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.optimizers.gradients import apply_gradients, needs_gradients, scale_loss
from trainer_kit.training.task import Task, full_precision, scalar_loss, split_batch
from trainer_kit.typing import IntLike, Metric, Optimizer, Optimizers, Variable

# The losses of the discriminator and the generator, float32 scalars.
LossPair: TypeAlias = tuple[tf.Tensor, tf.Tensor]

# The names of the optimizers.
GENERATOR = "generator"
DISCRIMINATOR = "discriminator"

# The losses by name, as functions of the discriminator's logits. Sources: Goodfellow et al. 2014
# (arXiv 1406.2661), Mao et al. 2016 (1611.04076), Lim and Ye 2017 (1705.02894) and Arjovsky et al.
# 2017 (1701.07875).
_mean = tf.reduce_mean
DISCRIMINATOR_LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "non_saturating": lambda real, fake: _mean(tf.nn.softplus(-real)) + _mean(tf.nn.softplus(fake)),
    "least_squares": lambda real, fake: 0.5 * (_mean((real - 1.0) ** 2) + _mean(fake**2)),
    "hinge": lambda real, fake: _mean(tf.nn.relu(1.0 - real)) + _mean(tf.nn.relu(1.0 + fake)),
    "wasserstein": lambda real, fake: _mean(fake) - _mean(real),
}
GENERATOR_LOSSES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "non_saturating": lambda fake: _mean(tf.nn.softplus(-fake)),
    "least_squares": lambda fake: 0.5 * _mean((fake - 1.0) ** 2),
    "hinge": lambda fake: -_mean(fake),
    "wasserstein": lambda fake: -_mean(fake),
}


class Gan(keras.Model):
    """Two nets that train against each other. Called on random numbers, it generates examples.

    Args:
      generator: The net from latents, float32 [batch, latent_size], to examples, [batch, ...] of
        floating point.
      discriminator: The net from examples to logits, [batch] or [batch, 1].
      latent_size: The number of random numbers for one example.

    Attributes:
      generator, discriminator, latent_size: The arguments.
    """

    def __init__(
        self, generator: keras.Model, discriminator: keras.Model, latent_size: int
    ) -> None:
        latents = keras.Input((latent_size,), name="latents")
        examples = generator(latents)
        super().__init__(latents, examples, name="gan")
        # The call builds the discriminator.
        discriminator(examples)
        self.generator = generator
        self.discriminator = discriminator
        self.latent_size = latent_size
        self._seeds = keras.random.SeedGenerator()

    @property
    def latents_spec(self) -> tf.TensorSpec:
        """The spec of a batch of latents."""
        return tf.TensorSpec([None, self.latent_size], tf.float32)

    @tf.autograph.experimental.do_not_convert
    def latents(self, count: IntLike) -> tf.Tensor:
        """Returns new random numbers, float32 [count, latent_size], different ones on each replica.

        Runs eagerly or in graph.

        Args:
          count: The number of examples to generate from them.
        """
        next_seed = self._seeds.next()
        seed = tf.cast(next_seed, tf.int64)
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
            seed = tf.random.experimental.stateless_fold_in(seed, replica)

        shape = [count, self.latent_size]
        # Naming an algorithm takes 13 operations more.
        return tf.random.stateless_normal(shape, seed)


class GanTask(Task):
    """A task with two nets that train against each other.

    Define build_generator, build_discriminator and build_inputs. The config is a GanConfig.
    `trainer.optimizers` has to configure the optimizers `generator` and `discriminator`. The period
    of each optimizer says in which steps its net is updated.

    A batch is the real examples, or (real examples, labels), whose labels are not used. The step
    reports discriminator_loss, generator_loss and their sum, of the forward pass before the step's
    updates. It also reports the metrics of build_metrics: `process_metrics` gets the real examples
    as labels and generated ones as outputs.
    """

    @abc.abstractmethod
    def build_generator(self) -> keras.Model:
        """Returns the Keras 3 model from latents, float32 [batch, latent_size], to examples.

        Called in strategy scope.
        """

    @abc.abstractmethod
    def build_discriminator(self) -> keras.Model:
        """Returns the Keras 3 model from examples to logits, [batch] or [batch, 1].

        Called in strategy scope.
        """

    def build_model(self) -> Gan:
        """Returns both nets as one model. Called on latents, it generates examples."""
        generator = self.build_generator()
        discriminator = self.build_discriminator()
        return Gan(generator, discriminator, self.task_config.latent_size)

    def optimizer_variables(self, model: Gan) -> Mapping[str, Sequence[Variable]]:
        """Returns the trainable variables of the two nets."""
        return {
            GENERATOR: model.generator.trainable_variables,
            DISCRIMINATOR: model.discriminator.trainable_variables,
        }

    @tf.autograph.experimental.do_not_convert
    def discriminator_loss(self, real_logits: tf.Tensor, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the discriminator, a float32 scalar.

        By default it is the loss that `task.loss` names. Runs in graph, on a replica.

        Args:
          real_logits: The logits of the real examples.
          fake_logits: The logits of the generated examples.
        """
        compute_loss = DISCRIMINATOR_LOSSES[self.task_config.loss]
        return compute_loss(real_logits, fake_logits)

    @tf.autograph.experimental.do_not_convert
    def generator_loss(self, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the generator, a float32 scalar.

        By default it is the loss that `task.loss` names. Runs in graph, on a replica.

        Args:
          fake_logits: The logits of the generated examples.
        """
        compute_loss = GENERATOR_LOSSES[self.task_config.loss]
        return compute_loss(fake_logits)

    @tf.autograph.experimental.do_not_convert
    def discriminator_penalty(
        self, discriminator: keras.Model, real: tf.Tensor, fake: tf.Tensor
    ) -> tf.Tensor | float:
        """Returns the penalty that training adds to the discriminator's loss.

        By default it is R1, times `task.r1_penalty` / 2. Runs in graph, on a replica.

        Args:
          discriminator: The net.
          real: The real examples of the replica's batch.
          fake: As many generated examples.
        """
        del fake
        weight = self.task_config.r1_penalty
        # The second gradient is computed only if it counts.
        if not weight:
            return 0.0
        return 0.5 * weight * squared_gradient(discriminator, real)

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self,
        inputs: Any,
        model: Gan,
        optimizer: Optimizers,
        metrics: Sequence[Metric] | None = None,
    ) -> dict[str, Any]:
        """Updates the discriminator and the generator. Runs in graph, on a replica.

        Args:
          inputs: Real examples, or (real examples, labels).
          model: The Gan.
          optimizer: The optimizers `generator` and `discriminator`.
          metrics: The metrics of build_metrics.

        Returns:
          Logs: the loss, which is the sum of both losses, and each of them.

        Raises:
          UsageError: when the config has no optimizers of these names.
        """
        optimizers = optimizer if isinstance(optimizer, Mapping) else {"one optimizer": optimizer}
        required_names = {GENERATOR, DISCRIMINATOR}
        if not required_names <= {*optimizers}:
            raise UsageError(
                f"{type(self).__name__} needs the optimizers generator and discriminator, "
                f"and it has {', '.join(optimizers)}; configure both in trainer.optimizers"
            )

        real, _ = split_batch(inputs)
        step = self._step_in_turns
        if self.task_config.updates == "joint":
            step = self._joint_step
        generator = optimizers[GENERATOR]
        discriminator = optimizers[DISCRIMINATOR]
        losses, fake = step(real, model, generator, discriminator)
        if metrics:
            process_metrics = apply_autograph(self.process_metrics)
            process_metrics(metrics, real, fake)
        return self._logs(*losses)

    @tf.autograph.experimental.do_not_convert
    def validation_step(
        self, inputs: Any, model: Gan, metrics: Sequence[Metric] | None = None
    ) -> dict[str, Any]:
        """Generates as many examples as the batch has, and updates the metrics with both.

        Runs in graph, on a replica. Examples in float16 or bfloat16 are cast to float32 for the
        metrics.
        """
        real, _ = split_batch(inputs)
        example_count = tf.shape(real)[0]
        latents = model.latents(example_count)
        inference_step = apply_autograph(self.inference_step)
        fake = inference_step(latents, model)
        fake = full_precision(fake)

        losses = self._losses(model.discriminator, real, fake, training=False)
        if metrics:
            process_metrics = apply_autograph(self.process_metrics)
            process_metrics(metrics, real, fake)
        return self._logs(*losses)

    def serving_examples(self) -> tf.Tensor:
        """Returns latents, so that exports contain the generator. Called eagerly, on the host."""
        return tf.random.stateless_normal([64, self.task_config.latent_size], seed=[0, 0])

    @tf.autograph.experimental.do_not_convert
    def _step_in_turns(
        self, real: tf.Tensor, model: Gan, generator: Optimizer, discriminator: Optimizer
    ) -> tuple[LossPair, tf.Tensor]:
        """Updates the discriminator, then the generator with new examples.

        Returns:
          Both losses, and the examples that the discriminator was updated with.
        """
        # One draw for both nets: each reads and writes the state of the random generator.
        example_count = tf.shape(real)[0]
        all_latents = model.latents(2 * example_count)
        latents, new_latents = tf.split(all_latents, 2)
        generator_net = apply_autograph(model.generator)
        with preserve_moving_averages(model.generator):
            fake = generator_net(latents, training=True)

        def compute_discriminator_losses() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            losses = self._losses(model.discriminator, real, fake, training=True)
            discriminator_loss, generator_loss = losses
            added_loss = self._compute_added_discriminator_loss(model, real, fake)
            total = discriminator_loss + added_loss
            return discriminator_loss, generator_loss, total

        def compute_generator_loss() -> tuple[tf.Tensor]:
            new_fake = apply_autograph(model.generator)(new_latents, training=True)
            # The update of one net leaves the averages of the other as they are.
            with preserve_moving_averages(model.discriminator):
                logits = _logits(model.discriminator, new_fake, training=True)
            loss = self._loss_of_generator(logits)
            total = loss + _layer_losses(model.generator)
            return (total,)

        # The reported losses are those before both updates.
        discriminator_loss, generator_loss, _ = _minimize(
            compute_discriminator_losses, discriminator, model.discriminator
        )
        _minimize(compute_generator_loss, generator, model.generator)
        examples = full_precision(fake)
        return (discriminator_loss, generator_loss), examples

    @tf.autograph.experimental.do_not_convert
    def _joint_step(
        self, real: tf.Tensor, model: Gan, generator: Optimizer, discriminator: Optimizer
    ) -> tuple[LossPair, tf.Tensor]:
        """Updates both nets by the gradients at the same weights.

        Returns:
          Both losses, and the generated examples.
        """
        # The tape computes a gradient for each of the nets.
        with tf.GradientTape(persistent=True) as tape:
            example_count = tf.shape(real)[0]
            latents = model.latents(example_count)
            generator_net = apply_autograph(model.generator)
            fake = generator_net(latents, training=True)
            discriminator_loss, generator_loss = self._losses(
                model.discriminator, real, fake, training=True
            )

            generator_total = generator_loss + _layer_losses(model.generator)
            generator_share = _loss_share(generator, generator_total)
            added_loss = self._compute_added_discriminator_loss(model, real, fake)
            discriminator_total = discriminator_loss + added_loss
            discriminator_share = _loss_share(discriminator, discriminator_total)

        # All gradients come before the first update.
        generator_variables = model.generator.trainable_variables
        discriminator_variables = model.discriminator.trainable_variables
        generator_gradients = tape.gradient(generator_share, generator_variables)
        discriminator_gradients = tape.gradient(discriminator_share, discriminator_variables)

        generator_pairs = zip(generator_gradients, generator_variables, strict=True)
        discriminator_pairs = zip(discriminator_gradients, discriminator_variables, strict=True)
        apply_gradients(generator, generator_pairs)
        apply_gradients(discriminator, discriminator_pairs)
        examples = full_precision(fake)
        return (discriminator_loss, generator_loss), examples

    @tf.autograph.experimental.do_not_convert
    def _losses(
        self, discriminator: keras.Model, real: tf.Tensor, fake: tf.Tensor, training: bool
    ) -> LossPair:
        """Returns the losses of discriminator and generator, float32 scalars."""
        real_logits = _logits(discriminator, real, training)
        fake_logits = _logits(discriminator, fake, training)
        compute_loss = apply_autograph(self.discriminator_loss)
        loss = compute_loss(real_logits, fake_logits)
        class_name = type(self).__name__
        loss = scalar_loss(loss, f"{class_name}.discriminator_loss")
        discriminator_loss = tf.cast(loss, tf.float32)
        generator_loss = self._loss_of_generator(fake_logits)
        return discriminator_loss, generator_loss

    @tf.autograph.experimental.do_not_convert
    def _loss_of_generator(self, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the generator, a float32 scalar."""
        compute_loss = apply_autograph(self.generator_loss)
        loss = compute_loss(fake_logits)
        class_name = type(self).__name__
        loss = scalar_loss(loss, f"{class_name}.generator_loss")
        return tf.cast(loss, tf.float32)

    @tf.autograph.experimental.do_not_convert
    def _compute_added_discriminator_loss(
        self, model: Gan, real: tf.Tensor, fake: tf.Tensor
    ) -> tf.Tensor:
        """Returns the penalty and the losses of layers, which only training adds."""
        compute_penalty = apply_autograph(self.discriminator_penalty)
        penalty = compute_penalty(model.discriminator, real, fake)
        penalty = tf.cast(penalty, tf.float32)
        return penalty + _layer_losses(model.discriminator)

    def _logs(self, discriminator: tf.Tensor, generator: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            self.loss: discriminator + generator,
            "discriminator_loss": discriminator,
            "generator_loss": generator,
        }


def squared_gradient(discriminator: keras.Model, examples: tf.Tensor) -> tf.Tensor:
    """Returns the mean of the discriminator's squared gradient norm at `examples`.

    It is R1 (arXiv 1801.04406) without the factor 1/2. Runs in graph, on a replica. Averages of
    batch normalization keep their values.

    Args:
      discriminator: The net, which returns a logit for each example.
      examples: Float examples, [batch, ...].
    """
    with tf.GradientTape() as tape, preserve_moving_averages(discriminator):
        tape.watch(examples)
        logits = discriminator(examples, training=True)
        # An example changes only its own logit, so the gradient of the sum has one row for each.
        total = tf.reduce_sum(logits)

    gradient = tape.gradient(total, examples)
    example_count = tf.shape(gradient)[0]
    flat_gradient = tf.reshape(gradient, [example_count, -1])
    squared_norms = tf.reduce_sum(flat_gradient**2, axis=1)
    return tf.reduce_mean(squared_norms)


@contextlib.contextmanager
def preserve_moving_averages(net: keras.Model) -> Iterator[None]:
    """Preserves the averages of a net's batch normalization inside this context.

    They have their earlier values at its end, whatever is computed inside. Runs in graph.

    Args:
      net: A Keras model. Its variables that are not trained and are of floating point keep their
        values.
    """
    variables = []
    for variable in net.non_trainable_variables:
        dtype = tf.as_dtype(variable.dtype)
        if dtype.is_floating:
            variables.append(variable)
    values = [tf.identity(variable) for variable in variables]
    yield
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@tf.autograph.experimental.do_not_convert
def _minimize(
    losses: Callable[[], tuple[tf.Tensor, ...]], optimizer: Optimizer, net: keras.Model
) -> tuple[tf.Tensor, ...]:
    """Calls `losses`, and updates a net by the gradient of the last one.

    In a step whose gradients the optimizer leaves out, only the forward pass runs, and nothing of
    the net changes.

    Returns:
      All losses.
    """
    variables = net.trainable_variables

    def with_gradients(
        unconnected: tf.UnconnectedGradients,
    ) -> tuple[tuple[tf.Tensor, ...], Sequence[tf.Tensor | None]]:
        with tf.GradientTape() as tape:
            values = losses()
            minimized_loss = values[-1]
            share = _loss_share(optimizer, minimized_loss)
        gradients = tape.gradient(share, variables, unconnected_gradients=unconnected)
        return values, gradients

    def with_dense_gradients() -> Any:
        # Both branches of a condition return tensors.
        outputs = with_gradients(tf.UnconnectedGradients.ZERO)
        return tf.nest.map_structure(tf.convert_to_tensor, outputs)

    def without_gradients() -> Any:
        zeros = [tf.zeros_like(variable) for variable in variables]
        with preserve_moving_averages(net):
            values = losses()
        return values, zeros

    if getattr(optimizer, "uses_every_gradient", True):
        values, gradients = with_gradients(tf.UnconnectedGradients.NONE)
    else:
        is_needed = needs_gradients(optimizer)
        values, gradients = tf.cond(is_needed, with_dense_gradients, without_gradients)
    pairs = zip(gradients, variables, strict=True)
    apply_gradients(optimizer, pairs)
    return values


@tf.autograph.experimental.do_not_convert
def _loss_share(optimizer: Optimizer, loss: tf.Tensor) -> tf.Tensor:
    """Returns what a replica differentiates.

    It is the loss divided by the number of replicas, times the loss scale.
    """
    strategy = tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync
    share = loss / replicas if replicas > 1 else loss
    return scale_loss(optimizer, share)


@tf.autograph.experimental.do_not_convert
def _logits(discriminator: keras.Model, examples: tf.Tensor, training: bool) -> tf.Tensor:
    converted_net = apply_autograph(discriminator)
    logits = converted_net(examples, training=training)
    return full_precision(logits)


@tf.autograph.experimental.do_not_convert
def _layer_losses(net: keras.Model) -> tf.Tensor:
    """Returns the sum of the losses that the layers of a net have added."""
    losses = [tf.cast(loss, tf.float32) for loss in net.losses]
    if not losses:
        return tf.constant(0.0)
    return tf.add_n(losses)
