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

from tests.builders import assert_all_close, replicas, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.training.saved_state import restore_trainer, save_trainer
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.optimizers.gradients import apply_gradients
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import CLASSES, tiny_arrays
from trainer_kit.training.gradient_reports import GradientNorms
from trainer_kit.training.metric_set import StepMean
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


@pytest.fixture(scope="module")
def plain() -> Trainer:
    """A trainer on one replica, without processors, after four steps."""
    trainer = _create_trainer(_build_config(report_gradient_norm=True))
    trainer.train(tf.constant(4))
    return trainer


def test_processors_train_alike_on_replicas_and_micro_batches(plain: Trainer) -> None:
    config = _build_config(PROCESSORS, report_gradient_norm=True)
    whole = _create_trainer(config)
    split = _create_trainer(config.replace(trainer={"accumulate_steps": 2}), count=2)

    logs = whole.train(tf.constant(4))
    logs_of_steps = [split.train(tf.constant(1)) for _ in range(4)]

    assert_all_close(trained_weights(split), trained_weights(whole), atol=2e-6)
    for name in ("training_loss", "gradient_norm"):
        mean = np.mean([step_logs[name] for step_logs in logs_of_steps])
        assert logs[name] == pytest.approx(mean, rel=1e-4)

    # Without processors the weights are others.
    assert not np.allclose(trained_weights(plain)[0], trained_weights(whole)[0], atol=1e-3)


def test_processors_come_between_the_report_and_the_bounds() -> None:
    """A factor of 1000 cancels out in a gradient that is clipped to a norm afterwards."""
    scale = {"type": "scale", "scale": {"factor": 1000.0}}
    clipped, scaled = (
        _create_trainer(_build_config(processors, {"clipnorm": 1e-3}, report_gradient_norm=True))
        for processors in ([], [scale])
    )

    clipped_logs, scaled_logs = (trainer.train(tf.constant(3)) for trainer in (clipped, scaled))

    assert_all_close(trained_weights(scaled), trained_weights(clipped), atol=2e-6)
    assert clipped_logs["gradient_norm"] > 0.1  # and is that of unclipped gradients
    assert scaled_logs["gradient_norm"] == pytest.approx(clipped_logs["gradient_norm"], rel=1e-4)


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


def test_the_reported_norm_is_that_of_the_gradients(plain: Trainer) -> None:
    """SGD without momentum moves weights by the rate times the gradient."""
    before = trained_weights(plain)

    logs = plain.train(tf.constant(1))

    moved = [(old - new).ravel() for old, new in zip(before, trained_weights(plain), strict=True)]
    assert logs["gradient_norm"] == pytest.approx(
        np.linalg.norm(np.concatenate(moved)) / 0.05, rel=1e-4
    )
    # The variables of reports are not the optimizer's.
    silent = _create_trainer(_build_config())
    assert len(plain.optimizer.variables) == len(silent.optimizer.variables)


def test_a_report_changes_no_bit_of_the_weights() -> None:
    """The third of a sum, three times, is another number."""
    strategy = replicas(3)
    results = []
    for reports in (False, True):
        with strategy.scope():
            weights = keras.Variable(np.zeros(100, np.float32))
            optimizer = keras.optimizers.SGD(0.05)
            optimizer.build([weights])
            norms = StepMean("norms")
        if reports:
            optimizer.gradient_norms = GradientNorms(norms)

        _apply_random_gradients(strategy, optimizer, weights)

        results.append(weights.numpy())
        assert norms.is_updated is reports

    np.testing.assert_array_equal(*results)


def _apply_random_gradients(
    strategy: tf.distribute.Strategy, optimizer: keras.Optimizer, weights: keras.Variable
) -> None:
    @tf.autograph.experimental.do_not_convert
    def step() -> None:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        gradient = tf.random.stateless_normal([100], tf.stack([1, replica]))
        apply_gradients(optimizer, [(gradient, weights)])

    tf.function(lambda: strategy.run(step), autograph=False)()


def test_each_of_several_optimizers_has_a_norm_of_its_own() -> None:
    sgd = {"optimizer": {"type": "sgd"}, "learning_rate": RATE}
    noisy = {**sgd, "variables": ("bias",), "gradient_processors": [NOISE]}
    sections = {"noisy": noisy, "rest": {**sgd, "variables": (".",)}}
    config = linear_experiment(optimizer_config={}, optimizers=sections, report_gradient_norm=True)
    trainer = _create_trainer(config)
    before = trained_weights(trainer)

    logs = trainer.train(tf.constant(1))

    kernel, bias = (
        np.linalg.norm(old - new) / 0.05
        for old, new in zip(before, trained_weights(trainer), strict=True)
    )
    assert set(logs["gradient_norm"]) == {"noisy", "rest"}
    assert logs["gradient_norm"]["rest"] == pytest.approx(kernel, rel=1e-4)
    # The norm is that of the gradient without the noise.
    assert logs["gradient_norm"]["noisy"] == pytest.approx(bias, abs=0.05)


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


def _run(folder: Path, task_type: type[TinyTask], config: Any, steps: int) -> None:
    config = config.replace(trainer={"train_steps": steps})
    strategy = tf.distribute.get_strategy()
    seed_everything(config.runtime.random_seed)
    run_experiment(strategy, task_type(config.task), "train", config, str(folder))


def test_a_resumed_run_has_the_same_noise_and_norms(tmp_path: Path) -> None:
    config = _build_config([NOISE], report_gradient_norm=True)
    whole, resumed = (_create_trainer(config) for _ in range(2))
    whole.initialize()
    whole.train(tf.constant(4))
    path = save_trainer(whole, tmp_path)
    logs = whole.train(tf.constant(4))

    restore_trainer(resumed, path)

    assert resumed.train(tf.constant(4)) == logs
    assert logs["gradient_norm"] > 0
    assert_all_close(trained_weights(resumed), trained_weights(whole))


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
