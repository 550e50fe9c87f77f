"""Exports and predictions of runs with several tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit
from tests.engine.training.multitask.two_tasks import TwoTasks, two_tasks
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.serving.inference_function import build_inference_function
from trainer_kit.testing import FEATURES, TinyTask
from trainer_kit.testing.tiny_task import tiny_arrays

TASKS = "tests_exported_tasks"
POINTS = np.random.default_rng(0).random((5, FEATURES)).astype("float32")


@pytest.fixture(scope="module")
def tasks_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks") / "run"
    config = two_tasks(best_checkpoint_eval_metric="large|accuracy")
    trainer_kit.register_experiment(TASKS)(lambda: config)
    launch(config, "train_and_eval", str(folder), experiment=TASKS)
    return folder


def test_an_export_of_tasks_has_outputs_of_each(tasks_run: Path, tmp_path: Path) -> None:
    exported = trainer_kit.export(tasks_run, tmp_path / "model")
    with pytest.raises(UsageError, match=r"keras refuses .* take the format saved_model"):
        trainer_kit.export(tasks_run, tmp_path / "other", ["keras"])

    model = tf.saved_model.load(exported.path)
    outputs = model.signatures["serving_default"](inputs=tf.constant(POINTS))
    assert outputs.keys() == {"large", "small"}
    for name, sub_model in trainer_kit.load_model(tasks_run).sub_tasks.items():
        np.testing.assert_allclose(outputs[name], sub_model(POINTS, training=False), rtol=1e-6)
    assert "- large/accuracy: " in (tmp_path / "model" / "README.md").read_text()


def test_tasks_predict_the_rows_of_the_first_one(tasks_run: Path) -> None:
    predictions = trainer_kit.predict(tasks_run)

    points, labels = tiny_arrays(training=False)
    small = trainer_kit.load_model(tasks_run).sub_tasks["small"]
    np.testing.assert_array_equal(predictions["label"], labels)
    np.testing.assert_allclose(predictions["small"], small(points, training=False), rtol=1e-5)


def test_inference_of_each_task_is_its_own(
    tasks_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def infer(task: TinyTask, inputs: Any, model: keras.Model) -> Any:
        return tf.nn.softmax(model(inputs, training=False))

    monkeypatch.setattr(TinyTask, "inference_step", infer)

    predictions = trainer_kit.predict(tasks_run, POINTS)

    np.testing.assert_allclose(predictions["large"].sum(1), np.ones(5), rtol=1e-6)


def test_features_that_a_task_does_not_take_are_refused() -> None:
    task = TwoTasks(two_tasks().task)
    spec = tf.TensorSpec([None, FEATURES + 1])

    with pytest.raises(UsageError, match=r"^TwoTasks does not take .* of layer .large. is incom"):
        build_inference_function(task, task.build_model(), spec)
