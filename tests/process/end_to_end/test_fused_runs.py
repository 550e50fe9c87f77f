"""Runs whose training steps are fused: the same numbers and exact resume."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close, json_lines
from tests.engine.linear_task import LinearConfig, LinearTask, linear_experiment
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.sources.arrays import ArraySource
from trainer_kit.run.launcher import launch
from trainer_kit.testing import tiny_arrays
from trainer_kit.training.trainer import Trainer


@configclass
class _ListConfig(LinearConfig):
    """A linear task on a tf.data.Dataset."""


@register_task(_ListConfig)
class _ListTask(LinearTask):
    """A linear task on a tf.data.Dataset whose place is kept by its saved iterator."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """Returns the points in their own order; the last batch of each pass is smaller."""
        arrays = tiny_arrays(training=False)
        dataset = tf.data.Dataset.from_tensor_slices(arrays).batch(params.global_batch_size)
        return dataset.repeat() if params.is_training else dataset


@configclass
class _PoisonedConfig(LinearConfig):
    """A linear task, one example of which is NaN."""


@register_task(_PoisonedConfig)
class _PoisonedTask(LinearTask):
    """A linear task, one example of which is NaN."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the points; those of one training example are NaN."""
        points, labels = tiny_arrays(bool(params.is_training))
        if params.is_training:
            points = points.copy()
            points[42] = np.nan
        return ArraySource((points, labels), params)


@configclass
class _ShortConfig(LinearConfig):
    """A linear task whose data ends."""


@register_task(_ShortConfig)
class _ShortTask(LinearTask):
    """A linear task with thirteen training batches and no more."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        """Returns the points once; the last of the thirteen batches is smaller."""
        arrays = tiny_arrays(training=False)
        return tf.data.Dataset.from_tensor_slices(arrays).batch(params.global_batch_size)


def _run(
    folder: Path,
    task: dict[str, Any] | None = None,
    section: LinearConfig | None = None,
    from_step: int | None = None,
    **trainer: Any,
) -> tuple[list[Any], dict[int, Any]]:
    """Runs a linear experiment; returns its weights, and the metrics of its training by step."""
    keras.utils.clear_session()
    config = linear_experiment(**trainer)
    if section is not None:
        config = config.replace(task=section)
    model, _ = launch(config.replace(task=task or {}), "train", str(folder), from_step=from_step)
    lines = json_lines(folder / "metrics.jsonl")
    metrics = {line["step"]: line["metrics"] for line in lines if line["kind"] == "train"}
    return model.get_weights(), metrics


DROPOUT = {"dropout": 0.3}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Weights of a run with dropout, of five steps in a program, that was never stopped."""
    weights, _ = _run(tmp_path_factory.mktemp("whole"), DROPOUT, fuse_steps=5)
    return weights


def test_any_grouping_and_a_resume_keep_the_bits_with_dropout(
    whole: list[Any], tmp_path: Path
) -> None:
    _run(tmp_path, DROPOUT, fuse_steps=3, train_steps=11, steps_per_loop=5)
    weights, _ = _run(tmp_path, DROPOUT, fuse_steps=3, steps_per_loop=5)

    assert_all_close(weights, whole)


def test_a_saved_iterator_resumes_exactly_inside_a_stack(tmp_path: Path) -> None:
    trainer: dict[str, Any] = {"fuse_steps": 2, "checkpoint_interval": 5, "max_to_keep": 4}
    whole = tmp_path / "whole"
    expected, _ = _run(whole, section=_ListConfig(), **trainer)
    assert list(whole.glob("ckpt-10.iterator*"))
    assert not list(whole.glob("ckpt-15.iterator*"))  # the last stack is half used

    for step in (10, 15):
        resumed = shutil.copytree(whole, tmp_path / str(step))
        weights, _ = _run(resumed, section=_ListConfig(), from_step=step, **trainer)
        assert (resumed / "archived" / "ckpt-20.index").exists()
        assert_all_close(weights, expected)


def test_a_diverged_fused_run_recovers_as_separate_steps_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []
    for fuse_steps in (1, 5):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="trainer_kit"):
            run = _run(
                tmp_path / str(fuse_steps),
                section=_PoisonedConfig(),
                fuse_steps=fuse_steps,
                recovery_max_trials=2,
            )
        runs.append(run)
        assert "is left out" in caplog.text

    (plain_weights, plain_metrics), (fused_weights, fused_metrics) = runs
    for plain, fused in zip(plain_weights, fused_weights, strict=True):
        np.testing.assert_allclose(fused, plain, rtol=1e-5, atol=1e-6)
    assert plain_metrics.keys() == fused_metrics.keys() == {5, 10, 15, 20}
    for step, metrics in plain_metrics.items():
        assert fused_metrics[step] == pytest.approx(metrics, rel=1e-4)


def test_data_that_ends_in_a_fused_loop_ends_it_at_its_step(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"task\.train_data ended at step 13 of 20"):
        _run(tmp_path, section=_ShortConfig(), fuse_steps=5)
    assert {path.name for path in tmp_path.glob("ckpt-??.index")} == {
        "ckpt-10.index",
        "ckpt-13.index",
    }


def test_custom_loops_and_distributed_data_are_refused() -> None:
    class OwnLoop(Trainer):
        def create_train_loop_fn(self) -> Any:
            return super().create_train_loop_fn()

    config = linear_experiment(fuse_steps=5)
    task = LinearTask(config.task)
    parts = (task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config))

    message = r"trainer\.fuse_steps=5: OwnLoop builds its own training loop"
    with pytest.raises(UsageError, match=message):
        OwnLoop(config, *parts)

    trainer = Trainer(config, *parts)
    distributed = tf.distribute.OneDeviceStrategy("CPU:1").experimental_distribute_dataset(
        tf.data.Dataset.range(3)
    )
    with pytest.raises(UsageError, match="already distributed"):
        trainer.train_dataset = distributed
