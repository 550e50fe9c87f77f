"""Runs whose config counts epochs, shares of the run and times, through the Python interface."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.builders import assert_all_close, final_record, read_json, replicas
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit import Callback
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ConfigError, PreemptedError
from trainer_kit.run.launcher import launch
from trainer_kit.run.runner import run_experiment
from trainer_kit.telemetry.metrics_jsonl import read_active_history
from trainer_kit.testing import tiny_arrays
from trainer_kit.training.trainer import Trainer

TASK = {"train_data": {"global_batch_size": 10}}


class Dataset(LinearTask):
    """Trains on a dataset that ends after 11 batches, the last of three examples."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        if not params.is_training:
            return super().build_inputs(params, input_context)
        return tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(10)


class Endless(Dataset):
    """Trains on a dataset without an end."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        data = super().build_inputs(params, input_context)
        return data.repeat() if params.is_training else data


class Noted(Callback):
    """Notes the events of epochs, and the position in the epoch at their beginning and in loops."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def epoch_begin(self, run: Any, epoch: int) -> None:
        self.events.append(("begin", epoch, run.step, run.epoch, run.step_in_epoch))

    def loop_end(self, run: Any, logs: Any) -> None:
        self.events.append((run.epoch, run.step_in_epoch))

    def epoch_end(self, run: Any, epoch: int, logs: Any) -> None:
        self.events.append(
            ("end", epoch, run.step, sorted(logs), sorted(logs.get("validation", ())))
        )


def _build_config(**trainer: Any) -> ExperimentConfig:
    return linear_experiment(**trainer).replace(task=TASK)


def _launch(*arguments: Any, **options: Any) -> Any:
    """Launches a run that saves in the foreground, which takes less time in a short one."""
    return launch(*arguments, enable_async_checkpointing=False, **options)


def _list_steps(folder: Path, kind: str) -> list[int]:
    return [
        line["step"]
        for line in read_active_history(str(folder / "metrics.jsonl"))
        if line["kind"] == kind
    ]


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    return ReadyTrainer(_build_config(), LinearTask)


