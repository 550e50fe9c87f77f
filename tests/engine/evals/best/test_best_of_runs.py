"""What is kept as the best, and what there are weights of: runs on a tiny task, with real files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.builders import json_lines, read_json
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch

BESTS = ("best_ckpt", "best_checkpoints/two", "best_checkpoints/first")
LOSS = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}


def _build_config(**trainer: Any) -> ExperimentConfig:
    average = {"optimizer_config": {"ema": {"average_decay": 0.9}}}
    return linear_experiment(
        best_checkpoint_eval_metric="validation_loss",
        best_checkpoint_metric_comp="lower",
        best_checkpoints={"two": LOSS, "first": {"metric": "validation_loss"}},
        **{"train_steps": 40, "validation_interval": 10, **trainer},
    ).replace(trainer=average)


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    keras.utils.clear_session()
    return ReadyTrainer(_build_config(), LinearTask)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory, ready: ReadyTrainer) -> Path:
    """A run of 40 steps, evaluated and saved at each tenth; all checkpoints are there."""
    folder = tmp_path_factory.mktemp("reconciliation") / "run"
    _launch(_build_config(), "train_and_eval", folder, trainer=ready.again(folder))
    return folder


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def _read_weights(folder: Path) -> dict[int, dict[str, bytes]]:
    """Step -> the variables of the weights in `folder`, as bytes, without the counter of saves."""
    weights = {}
    for step, prefix in complete_checkpoints(str(folder)).items():
        reader = tf.train.load_checkpoint(prefix)
        names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
        weights[step] = {
            name: reader.get_tensor(name).tobytes() for name in names if "save_counter" not in name
        }

    return weights


def _launch(config: ExperimentConfig, mode: str, folder: Path, **arguments: Any) -> Any:
    keras.utils.clear_session()  # names of layers count up in a process, and checkpoints hold them
    return launch(config, mode, str(folder), enable_async_checkpointing=False, **arguments)


def test_named_bests_are_kept_beside_the_primary_one(finished_run: Path) -> None:
    records = json_lines(finished_run / "evals/validation.jsonl")
    values = {record["step"]: record["metrics"]["validation_loss"] for record in records}
    top = sorted(values, key=lambda step: values[step])[:2]

    assert list(_read_weights(finished_run / "best_checkpoints/two")) == sorted(top)
    assert read_json(finished_run / "best_checkpoints/two/info.json")["step"] == top[0]
    assert list(_read_weights(finished_run / "best_ckpt")) == top[:1]


def test_lost_weights_are_reported_once_and_the_run_resumes(
    run: Path, ready: ReadyTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    for name in BESTS:
        for step in complete_checkpoints(str(run / name)):
            (run / name / f"ckpt-{step}.data-00000-of-00001").unlink()

    _launch(_build_config(train_steps=50), "train_and_eval", run, trainer=ready.again(run))

    assert caplog.text.count("has lost the weights of step") == len(BESTS)
    assert list(_read_weights(run / "best_ckpt")) == [50]


def test_a_rewound_run_archives_later_best_weights(
    run: Path, ready: ReadyTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    (before,) = _read_weights(run / "best_ckpt")

    config = _build_config(train_steps=30)
    _launch(config, "train_and_eval", run, from_step=20, trainer=ready.again(run))

    assert before == 40
    assert list(_read_weights(run / "best_ckpt")) == [30]
    assert list(complete_checkpoints(str(run / "best_ckpt/archived"))) == [40]
    assert "has lost the weights of step 20" in caplog.text


def test_an_unknown_metric_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    config = linear_experiment(best_checkpoints={"x": {"metric": "acuracy"}})

    with pytest.raises(
        UsageError,
        match=r"trainer\.best_checkpoints\.x\.metric: 'acuracy' .* did you mean accuracy",
    ):
        _launch(config, "train_and_eval", tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_named_best_needs_no_primary_one(tmp_path: Path) -> None:
    config = linear_experiment(best_checkpoints={"x": {"metric": "accuracy"}}, train_steps=10)
    _, logs = _launch(config, "train_and_eval", tmp_path)

    assert (tmp_path / "best_checkpoints/x/info.json").exists()
    assert not (tmp_path / "best_ckpt").exists()
    assert not [name for name in logs if name.startswith("best_")]
