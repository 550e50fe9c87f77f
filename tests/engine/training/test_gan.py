"""GanTask: two nets with an optimizer each, in turns or together, that do not affect each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import assert_all_close, on_each_replica, replicas, seeded_trainer
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.testing import tiny_experiment
from trainer_kit.training.trainer import Trainer

SGD = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
}


class Points(tk.GanTask):
    """Points in the plane, and nets of few operations with batch normalization."""

    def build_generator(self) -> keras.Model:
        return self._net("generator", self.task_config.latent_size, 2)

    def build_discriminator(self) -> keras.Model:
        return self._net("discriminator", 2, 1)

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        points = np.random.default_rng(1).normal(3, 0.5, (64, 2)).astype(np.float32)
        return tk.ArraySource(points, params)

    def _net(self, name: str, inputs: int, outputs: int) -> keras.Model:
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(outputs)]
        return keras.Sequential([keras.Input((inputs,)), *layers], name=name)


def _create_trainer(
    task: Mapping[str, Any] | None = None,
    generator: Mapping[str, Any] | None = None,
    discriminator: Mapping[str, Any] | None = None,
    task_type: type[tk.GanTask] = Points,
    count: int = 1,
    runtime: Mapping[str, Any] | None = None,
    **trainer: Any,
) -> Trainer:
    data = tk.DataConfig(global_batch_size=16, is_training=True, seed=1)
    section = tk.GanConfig(
        latent_size=4, train_data=data, validation_data=data.replace(is_training=False)
    )
    optimizers = {
        "generator": {**SGD, **(generator or {})},
        "discriminator": {**SGD, **(discriminator or {})},
    }
    base = tiny_experiment(**{"optimizer_config": {}, "optimizers": optimizers, **trainer})
    config = tk.ExperimentConfig(
        task=section.replace(**(task or {})), trainer=base.trainer
    ).replace(runtime=dict(runtime or {}))
    return seeded_trainer(config, task_type, count)


def _read_values(net: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in net.variables if "seed" not in variable.path]


def _have_changed(before: list[np.ndarray], now: list[np.ndarray]) -> bool:
    return any((value != other).any() for value, other in zip(before, now, strict=True))


@pytest.mark.parametrize(("updates", "count"), [("in_turns", 2), ("joint", 1)])
def test_each_net_is_updated_in_its_own_period(updates: str, count: int) -> None:
    trainer = _create_trainer(
        {"updates": updates},
        generator={"period": 5},
        discriminator={"period": 2},
        count=count,
    )
    generator, discriminator = trainer.model.generator, trainer.model.discriminator

    def read_values(net: keras.Model) -> list[np.ndarray]:
        if updates == "in_turns":
            return _read_values(net)
        # Together, both nets see the batches, which their averages count.
        return [variable.numpy() for variable in net.trainable_variables]

    changes = []
    for steps in (1, 1, 2, 1):
        before = [read_values(net) for net in (generator, discriminator)]
        logs = trainer.train(tf.constant(steps))
        after = [read_values(net) for net in (generator, discriminator)]
        changes.append([_have_changed(*values) for values in zip(before, after, strict=True)])

    assert changes == [[False, False], [False, True], [False, True], [True, False]]
    assert trainer.global_step.numpy() == 5

    counts = {
        name: int(optimizer.iterations.numpy()) for name, optimizer in trainer.optimizer.items()
    }
    assert counts == {"generator": 1, "discriminator": 2}

    losses = [
        float(logs[name]) for name in ("discriminator_loss", "generator_loss", "training_loss")
    ]
    assert losses[0] > 0
    assert losses[1] > 0
    assert losses[2] == pytest.approx(losses[0] + losses[1], rel=1e-5)


@pytest.fixture(scope="module")
def one_step() -> Trainer:
    """A trainer after a step in turns."""
    trainer = _create_trainer()
    trainer.train(tf.constant(1))
    return trainer


def test_a_step_in_turns_is_two_steps_by_hand(one_step: Trainer) -> None:
    hand = _create_trainer()
    real = next(iter(hand.data.iterator()))
    model = hand.model
    optimizers = {name: keras.optimizers.SGD(0.1) for name in ("generator", "discriminator")}
    latents, new_latents = tf.split(model.latents(32), 2)
    fake = model.generator(latents, training=True)
    averages = model.generator.layers[0].moving_mean
    averages.assign(tf.zeros_like(averages))
    model.generator.layers[0].moving_variance.assign(tf.ones_like(averages))
    with tf.GradientTape() as tape:
        scores = model.discriminator(real, training=True), model.discriminator(fake, training=True)
        loss = tf.reduce_mean(tf.nn.softplus(-scores[0])) + tf.reduce_mean(
            tf.nn.softplus(scores[1])
        )

    weights = model.discriminator.trainable_variables
    optimizers["discriminator"].apply(tape.gradient(loss, weights), weights)
    kept = [variable.numpy() for variable in model.discriminator.non_trainable_variables]
    with tf.GradientTape() as tape:
        score = model.discriminator(model.generator(new_latents, training=True), training=True)
        loss = tf.reduce_mean(tf.nn.softplus(-score))

    weights = model.generator.trainable_variables
    optimizers["generator"].apply(tape.gradient(loss, weights), weights)

    for variable, value in zip(model.discriminator.non_trainable_variables, kept, strict=True):
        variable.assign(value)

    for net in ("generator", "discriminator"):
        assert_all_close(
            _read_values(getattr(one_step.model, net)), _read_values(getattr(model, net)), atol=1e-6
        )


def test_replicas_generate_from_different_latents() -> None:
    trainer = _create_trainer(count=2)
    strategy = replicas(2)
    draw = tf.function(lambda: strategy.run(lambda: trainer.model.latents(8)))

    first, second = on_each_replica(strategy, draw())

    assert abs(float(np.mean(first * second))) < 0.5
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, on_each_replica(strategy, draw())[0])


@pytest.mark.parametrize("runtime", [{"mixed_precision_dtype": "float16"}, {"enable_xla": True}])
def test_both_nets_train_in_float16_and_compiled_by_xla(runtime: dict[str, Any]) -> None:
    with precision_scope(RuntimeConfig(**runtime)):
        trainer = _create_trainer(runtime=runtime)

    nets = (trainer.model.generator, trainer.model.discriminator)
    before = [_read_values(net) for net in nets]

    logs = trainer.train(tf.constant(4))

    assert all(
        _have_changed(values, _read_values(net)) for values, net in zip(before, nets, strict=True)
    )
    assert np.isfinite(float(logs["training_loss"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizers": {}, "optimizer_config": SGD}, "configure each of them in trainer"),
        (
            {"optimizers": {"generator": SGD}},
            r"names discriminator, which trainer\.optimizers lacks",
        ),
        ({"optimizers": {"generater": SGD, "discriminator": SGD}}, "rename generater to generator"),
    ],
)
def test_both_optimizers_are_needed_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _create_trainer(**options)


@pytest.mark.parametrize(
    ("loss", "of_discriminator", "of_generator"),
    [
        ("non_saturating", 1.231427, 1.761332),
        ("least_squares", 3.5625, 4.0625),
        ("hinge", 1.75, 1.25),
        ("wasserstein", -1.75, 1.25),
    ],
)
def test_losses_are_those_of_the_papers(
    loss: str, of_discriminator: float, of_generator: float
) -> None:
    task = Points(tk.GanConfig(loss=loss))
    real = tf.constant([2.0, -1.0])
    fake = tf.constant([0.5, -3.0])

    assert float(task.discriminator_loss(real, fake)) == pytest.approx(of_discriminator, abs=1e-5)
    assert float(task.generator_loss(fake)) == pytest.approx(of_generator, abs=1e-5)


def test_the_penalty_is_half_its_weight_times_the_square() -> None:
    class Linear(Points):
        def build_discriminator(self) -> keras.Model:
            return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])

    trainer = _create_trainer({"r1_penalty": 4.0}, task_type=Linear)
    kernel = trainer.model.discriminator.layers[0].kernel

    kernel.assign([[3.0], [4.0]])
    penalty = trainer.task.discriminator_penalty(
        trainer.model.discriminator, tf.ones([5, 2]), tf.ones([5, 2])
    )

    assert float(penalty) == pytest.approx(0.5 * 4.0 * 25.0)


def test_evaluations_report_losses_and_metrics_of_samples() -> None:
    class Measured(Points):
        def build_metrics(self, training: bool = True) -> list[Any]:
            return [keras.metrics.MeanAbsoluteError("apart")]

    trainer = _create_trainer(task_type=Measured)

    logs = trainer.evaluate(tf.constant(-1))

    assert {"validation_loss", "discriminator_loss", "generator_loss", "apart"} <= {*logs}
    # The real points are around 3, those of a new generator around 0.
    assert 2 < float(logs["apart"]) < 4


def test_micro_batches_need_joint_updates() -> None:
    joint = _create_trainer({"updates": "joint"}, accumulate_steps=2)

    joint.train(tf.constant(1))

    assert [int(optimizer.iterations.numpy()) for optimizer in joint.optimizer.values()] == [1, 1]

    with pytest.raises(ConfigError, match=r"trainer\.accumulate_steps.*set task\.updates=joint"):
        _create_trainer(accumulate_steps=2)


def test_a_penalty_leaves_the_averages_as_they_are(one_step: Trainer) -> None:
    penalised = _create_trainer({"r1_penalty": 1e-9})

    penalised.train(tf.constant(1))
    means = [
        trainer.model.discriminator.layers[0].moving_mean.numpy()
        for trainer in (one_step, penalised)
    ]

    np.testing.assert_allclose(*means, rtol=1e-5)