def test_saves_and_evaluations_come_at_the_ends_of_epochs(
    ready: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_config(
        train_steps="3 epochs",
        checkpoint_interval="1 epoch",
        validation_interval="50 %",
        summary_interval="1 epoch",
    )

    _launch(config, "train_and_eval", str(tmp_path), trainer=ready.again())

    # 103 examples in batches of 10.
    assert list(complete_checkpoints(str(tmp_path))) == [11, 21, 31]
    assert _list_steps(tmp_path, "validation") == [16, 31]
    assert _list_steps(tmp_path, "train") == [5, 10, 11, 16, 21, 26, 31]
    assert "train_steps: 3 epochs" in (tmp_path / "params.yaml").read_text()
    assert read_json(tmp_path / "manifest.json")["train_steps"] == 31

    # It knows that the run is finished.
    _, logs = _launch(config, "continuous_eval", str(tmp_path), trainer=ready.again())
    assert logs == final_record(tmp_path)["metrics"]


def test_loops_end_where_summaries_are_due(ready: ReadyTrainer, tmp_path: Path) -> None:
    config = _build_config(
        train_steps=25, steps_per_loop=100, checkpoint_interval="1 h", summary_interval="1 epoch"
    )

    _launch(config, "train", str(tmp_path), trainer=ready.again())

    assert _list_steps(tmp_path, "train") == [11, 21, 25]
    # The end of the run comes long before the hour's.
    assert list(complete_checkpoints(str(tmp_path))) == [25]


def _build_cosine_config(steps: int | str, decay: int | str) -> ExperimentConfig:
    rate = {"type": "cosine", "cosine": {"initial_learning_rate": 0.01, "decay_steps": decay}}
    return _build_config(
        train_steps=steps, optimizer_config={"optimizer": {"type": "sgd"}, "learning_rate": rate}
    )


def test_two_epochs_are_the_same_bits_as_their_steps(tmp_path: Path) -> None:
    ready = ReadyTrainer(_build_cosine_config(21, 21), LinearTask)
    in_epochs, _ = _launch(
        _build_cosine_config("2 epochs", "100 %"), "train", str(tmp_path / "epochs")
    )
    in_steps, _ = _launch(
        _build_cosine_config(21, 21), "train", str(tmp_path / "steps"), trainer=ready.again()
    )

    assert_all_close(
        [variable.numpy() for variable in in_epochs.variables],
        [variable.numpy() for variable in in_steps.variables],
    )


def test_a_dataset_that_ends_starts_again_for_each_epoch(tmp_path: Path) -> None:
    noted = Noted()
    config = _build_config(train_steps="2 epochs", steps_per_loop=8, summary_interval=8)

    run_experiment(
        None, Dataset(config.task), "train_and_eval", config, str(tmp_path), callbacks=[noted]
    )

    logs = ["accuracy", "learning_rate", "training_loss"]
    assert noted.events == [
        ("begin", 1, 0, 1, 0),
        (1, 8),
        (1, 10),
        (1, 11),
        ("end", 1, 11, logs, []),
        ("begin", 2, 11, 2, 0),
        (2, 8),
        (2, 9),
        (2, 11),
        ("end", 2, 22, [*logs, "validation"], ["accuracy", "validation_loss"]),
    ]


def test_an_epoch_of_a_ready_made_trainer_is_that_of_its_dataset(tmp_path: Path) -> None:
    config = _build_config(train_steps=4)
    dataset = tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(10).take(2).repeat(3)
    task = LinearTask(config.task)
    model = task.build_model()
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
    trainer = Trainer(config, task, model, optimizer, train_dataset=dataset)

    run_experiment(
        None, task, "train", _build_config(train_steps="1 epochs"), str(tmp_path), trainer=trainer
    )

    assert int(trainer.global_step.numpy()) == 6


def test_replicas_end_their_epochs_when_their_batches_end(tmp_path: Path) -> None:
    strategy = replicas(2)
    noted = Noted()
    config = _build_config(train_steps="2 epochs", steps_per_loop=100, summary_interval=100)
    with strategy.scope():
        task = Dataset(config.task)

    run_experiment(strategy, task, "train", config, str(tmp_path), callbacks=[noted])
    ends = [event[:3] for event in noted.events if event[0] == "end"]

    assert ends == [("end", 1, 6), ("end", 2, 11)]  # 11 batches for two replicas are 5.5 steps


def test_data_without_an_end_needs_steps_per_epoch(tmp_path: Path) -> None:
    config = _build_config(train_steps="2 epochs")

    with pytest.raises(
        ConfigError, match=r"trainer.train_steps: needs the length of an epoch.*steps_per_epoch"
    ):
        run_experiment(None, Endless(config.task), "train", config, str(tmp_path / "refused"))

    assert not (tmp_path / "refused" / "params.yaml").exists()

    config = config.replace(trainer={"steps_per_epoch": 4})

    run_experiment(None, Endless(config.task), "train", config, str(tmp_path / "set"))

    assert max(complete_checkpoints(str(tmp_path / "set"))) == 8


def test_batches_to_overfit_are_an_epoch(tmp_path: Path) -> None:
    config = _build_config(train_steps="3 epochs", overfit_batches=2, steps_per_epoch=50)

    run_experiment(None, Dataset(config.task), "train", config, str(tmp_path))

    assert list(complete_checkpoints(str(tmp_path))) == [6]


def test_older_checkpoints_stay_at_their_interval(ready: ReadyTrainer, tmp_path: Path) -> None:
    config = _build_config(
        train_steps="4 epochs", checkpoint_interval=5, max_to_keep=2, keep_interval="2 epochs"
    )

    _launch(config, "train", str(tmp_path), trainer=ready.again())

    assert list(complete_checkpoints(str(tmp_path))) == [25, 40, 42]


def test_checkpoints_by_the_clock_come_at_the_ends_of_loops(
    ready: ReadyTrainer, tmp_path: Path
) -> None:
    config = _build_config(checkpoint_interval="0.001 s", train_steps=15)

    _launch(config, "train", str(tmp_path), trainer=ready.again())

    assert list(complete_checkpoints(str(tmp_path))) == [5, 10, 15]


def test_max_time_saves_and_ends_as_if_preempted(ready: ReadyTrainer, tmp_path: Path) -> None:
    config = _build_config(train_steps=10**9, max_time="2 s", checkpoint_interval=10**9)
    idle = [lambda logs: time.sleep(0.1)]  # so that others may use the CPU in these seconds

    with pytest.raises(PreemptedError, match=r"stopped by trainer\.max_time=2 s at step"):
        _launch(config, "train", str(tmp_path), train_actions=idle)

    reached = max(complete_checkpoints(str(tmp_path)))
    assert 0 < reached < 10**9

    _launch(
        config.replace(trainer={"train_steps": reached + 3, "max_time": "1 h"}),
        "train",
        str(tmp_path),
        trainer=ready.again(),
    )

    assert max(complete_checkpoints(str(tmp_path))) == reached + 3
