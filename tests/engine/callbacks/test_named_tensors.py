"""Tensors of steps in callbacks, and their summaries in reports and event files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import trainer_kit as tk
from tests.builders import json_lines, replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.callbacks.callback import Loop, Run
from trainer_kit.callbacks.tensor_summaries import TensorSummaries
from trainer_kit.config.schema.metric_configs import SummaryConfig
from trainer_kit.errors import UsageError
from trainer_kit.run.runner import run_experiment
from trainer_kit.training.base_trainer import CustomParts

SUMMARIES = (
    {"tensor": "spread", "of": "both"},
    {"tensor": "hidden", "type": "histogram", "of": "both"},
    {"tensor": "picture", "type": "image", "of": "evaluation"},
)


class PictureTask(LinearTask):
    """Exposes a scalar in both steps, and images in the validation step."""

    def build_model(self) -> keras.Model:
        model = super().build_model()
        model.layers[0].name = "hidden"
        return model

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        tk.expose("spread", tf.math.reduce_std(model_outputs))
        return super().build_losses(labels, model_outputs, aux_losses)

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        tk.expose("picture", tf.reshape(tf.nn.sigmoid(inputs[0]), [-1, 2, 4, 1]))
        return super().validation_step(inputs, model, metrics)


class Reader(tk.Callback):
    """Keeps the tensors that it reads."""

    tensors = ("hidden",)
    evaluation_tensors = ("hidden", "picture")

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def loop_end(self, run: Any, logs: Any) -> None:
        self.seen.append(run.tensors["hidden"])

    def evaluation_end(self, run: Any, logs: Any) -> None:
        self.seen.append(run.evaluation_tensors["picture"])


def _run(
    folder: Path, mode: str = "train_and_eval", count: int = 1, callbacks: Any = (), **trainer: Any
) -> None:
    config = linear_experiment(train_steps=10, **{"summaries": SUMMARIES, **trainer})
    strategy = replicas(count)
    with strategy.scope():
        task = PictureTask(config.task)
    run_experiment(
        strategy,
        task,
        mode,
        config,
        str(folder),
        callbacks=list(callbacks),
        enable_async_checkpointing=False,
    )


def _read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    return events


@pytest.mark.parametrize("options", [{"count": 2}, {"fuse_steps": 5}], ids=str)
def test_summaries_are_written_on_replicas_and_in_fused_loops(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    reader = Reader()

    _run(tmp_path, callbacks=[reader], **options)

    lines = json_lines(tmp_path / "metrics.jsonl")
    # Two loops and an evaluation.
    assert len([line for line in lines if "spread" in str(line)]) == 3

    train = _read_events(tmp_path / "train")
    validation = _read_events(tmp_path / "validation")
    assert [event.step for event in train.Tensors("hidden")] == [5, 10]
    assert [event.step for event in validation.Tensors("picture")] == [10]
    assert {"hidden", "spread"} <= set(validation.Tags()["tensors"])
    assert [array.shape for array in reader.seen] == [(8, 3), (8, 3), (7, 2, 4, 1)]


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (
            {"tensor": "hidden"},
            r"'hidden' has the shape \[8, 16\], and type=scalar needs a single number",
        ),
        (
            {"tensor": "hidden", "type": "image"},
            r"'hidden' has the shape \[8, 16\], and type=image needs \[batch",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_its_summary_is_an_error(
    summary: dict[str, Any], message: str
) -> None:
    tensors = SimpleNamespace(values={"hidden": np.zeros((8, 16), np.float32)})
    run = Run(SimpleNamespace(custom_parts=CustomParts(), train_tensors=tensors))
    manager = SimpleNamespace()
    manager.summary_writer = tf.summary.create_noop_writer
    run.loop = Loop(0, 5, 1.0, {})

    with pytest.raises(UsageError, match=message):
        TensorSummaries([SummaryConfig(**summary)], 5, manager, manager).loop_end(run, {})


def test_a_tensor_that_no_step_exposes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"trainer\.summaries: the training step exposes no tensor 'picture'"
    ):
        _run(tmp_path, summaries=[{"tensor": "picture"}])


class OfTrainStep(PictureTask):
    """Exposes a tensor in its training step only."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        tk.expose("margin", tf.ones(()))
        return super().train_step(inputs, model, optimizer, metrics)


@pytest.mark.parametrize(
    "trainer",
    [
        {"summaries": [{"tensor": "margin", "of": "both"}]},
        {
            "metrics": [
                {
                    "type": "keras",
                    "keras": {"metric": "Mean", "args": {"name": "mean"}},
                    "tensor": "margin",
                }
            ]
        },
    ],
)
def test_a_miss_of_the_evaluation_ends_the_run_before_step_1(
    tmp_path: Path, trainer: dict[str, Any]
) -> None:
    config = linear_experiment(train_steps=10, **trainer)

    with pytest.raises(UsageError):
        run_experiment(None, OfTrainStep(config.task), "train_and_eval", config, str(tmp_path))

    assert not (tmp_path / "metrics.jsonl").exists()


def test_values_are_numpy_arrays_that_later_loops_leave_alone(tmp_path: Path) -> None:
    reader = Reader()

    _run(tmp_path, "train", callbacks=[reader], summaries=[])

    assert all(isinstance(array, np.ndarray) for array in reader.seen)
    assert not np.array_equal(reader.seen[0], reader.seen[1])
