"""Runs that diverge: back to a sound checkpoint, what changes then, and how it ends in vain."""

from __future__ import annotations

import io
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import curve, read_json, replicas
from tests.engine.linear_task import SGD, BatchSource, LinearTask
from trainer_kit.callbacks.recovery import Recovery
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import DataConfig, TrainerConfig
from trainer_kit.errors import DivergedError, PreemptedError
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.testing import TinyTask, tiny_arrays, tiny_experiment

NAN = float("nan")
ADAM = {**SGD, "optimizer": {"type": "adam"}}


class _Batched(LinearTask):
    """Trains on ready-made batches; those whose indices are in `bad` are of NaN."""

    bad: tuple[int, ...] = ()

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        if not params.is_training:
            return super().build_inputs(params, input_context)
        return BatchSource(self.bad)


class _Poisoned(_Batched):
    bad = (12,)


class _SeveralPoisoned(_Batched):
    # Three before the first checkpoint: two in one loop, and one in the next. One after it.
    bad = (1, 3, 7, 15)


class _NanGradient(_Batched):
    """The loss stays finite, its gradient does not, at one step only: the square root at zero."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        zero = 0.0 * tf.reduce_sum(model_outputs)
        return loss + tf.where(self.due(), tf.sqrt(zero), zero)

    def due(self) -> tf.Tensor:
        return tf.equal(self.step, 12)

    def build_model(self) -> Any:
        model = super().build_model()
        self.step = tf.Variable(-1, dtype=tf.int64)
        return model

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.step.assign_add(1)
        return super().train_step(inputs, model, optimizer, metrics)


class _NanWeight(TinyTask):
    """A weight becomes NaN at one step, behind a relu: on CPU max(NaN, 0) is 0."""

    at = 12

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        logs = super().train_step(inputs, model, optimizer, metrics)
        bias = model.layers[0].bias
        due = tf.equal(optimizer.iterations, self.at)
        bias.assign(tf.where(due, NAN * tf.ones_like(bias), bias))
        return {self.loss: tf.where(tf.math.is_finite(logs[self.loss]), logs[self.loss], 1.0)}


def _run(
    folder: Path,
    task: type[TinyTask],
    mode: str = "train",
    *,
    saves_in_background: bool = False,
    **trainer: Any,
) -> Any:
    """Runs a task; saves in the foreground take less time."""
    seed_everything(1)
    trainer = {
        "train_steps": 30,
        "best_checkpoint_eval_metric": "accuracy",
        "optimizer_config": SGD,
        **trainer,
    }
    config = tiny_experiment(**trainer)
    return run_experiment(
        None,
        task(config.task),
        mode,
        config,
        str(folder),
        enable_async_checkpointing=saves_in_background,
    )


@pytest.fixture(scope="module")
def recovered_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, str]:
    """A run that left out its batches of NaN: its folder, model, last metrics and log."""
    folder = tmp_path_factory.mktemp("recovered")
    told = io.StringIO()
    log = logging.getLogger("trainer_kit")
    handler = logging.StreamHandler(told)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model, logs = _run(
            folder,
            _SeveralPoisoned,
            "train_and_eval",
            saves_in_background=True,
            recovery_max_trials=4,
        )
    finally:
        log.setLevel(level)
        log.removeHandler(handler)

    return folder, model, logs, told.getvalue()


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run whose weights were spoilt after step 10, unnoticed: its folder and its model."""
    folder = tmp_path_factory.mktemp("hidden")
    model, _ = _run(
        folder, _NanWeight, "train_and_eval", recovery_max_trials=-1, checkpoint_interval=5
    )
    assert list(complete_checkpoints(str(folder))) == [10, 15, 20, 25, 30]

    return folder, model


