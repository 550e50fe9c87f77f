"""What an evaluation leaves, and removing checkpoints, beside Model Garden's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from official.core import train_utils

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.compat.model_garden.files.results import (
    read_global_step_from_checkpoint,
    remove_ckpts,
    write_json_summary,
    write_summary,
)
from trainer_kit.errors import StorageError, UsageError


def _metrics() -> dict[str, Any]:
    """Made when a test runs: what is imported must not use TensorFlow, or the CPU cannot be split any more."""
    return {"accuracy": tf.constant(0.25), "loss": np.float32(1.5), "steps": 3, "name": "x", "top": tf.constant([1, 2])}


def _files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def _saved(folder: Path, steps: list[int], own: bool) -> None:
    """Saves checkpoints by our manager or by TensorFlow's, which is theirs."""
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(global_step=step, weights=tf.Variable([1.0, 2.0]))
    if own:
        manager = CheckpointManager(checkpoint, str(folder), max_to_keep=5, step_counter=step, checkpoint_interval=1)
    else:
        manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=5, step_counter=step)
    for number in steps:
        step.assign(number)
        manager.save(checkpoint_number=number)
    manager.sync()


def _scalars(folder: Path) -> dict[str, tuple[int, float]]:
    found = {}
    for path in folder.glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            found.update({one.tag: (event.step, float(tf.make_ndarray(one.tensor))) for one in event.summary.value})
    return found


def test_metrics_are_written_as_the_same_json(tmp_path: Path) -> None:
    for name, write in (("ours", write_json_summary), ("theirs", train_utils.write_json_summary)):
        (tmp_path / name).mkdir()
        write(str(tmp_path / name), 70, _metrics())
    assert _files(tmp_path / "ours") == _files(tmp_path / "theirs") == ["metrics-70.json"]
    assert len({(tmp_path / name / "metrics-70.json").read_bytes() for name in ("ours", "theirs")}) == 1


def test_the_folder_of_the_json_is_made_and_a_step_may_be_a_variable(tmp_path: Path) -> None:
    write_json_summary(str(tmp_path / "new"), tf.Variable(7), {"loss": 1})
    assert _files(tmp_path / "new") == ["metrics-7.json"]
    with pytest.raises(StorageError, match="cannot be written"):
        write_json_summary(str(tmp_path / "new" / "metrics-7.json"), 7, {"loss": 1})


def test_summaries_are_the_same_numbers(tmp_path: Path) -> None:
    metrics = {"accuracy": tf.constant(0.25), "loss": np.float32(1.5), "steps": 3}
    for name, write in (("ours", write_summary), ("theirs", train_utils.write_summary)):
        write(tf.summary.create_file_writer(str(tmp_path / name)), 70, metrics)
    assert _scalars(tmp_path / "ours") == _scalars(tmp_path / "theirs")
    assert _scalars(tmp_path / "ours")["loss"] == (70, 1.5)


@pytest.mark.parametrize("value", [{"top": 1.0}, lambda: tf.constant([1.0, 2.0]), "high", None])
def test_what_is_no_number_is_an_error_with_its_name_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    value = value() if callable(value) else value  # no tensor while tests are collected
    with pytest.raises(UsageError, match=r"'image' is .*, not a single number"):
        write_summary(tf.summary.create_file_writer(str(tmp_path)), 1, {"loss": 1.0, "image": value})
    assert _scalars(tmp_path) == {}


@pytest.mark.parametrize("own", [True, False])
def test_the_global_step_is_read_from_checkpoints_of_both(tmp_path: Path, own: bool) -> None:
    _saved(tmp_path, [10, 20], own)
    for path in (str(tmp_path / "ckpt-10"), str(tmp_path / "ckpt-20")):
        assert read_global_step_from_checkpoint(path) == train_utils.read_global_step_from_checkpoint(path)
    assert read_global_step_from_checkpoint(str(tmp_path)) == 20


def test_a_checkpoint_without_a_step_is_a_value_error_as_theirs(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(weights=tf.Variable(1.0), global_stepp=tf.Variable(3)).write(str(tmp_path / "w"))
    with pytest.raises(ValueError):
        train_utils.read_global_step_from_checkpoint(path)
    with pytest.raises(UsageError, match=r"holds no global_step; did you mean global_stepp\?"):
        read_global_step_from_checkpoint(path)


def test_a_checkpoint_that_is_not_there_is_not_found_as_theirs(tmp_path: Path) -> None:
    for read in (read_global_step_from_checkpoint, train_utils.read_global_step_from_checkpoint):
        with pytest.raises(tf.errors.NotFoundError):
            read(str(tmp_path / "ckpt-3"))


@pytest.mark.parametrize("own", [True, False])
def test_all_that_a_manager_has_written_is_removed(tmp_path: Path, own: bool) -> None:
    _saved(tmp_path, [10, 20], own)
    (tmp_path / "ckpt-30_temp").mkdir()
    (tmp_path / "ckpt-30_temp" / "part-00000.data").touch()
    (tmp_path / "ckpt-20.iterator.index").touch()
    remove_ckpts(str(tmp_path))
    assert _files(tmp_path) == []


STRANGERS = ["ckpt-10.txt", "ckpt-best.index", "ckpt-notes", "my-ckpt-10.index", "checkpoint.bak", "ckpt-10.pin"]


def test_files_of_others_stay_where_theirs_removes_them(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        _saved(tmp_path / name, [10], own=True)
        for stranger in STRANGERS:
            (tmp_path / name / stranger).write_text("precious")
        (tmp_path / name / "best_ckpt").mkdir()
    remove_ckpts(str(tmp_path / "ours"))
    train_utils.remove_ckpts(str(tmp_path / "theirs"))
    assert _files(tmp_path / "ours") == sorted([*STRANGERS, "best_ckpt"])
    assert "ckpt-10.txt" not in _files(tmp_path / "theirs")


def test_a_folder_that_is_missing_holds_nothing_to_remove(tmp_path: Path) -> None:
    remove_ckpts(str(tmp_path / "nothing"))
    assert complete_checkpoints(str(tmp_path / "nothing")) == {}
