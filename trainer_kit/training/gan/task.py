"""GanTask: trains a generator against a discriminator, each with an optimizer of its own."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.optimizers.gradients import apply_gradients, needs_gradients, scale_loss
from trainer_kit.training.gan.losses import DISCRIMINATOR_LOSSES, GENERATOR_LOSSES, squared_gradient
from trainer_kit.training.gan.model import Gan, unchanged_averages
from trainer_kit.training.gan.pictures import image_grid
from trainer_kit.training.task import Task, full_precision, scalar_loss, split_batch

GENERATOR, DISCRIMINATOR = "generator", "discriminator"  # the names of the optimizers


class GanTask(Task):
    """A task with two nets. Define build_generator, build_discriminator and build_inputs; its config is a GanConfig.

    `trainer.optimizers` has to configure the optimizers `generator` and `discriminator`; the period of each says in
    which steps its net is updated. A batch is the real examples, or (real examples, labels), whose labels are not used.
    Reported are discriminator_loss, generator_loss and their sum, of the forward pass before the step's updates, and
    the metrics of build_metrics: `process_metrics` gets the real examples as labels and generated ones as outputs.
    """

    @abc.abstractmethod
    def build_generator(self) -> Any:
        """Returns the Keras 3 model from latents, float32 [batch, latent_size], to examples.

        Called in strategy scope.
        """

    @abc.abstractmethod
    def build_discriminator(self) -> Any:
        """Returns the Keras 3 model from examples to logits, [batch] or [batch, 1]. Called in strategy scope."""

    def build_model(self) -> Gan:
        """Returns both nets as one model; called on latents, it generates examples."""
        return Gan(self.build_generator(), self.build_discriminator(), self.task_config.latent_size)

    def optimizer_variables(self, model: Any) -> Mapping[str, Sequence[Any]]:
        """Returns the trainable variables of the two nets."""
        return {
            GENERATOR: model.generator.trainable_variables,
            DISCRIMINATOR: model.discriminator.trainable_variables,
        }

    @tf.autograph.experimental.do_not_convert
    def discriminator_loss(self, real_logits: tf.Tensor, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the discriminator, a float32 scalar, by default the one that `task.loss` names."""
        return DISCRIMINATOR_LOSSES[self.task_config.loss](real_logits, fake_logits)

    @tf.autograph.experimental.do_not_convert
    def generator_loss(self, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the generator, a float32 scalar, by default the one that `task.loss` names."""
        return GENERATOR_LOSSES[self.task_config.loss](fake_logits)

    @tf.autograph.experimental.do_not_convert
    def discriminator_penalty(self, discriminator: Any, real: tf.Tensor, fake: tf.Tensor) -> tf.Tensor | float:
        """Returns what is added to the discriminator's loss in training; by default R1, times `task.r1_penalty` / 2.

        Args:
          discriminator: The net.
          real: The real examples of the replica's batch.
          fake: As many generated examples.
        """
        del fake
        weight = self.task_config.r1_penalty
        return 0.5 * weight * squared_gradient(discriminator, real) if weight else 0.0

    @tf.autograph.experimental.do_not_convert
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Updates the discriminator and the generator; runs in graph, on a replica.

        Args:
          inputs: Real examples, or (real examples, labels).
          model: The Gan.
          optimizer: The optimizers `generator` and `discriminator`.
          metrics: The metrics of build_metrics.

        Returns:
          Logs: the loss, which is the sum of both losses, and each of them.
        """
        real, _ = split_batch(inputs)
        optimizers = self._both(optimizer)
        joint = self.task_config.updates == "joint"
        step = self._joint_step if joint else self._step_in_turns
        losses, fake = step(real, model, *optimizers)
        if metrics:
            converted(self.process_metrics)(metrics, real, fake)
        return self._logs(*losses)

    @tf.autograph.experimental.do_not_convert
    def validation_step(self, inputs: Any, model: Any, metrics: Sequence[Any] | None = None) -> dict[str, Any]:
        """Generates as many examples as the batch has, and updates the metrics with both; runs in graph, on a replica.

        Examples in float16 or bfloat16 are cast to float32 for the metrics.
        """
        real, _ = split_batch(inputs)
        fake = full_precision(converted(self.inference_step)(model.latents(tf.shape(real)[0]), model))
        logits = [_logits(model.discriminator, examples, training=False) for examples in (real, fake)]
        if metrics:
            converted(self.process_metrics)(metrics, real, fake)
        return self._logs(*self._losses(*logits))

    def picture(self, samples: np.ndarray) -> np.ndarray | None:
        """Returns a picture of generated examples, uint8 [height, width, 1 or 3], for the callback sample_pictures.

        The default puts images, float [n, height, width, 1 or 3] in -1..1, into a grid, and returns None for others.

        Args:
          samples: Generated examples, [n, ...].
        """
        return image_grid(samples) if samples.ndim == 4 and samples.shape[-1] in (1, 3) else None

    @tf.autograph.experimental.do_not_convert
    def _step_in_turns(self, real: Any, model: Gan, generator: Any, discriminator: Any) -> tuple[Any, Any]:
        """Updates the discriminator, then the generator with new examples; returns both losses, and the first ones."""
        # One draw for both nets: each reads and writes the state of the random generator.
        latents, new_latents = tf.split(model.latents(2 * tf.shape(real)[0]), 2)
        with unchanged_averages(model.generator):
            fake = converted(model.generator)(latents, training=True)

        def losses() -> tuple[Any, Any, Any]:
            logits = [_logits(model.discriminator, examples, training=True) for examples in (real, fake)]
            reported = self._losses(*logits)
            return *reported, reported[0] + self._added_to_discriminator(model, real, fake)

        def loss_of_generator() -> tuple[Any]:
            made = converted(model.generator)(new_latents, training=True)
            with unchanged_averages(model.discriminator):
                logits = _logits(model.discriminator, made, training=True)
            return (self._loss_of_generator(logits) + _added(model.generator),)

        reported = _minimize(losses, discriminator, model.discriminator)
        _minimize(loss_of_generator, generator, model.generator)
        return reported[:2], full_precision(fake)

    @tf.autograph.experimental.do_not_convert
    def _joint_step(self, real: Any, model: Gan, generator: Any, discriminator: Any) -> tuple[Any, Any]:
        """Updates both nets by the gradients at the same weights; returns both losses and the generated examples."""
        nets = (model.generator, generator), (model.discriminator, discriminator)
        with tf.GradientTape(persistent=True) as tape:
            fake = converted(model.generator)(model.latents(tf.shape(real)[0]), training=True)
            logits = [_logits(model.discriminator, examples, training=True) for examples in (real, fake)]
            of_discriminator, of_generator = self._losses(*logits)
            totals = (
                of_generator + _added(model.generator),
                of_discriminator + self._added_to_discriminator(model, real, fake),
            )
            shares = [_scaled_share(optimizer, total) for (_, optimizer), total in zip(nets, totals, strict=True)]
        gradients = [
            tape.gradient(share, net.trainable_variables) for (net, _), share in zip(nets, shares, strict=True)
        ]
        for (net, optimizer), one in zip(nets, gradients, strict=True):
            apply_gradients(optimizer, list(zip(one, net.trainable_variables, strict=True)))
        return (of_discriminator, of_generator), full_precision(fake)

    @tf.autograph.experimental.do_not_convert
    def _losses(self, real_logits: tf.Tensor, fake_logits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the losses of discriminator and generator, float32 scalars."""
        loss = converted(self.discriminator_loss)(real_logits, fake_logits)
        name = f"{type(self).__name__}.discriminator_loss"
        return tf.cast(scalar_loss(loss, name), tf.float32), self._loss_of_generator(fake_logits)

    @tf.autograph.experimental.do_not_convert
    def _loss_of_generator(self, fake_logits: tf.Tensor) -> tf.Tensor:
        """Returns the loss of the generator, a float32 scalar."""
        loss = converted(self.generator_loss)(fake_logits)
        return tf.cast(scalar_loss(loss, f"{type(self).__name__}.generator_loss"), tf.float32)

    @tf.autograph.experimental.do_not_convert
    def _added_to_discriminator(self, model: Gan, real: Any, fake: Any) -> Any:
        penalty = converted(self.discriminator_penalty)(model.discriminator, real, fake)
        return tf.cast(penalty, tf.float32) + _added(model.discriminator)

    def _logs(self, discriminator: tf.Tensor, generator: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            self.loss: discriminator + generator,
            "discriminator_loss": discriminator,
            "generator_loss": generator,
        }

    def _both(self, optimizer: Any) -> tuple[Any, Any]:
        """Returns the optimizers of the generator and the discriminator."""
        names = (GENERATOR, DISCRIMINATOR)
        if not isinstance(optimizer, Mapping) or {*names} - {*optimizer}:
            given = f"it has {', '.join(optimizer)}" if isinstance(optimizer, Mapping) else "it has one optimizer"
            raise UsageError(
                f"{type(self).__name__} needs the optimizers generator and discriminator, and {given}; configure both "
                "in trainer.optimizers"
            )
        return optimizer[GENERATOR], optimizer[DISCRIMINATOR]


@tf.autograph.experimental.do_not_convert
def _minimize(losses: Callable[[], tuple[Any, ...]], optimizer: Any, net: Any) -> tuple[Any, ...]:
    """Calls `losses`, and updates a net by the gradient of the last one; returns all of them.

    In a step whose gradients the optimizer leaves out there is only the forward pass, and nothing of the net changes.
    """
    every_step, variables = getattr(optimizer, "uses_every_gradient", True), net.trainable_variables

    def with_gradients() -> tuple[tuple[Any, ...], Sequence[Any]]:
        with tf.GradientTape() as tape:
            found = losses()
            share = _scaled_share(optimizer, found[-1])
        unused = tf.UnconnectedGradients.NONE if every_step else tf.UnconnectedGradients.ZERO
        return found, tape.gradient(share, variables, unconnected_gradients=unused)

    def without() -> tuple[tuple[Any, ...], Sequence[Any]]:
        with unchanged_averages(net):
            return losses(), [tf.zeros_like(one) for one in variables]

    if every_step:
        found, gradients = with_gradients()
    else:
        dense = lambda: tf.nest.map_structure(tf.convert_to_tensor, with_gradients())  # noqa: E731
        found, gradients = tf.cond(needs_gradients(optimizer), dense, without)
    apply_gradients(optimizer, list(zip(gradients, variables, strict=True)))
    return found


@tf.autograph.experimental.do_not_convert
def _scaled_share(optimizer: Any, loss: tf.Tensor) -> tf.Tensor:
    """Returns what a replica differentiates: the loss divided by the number of replicas, times the loss scale."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return scale_loss(optimizer, loss / replicas if replicas > 1 else loss)


@tf.autograph.experimental.do_not_convert
def _logits(discriminator: Any, examples: Any, training: bool) -> tf.Tensor:
    return full_precision(converted(discriminator)(examples, training=training))


@tf.autograph.experimental.do_not_convert
def _added(net: Any) -> tf.Tensor:
    """Returns the sum of the losses that the layers of a net have added."""
    added = [tf.cast(one, tf.float32) for one in net.losses]
    return tf.add_n(added) if added else tf.constant(0.0)