def _are_checkpoints_finite(folder: Path) -> bool:
    """Whether all checkpoints, and the best one, hold finite numbers only."""
    prefixes = [
        *complete_checkpoints(str(folder)).values(),
        *complete_checkpoints(str(folder / "best_ckpt")).values(),
    ]
    readers = [tf.train.load_checkpoint(prefix) for prefix in prefixes]
    names = [name for name in readers[0].get_variable_to_shape_map() if "model/" in name]
    return all(np.all(np.isfinite(reader.get_tensor(name))) for reader in readers for name in names)


@pytest.mark.parametrize(
    ("step", "trainer", "kept"),
    [
        (20, {}, [10]),
        (13, {"steps_per_loop": 1, "summary_interval": 1, "checkpoint_interval": 13}, []),
    ],
    ids=["long loops", "short loops"],
)
def test_a_weight_that_diverges_just_before_a_save_is_not_saved(
    step: int, trainer: dict[str, Any], kept: list[int], tmp_path: Path
) -> None:
    task = type("_NanWeightAt", (_NanWeight,), {"at": step})

    with pytest.raises(DivergedError, match=f"a weight is not finite at step {step}"):
        _run(tmp_path, task, saves_in_background=True, **trainer)

    assert list(complete_checkpoints(str(tmp_path))) == kept


