"""Gradient processors and norms in training: on replicas, micro-batches, float16, resumes."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.optimizers.gradients import apply_gradients
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import CLASSES, tiny_arrays
from trainer_kit.training.trainer import Trainer

RATE = {"type": "constant", "constant": {"learning_rate": 0.05}}
NOISE = {"type": "noise", "noise": {"stddev": 0.01}}
PROCESSORS = (
    {"type": "scale", "scale": {"factor": 3.0}, "variables": ("bias",)},
    {"type": "clip_global_norm", "clip_global_norm": {"bound": 0.1}},
    NOISE,
    {"type": "centralize"},
    {"type": "check"},
)


class SpikingTask(LinearTask):
    """The batch of step 6 is not finite."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        features, labels = inputs
        spikes = tf.equal(tf.cast(tf.convert_to_tensor(optimizer.iterations), tf.int64), 5)
        features = tf.cast(features, tf.float32) * tf.where(spikes, float("inf"), 1.0)
        return super().train_step((features, labels), model, optimizer, metrics)


def _build_config(
    processors: Any = (), fields: Mapping[str, Any] | None = None, **trainer: Any
) -> Any:
    sgd = {"optimizer": {"type": "sgd", "sgd": dict(fields or {})}, "learning_rate": RATE}
    config = linear_experiment(
        optimizer_config={**sgd, "gradient_processors": processors}, **trainer
    )
    return config.replace(task={"train_data": {"global_batch_size": 16}})


def _create_trainer(config: Any, task_type: type[TinyTask] = LinearTask, count: int = 1) -> Trainer:
    return seeded_trainer(config, task_type, count, evaluate=False)


def test_processors_train_alike_on_replicas_and_micro_batches() -> None:
    on_one_replica = _create_trainer(_build_config(PROCESSORS))
    logs = on_one_replica.train(tf.constant(6))
    for count, parts in ((2, 1), (1, 2)):
        other = _create_trainer(
            _build_config(PROCESSORS, accumulate_steps=parts, report_gradient_norm=True),
            count=count,
        )
        assert other.train(tf.constant(6))["training_loss"] == pytest.approx(
            logs["training_loss"], rel=1e-5
        )
        assert_all_close(trained_weights(other), trained_weights(on_one_replica), atol=2e-6)

    plain = _create_trainer(_build_config())

    plain.train(tf.constant(6))

    assert not np.allclose(trained_weights(plain)[0], trained_weights(on_one_replica)[0], atol=1e-3)


def test_processors_come_before_the_bounds_of_the_optimizer() -> None:
    """A factor of 1000 cancels out in a gradient that is clipped to a norm afterwards."""
    scale = {"type": "scale", "scale": {"factor": 1000.0}}
    scaled = _create_trainer(_build_config([scale], {"clipnorm": 1e-3}))
    plain = _create_trainer(_build_config([], {"clipnorm": 1e-3}))

    for trainer in (scaled, plain):
        trainer.train(tf.constant(3))

    assert_all_close(trained_weights(scaled), trained_weights(plain), atol=2e-6)


def test_processors_see_float16_gradients_without_the_scale() -> None:
    clip = [{"type": "clip_value", "clip_value": {"bound": 1e-3}}]
    config = _build_config(clip, report_gradient_norm=True).replace(
        runtime={"mixed_precision_dtype": "float16", "loss_scale": 1024.0}
    )
    with precision_scope(config.runtime):
        trainer = _create_trainer(config)

    before = trained_weights(trainer)

    logs = trainer.train(tf.constant(1))

    assert_all_close(before, trained_weights(trainer), atol=0.05e-3 * 1.01)
    assert 0.05 < logs["gradient_norm"] < 5.0


def test_the_reported_norm_is_the_mean_of_unclipped_ones() -> None:
    """SGD without momentum moves weights by the rate times the gradient.

    One replica reports what two do.
    """
    trainer = _create_trainer(_build_config(report_gradient_norm=True), count=2)
    norms = []

    for _ in range(4):
        before = trained_weights(trainer)
        logs = trainer.train(tf.constant(1))
        moved = np.concatenate(
            [(a - b).ravel() for a, b in zip(before, trained_weights(trainer), strict=True)]
        )
        norms.append(np.linalg.norm(moved) / 0.05)
        assert logs["gradient_norm"] == pytest.approx(norms[-1], rel=1e-4)

    again = _create_trainer(_build_config(report_gradient_norm=True))

    assert again.train(tf.constant(4))["gradient_norm"] == pytest.approx(np.mean(norms), rel=1e-4)

    clipped = _create_trainer(
        _build_config(PROCESSORS, {"clipnorm": 1e-6}, report_gradient_norm=True)
    )
    assert clipped.train(tf.constant(1))["gradient_norm"] == pytest.approx(norms[0], rel=1e-4)