class _HugeGradient(_Batched):
    """One gradient of 1e30: its square, which Adam keeps, is infinite, Adam's step is not."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        if not self.trains:
            return loss

        # The count is Python's, so that it is not put back when the run goes back: the fault
        # happens once.
        return loss * tf.ensure_shape(tf.numpy_function(lambda: self._factor(), [], tf.float32), [])

    trains = False

    def _factor(self) -> np.float32:
        self.step = getattr(self, "step", 0) + 1
        return np.float32(1e30 if self.step == 20 else 1.0)

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        self.trains = True
        logs = super().train_step(inputs, model, optimizer, metrics)
        self.trains = False
        return {self.loss: tf.minimum(logs[self.loss], 10.0)}


def test_a_checkpoint_with_a_bad_optimizer_is_not_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trainer_kit"):
        _run(
            tmp_path,
            _HugeGradient,
            saves_in_background=True,
            recovery_max_trials=1,
            optimizer_config=ADAM,
        )

    assert "ckpt-20 holds weights that are not finite; it is moved to diverged/" in caplog.text
    assert "the run returns to step 10 (trial 1 of 1)" in caplog.text

    for prefix in complete_checkpoints(str(tmp_path)).values():
        reader = tf.train.load_checkpoint(prefix)
        names = [
            name for name, kind in reader.get_variable_to_dtype_map().items() if kind.is_floating
        ]
        assert all(np.all(np.isfinite(reader.get_tensor(name))) for name in names)


class _StopsHidden(_NanWeight):
    """SIGTERM comes in the step after the one that spoils a weight."""

    def train_step(self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None) -> Any:
        logs = super().train_step(inputs, model, optimizer, metrics)
        stopped = tf.numpy_function(self.stop, [optimizer.iterations], tf.bool)
        with tf.control_dependencies([stopped]):
            return {self.loss: tf.identity(logs[self.loss])}

    def stop(self, step: Any) -> Any:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)  # until the thread that waits for it has seen it
        return np.bool_(True)


def test_a_stop_after_a_hidden_divergence_saves_nothing_bad(tmp_path: Path) -> None:
    with pytest.raises(PreemptedError):
        _run(
            tmp_path,
            _StopsHidden,
            saves_in_background=True,
            steps_per_loop=1,
            summary_interval=1,
            recovery_max_trials=2,
        )

    assert list(complete_checkpoints(str(tmp_path))) == [0, 10]
    assert _are_checkpoints_finite(tmp_path)


def test_a_divergence_without_a_report_is_still_a_divergence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "diverged").write_text("a file where the bundle's folder would be")

    with pytest.raises(DivergedError, match=r"at step 15\b.*this loop is not saved; lower"):
        _run(tmp_path, _NanGradient)

    assert list(complete_checkpoints(str(tmp_path))) == [10]
    assert _are_checkpoints_finite(tmp_path)
    assert "the report of the divergence could not be written" in caplog.text


def test_a_diverging_loop_uses_the_data_to_its_end(tmp_path: Path) -> None:
    class Ends(_Poisoned):
        def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
            if not params.is_training:
                return super().build_inputs(params, input_context)
            return BatchSource(bad=(27,)).at(0).take(29)

    seed_everything(1)
    config = tiny_experiment(
        train_steps=-1, recovery_max_trials=1, checkpoint_interval=10, optimizer_config=SGD
    )

    run_experiment(None, Ends(config.task), "train", config, str(tmp_path))

    assert max(complete_checkpoints(str(tmp_path))) == 28


def test_all_batches_that_poison_are_found_and_left_out(
    recovered_run: tuple[Path, Any, Any, str],
) -> None:
    folder, _, logs, told = recovered_run

    # To the initial weights, and later to a checkpoint.
    assert "the run returns to step 0 (trial 1 of 4)" in told
    assert "the run returns to step 10 (trial 4 of 4)" in told
    assert all(f"batch {batch}, of step" in told for batch in _SeveralPoisoned.bad)
    assert "batch 15, of step 13, is left out" in told
    assert np.isfinite(logs["validation_loss"])
    assert _are_checkpoints_finite(folder)

    history = read_active_history(folder / "metrics.jsonl")
    assert [record["step"] for record in history if record["kind"] == "train"] == [
        5,
        10,
        15,
        20,
        25,
        30,
    ]
    assert all(
        np.isfinite(record["metrics"]["training_loss"])
        for record in history
        if record["kind"] == "train"
    )


def test_skipping_batches_equals_data_without_these_batches(
    recovered_run: tuple[Path, Any, Any, str], tmp_path: Path
) -> None:
    class Without(LinearTask):
        def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
            if not params.is_training:
                return super().build_inputs(params, input_context)
            return BatchSource(without=_SeveralPoisoned.bad)

    never, _ = _run(tmp_path, Without)

    for variable, other in zip(recovered_run[1].weights, never.weights, strict=True):
        np.testing.assert_array_equal(variable.numpy(), other.numpy())


def test_a_fault_that_does_not_come_again_leaves_nothing_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Once(_NanGradient):
        def due(self) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(self.only_once, [self.step], tf.bool), [])

        def only_once(self, step: Any) -> Any:
            before = getattr(self, "happened", False)
            self.happened = before or step == 12
            return np.bool_(self.happened and not before)

    with caplog.at_level(logging.INFO, "trainer_kit"):
        _run(tmp_path, Once, recovery_max_trials=1)

    assert (
        "the divergence did not happen again step by step, so no batch is left out" in caplog.text
    )
    assert _are_checkpoints_finite(tmp_path)


@pytest.mark.parametrize(("loss", "step"), [(5.0, None), (5.1, 1)])
def test_a_loss_diverges_above_its_bound_and_not_at_it(loss: float, step: int | None) -> None:
    trainer = SimpleNamespace(
        strategy=tf.distribute.get_strategy(),
        train=lambda steps: {"training_loss": loss},
        state=SimpleNamespace(all_finite=lambda: True),
        is_stop_requested=False,
        register_state=lambda *parts: None,
    )
    options = TrainerConfig(loss_upper_bound=5.0, recovery_begin_steps=0)
    recovery = Recovery(options, cast(Any, trainer), cast(Any, None))

    assert recovery.find_diverging_step(0, 2) == step


@pytest.mark.parametrize("fuse_steps", [1, 5])
def test_a_lower_learning_rate_cures_a_rate_that_is_too_high(
    fuse_steps: int, tmp_path: Path
) -> None:
    config = {"optimizer": {"type": "sgd"}, "learning_rate": {"type": "constant"}}
    steep = {**config, "learning_rate": {"type": "constant", "constant": {"learning_rate": 1e4}}}

    _run(
        tmp_path,
        _Batched,
        fuse_steps=fuse_steps,
        optimizer_config=steep,
        loss_upper_bound=50.0,
        recovery_max_trials=9,
        recovery_policy="lower_learning_rate",
        recovery_learning_rate_factor=0.01,
    )
    history = tmp_path / "metrics.jsonl"

    assert all(loss < 50 for _, loss in curve(history, "training_loss", "train"))

    step, factor = curve(history, "recovery_learning_rate_factor")[-1]
    assert step == 0
    assert factor < 1
    assert curve(history, "learning_rate")[0] == (5, pytest.approx(1e4 * factor))


def test_report_names_step_batch_layer_and_command(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match=r"after 2 trials; .*diverged/step-13.json"):
        _run(tmp_path, _Poisoned, "train", recovery_max_trials=2, recovery_policy="retry")

    assert list(complete_checkpoints(str(tmp_path))) == [0, 10]
    assert _are_checkpoints_finite(tmp_path)

    bundle = read_json(tmp_path / "diverged" / "step-13.json")
    assert bundle["step"] == 13
    assert bundle["batch"] == 12
    assert bundle["batches"] == [10, 14]
    assert bundle["not_finite"] == "sequential/dense/kernel"
    assert bundle["gradient_norms"]["sequential/dense/kernel"] == "nan"
    assert "trainer.train_steps=13" in bundle["command"]
    assert "ckpt-10" in bundle["command"]
    assert bundle["examples_not_finite"] == list(range(8))


class _OnePoisoned(LinearTask):
    """One example of the training data holds NaN, in the part of the second of two replicas."""

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> Any:
        if not params.is_training:
            return super().build_inputs(params, input_context)

        points, labels = tiny_arrays(True, 20 * 8)
        points = points.copy()
        points[7 * 8 + 5, 3] = NAN
        parts = (points.reshape(40, 4, -1), labels.reshape(40, 4))

        class OfReplicas:
            def at(self, position: int, input_context: Any = None) -> tf.data.Dataset:
                return tf.data.Dataset.from_tensor_slices(parts).skip(2 * position)

        return OfReplicas()


def test_an_example_that_is_not_finite_is_named_and_not_the_rate(tmp_path: Path) -> None:
    strategy = replicas(2)
    config = tiny_experiment(optimizer_config=SGD, checkpoint_interval=5)
    with strategy.scope():
        task = _OnePoisoned(config.task)

    with pytest.raises(DivergedError) as error:
        run_experiment(strategy, task, "train", config, str(tmp_path))

    advice = "values of example 5 in batch 7 are not finite: repair the data"
    assert advice in str(error.value)
    assert "learning rate" not in str(error.value)
    assert read_json(tmp_path / "diverged" / "step-8.json")["examples_not_finite"] == [5]


def test_a_checkpoint_of_bad_weights_is_moved_aside(
    hidden: tuple[Path, Any], tmp_path: Path
) -> None:
    assert not np.all(np.isfinite(hidden[1].weights[1].numpy()))

    run = Path(shutil.copytree(hidden[0], tmp_path / "run"))

    _run(run, TinyTask, "train_and_eval", checkpoint_interval=5)

    assert sorted(complete_checkpoints(str(run / "diverged"))) == [15, 20, 25, 30]
    assert _are_checkpoints_finite(run)


def test_when_no_checkpoint_is_sound_the_run_ends(hidden: tuple[Path, Any], tmp_path: Path) -> None:
    run = Path(
        shutil.copytree(hidden[0], tmp_path / "run", ignore=shutil.ignore_patterns("ckpt-10.*"))
    )

    with pytest.raises(
        DivergedError, match=r"every checkpoint in .* holds weights that are not finite"
    ):
        _run(run, TinyTask, checkpoint_interval=5)