def test_a_report_changes_no_bit_of_the_weights() -> None:
    """The third of a sum, three times, is another number."""
    trainers = []

    for reports in ({}, {"report_gradient_norm": True}):
        config = _build_config(**reports).replace(task={"train_data": {"global_batch_size": 15}})
        trainers.append(_create_trainer(config, count=3))
        trainers[-1].train(tf.constant(5))

    assert_all_close(*map(trained_weights, trainers))

    plain, reporting = (len(trainer.optimizer.variables) for trainer in trainers)
    assert plain == reporting  # the variables of reports are not the optimizer's


def test_each_of_several_optimizers_has_a_norm_of_its_own() -> None:
    sgd = {"optimizer": {"type": "sgd"}, "learning_rate": RATE}
    noisy = {**sgd, "variables": ("bias",), "gradient_processors": [NOISE]}
    sections = {"noisy": noisy, "rest": {**sgd, "variables": (".",)}}
    config = linear_experiment(optimizer_config={}, optimizers=sections, report_gradient_norm=True)
    logs = _create_trainer(config).train(tf.constant(4))

    whole = _create_trainer(
        linear_experiment(optimizer_config=sgd, report_gradient_norm=True)
    ).train(tf.constant(4))

    assert set(logs["gradient_norm"]) == {"noisy", "rest"}
    assert (
        0
        < logs["gradient_norm"]["noisy"]
        < logs["gradient_norm"]["rest"]
        < 2 * whole["gradient_norm"]
    )


def test_several_optimizers_draw_different_noise() -> None:
    """The two biases have the same shape and the same place in their optimizers."""
    loud = {"type": "noise", "noise": {"stddev": 1e4}}
    sgd = {"optimizer": {"type": "sgd"}, "learning_rate": RATE, "gradient_processors": [loud]}
    config = tiny_experiment(optimizer_config={}, optimizers={"first": sgd, "last": sgd}).replace(
        task={"width": CLASSES}
    )
    trainer = _create_trainer(config, OwnVariables)

    trainer.train(tf.constant(1))
    first, last = (
        variable.numpy()
        for variable in trainer.model.trainable_variables
        if variable.path.endswith("bias")
    )

    assert np.abs(first - last).max() > 1.0


class OwnVariables(TinyTask):
    """Each of two optimizers has one layer."""

    def optimizer_variables(self, model: Any) -> dict[str, list[Any]]:
        layers = [layer.trainable_variables for layer in model.layers if layer.trainable_variables]
        return dict(zip(("first", "last"), layers, strict=True))


class OwnUpdate(LinearTask):
    """Applies gradients without trainer_kit."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.build_losses(inputs[1], model(inputs[0]))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(list(zip(gradients, model.trainable_variables, strict=True)))
        return {self.loss: loss}


class OneOwnUpdate(LinearTask):
    """Applies the gradients of one of two optimizers without trainer_kit."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.build_losses(inputs[1], model(inputs[0]))
        variables = model.trainable_variables
        pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
        apply_gradients(
            optimizer["noisy"], [pair for pair in pairs if pair[1].path.endswith("bias")]
        )
        optimizer["ignoring"].apply_gradients(
            [pair for pair in pairs if not pair[1].path.endswith("bias")]
        )
        return {self.loss: loss}


class OwnOptimizer(LinearTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return keras.optimizers.SGD(0.1)


class OwnNorm(LinearTask):
    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        return {
            **super().train_step(inputs, model, optimizer, metrics),
            "gradient_norm": tf.constant(7.0),
        }


SGD = {"optimizer": {"type": "sgd"}, "learning_rate": RATE}
ONE_IGNORED = {
    "noisy": {**SGD, "gradient_processors": [NOISE], "variables": ("bias",)},
    "ignoring": {**SGD, "gradient_processors": [NOISE], "variables": (".",)},
}


@pytest.mark.parametrize(
    ("task_type", "config", "message"),
    [
        (
            OwnUpdate,
            _build_config(report_gradient_norm=True),
            r"trainer\.report_gradient_norm: the training step applies",
        ),
        (
            OwnUpdate,
            _build_config([NOISE]),
            r"trainer\.optimizer_config\.gradient_processors: the training step applies",
        ),
        (
            OwnOptimizer,
            _build_config([NOISE]),
            r"create_optimizer of OwnOptimizer .* call super\(\)\.create_optimizer",
        ),
        (
            OwnNorm,
            _build_config(report_gradient_norm=True),
            r"'gradient_norm', and trainer\.report_gradient_norm reports",
        ),
        (
            OneOwnUpdate,
            linear_experiment(optimizer_config={}, optimizers=ONE_IGNORED),
            r"trainer\.optimizers\.ignoring\.gradient_processors: the training step",
        ),
    ],
)
def test_a_step_that_a_report_or_processor_misses_is_refused(
    task_type: type[TinyTask], config: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        _create_trainer(config, task_type).train(tf.constant(1))


def test_a_scalar_may_have_the_name_of_a_report_that_is_off() -> None:
    assert _create_trainer(_build_config(), OwnNorm).train(tf.constant(1))["gradient_norm"] == 7.0


def test_a_check_names_variable_and_step_before_the_update() -> None:
    trainer = _create_trainer(_build_config([{"type": "check"}]), SpikingTask, 2)

    with pytest.raises(
        DivergedError, match=r"the gradient of \S*dense\S*/kernel is not finite at step 6"
    ):
        trainer.train(tf.constant(8))

    assert all(np.isfinite(weight).all() for weight in trained_weights(trainer))


def _run(
    folder: Path, task_type: type[TinyTask], config: Any, steps: int, from_step: int | None = None
) -> None:
    config = config.replace(trainer={"train_steps": steps})
    strategy = tf.distribute.get_strategy()
    seed_everything(config.runtime.random_seed)
    run_experiment(
        strategy, task_type(config.task), "train", config, str(folder), from_step=from_step
    )


def test_a_resumed_run_has_the_same_noise_and_norms(tmp_path: Path) -> None:
    options = {
        "steps_per_loop": 4,
        "summary_interval": 4,
        "checkpoint_interval": 4,
        "report_gradient_norm": True,
    }
    config = _build_config([NOISE], **options)
    _run(tmp_path, LinearTask, config, 12)
    history = str(tmp_path / "metrics.jsonl")
    whole = [line["metrics"] for line in read_active_history(history)]

    _run(tmp_path, LinearTask, config, 12, from_step=8)

    assert whole == [line["metrics"] for line in read_active_history(history)]
    assert all(metrics["gradient_norm"] > 0 for metrics in whole)


class OneInfiniteExample(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        points, labels = tiny_arrays(True, 192)
        return ArraySource(
            (np.where(np.arange(192)[:, None] == 100, np.float32(np.inf), points), labels), params
        )


def test_a_checked_divergence_leaves_out_its_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _build_config(
        [{"type": "check"}], steps_per_loop=4, summary_interval=4, recovery_max_trials=1
    )

    _run(tmp_path, OneInfiniteExample, config, 11)  # the other 11 of the 12 batches of an epoch

    assert "batch 7, of step 8, is left out" in caplog.text
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 11


def test_norms_of_gradients_are_summarized_at_their_interval(tmp_path: Path) -> None:
    config = _build_config(
        [{"type": "summarize", "variables": ("kernel",)}], steps_per_loop=4, summary_interval=4
    )
    _run(tmp_path, LinearTask, config, 8)
    steps_by_tag: dict[str, list[int]] = {}

    for path in glob.glob(str(tmp_path / "train" / "*events*")):
        for event in tf.compat.v1.train.summary_iterator(path):
            for value in event.summary.value:
                if value.tag.startswith("gradient_norm/"):
                    steps_by_tag.setdefault(value.tag, []).append(event.step)

    assert len(steps_by_tag) == 1
    assert all(tag.endswith("/kernel") for tag in steps_by_tag)
    assert all(len(steps) == 2 for steps in steps_by_tag.values()), steps_by_tag
