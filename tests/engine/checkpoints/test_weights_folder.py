"""Checkpoints of weights alone: which are kept, and what a death at any moment leaves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit import files
from trainer_kit.callbacks.ema_checkpoints import EMACheckpoints
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import describe_damage
from trainer_kit.checkpoints.weights_folder import WeightsFolder
from trainer_kit.errors import StorageError

_WRITES = ("checkpoint.begin", "checkpoint.written", "checkpoint.record", "checkpoint.move")


class _Killed(BaseException):
    """Ends a write as a kill does: nothing handles it."""


def _write(path: Path, step: int, *keep: int) -> None:
    weights = tf.train.Checkpoint(weight=tf.Variable(float(step)))
    WeightsFolder(str(path)).write(step, weights.write, keep or [step - 10, step])


def _read_value(folder: Path) -> float:
    """Reads what TensorFlow's pointer file names."""
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
    return float(reader.get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE"))


def test_the_newest_averages_are_kept_and_later_ones_removed(tmp_path: Path) -> None:
    def write_weights(path: str, name: str) -> None:
        tf.train.Checkpoint(weight=tf.Variable(float(run.step))).write(path)

    trainer = SimpleNamespace(
        average_names=["average"], can_train=True, write_weights=write_weights
    )
    run: Any = SimpleNamespace(trainer=trainer, directory=str(tmp_path), is_chief=True, step=0)
    averages = EMACheckpoints(max_to_keep=2)
    averages.run_begin(run)
    kept = []

    for run.step in (10, 20, 30, 25):
        averages.evaluation_end(run, {})
        kept.append(list(complete_checkpoints(str(tmp_path / "ema_checkpoints"))))

    assert kept == [[10], [10, 20], [20, 30], [20, 25]]
    assert _read_value(tmp_path / "ema_checkpoints") == 25.0


@pytest.mark.parametrize(
    ("point", "step"),
    [
        *((point, step) for point in _WRITES for step in (20, 30)),
        ("checkpoint.pointer_file", 30),
        ("checkpoint.remove", 30),
    ],
)
def test_a_write_that_is_killed_leaves_whole_weights(
    point: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 10, 10)
    _write(tmp_path, 20)

    def stop_at_point(name: str, path: str) -> None:
        if name.startswith(point):
            raise _Killed

    monkeypatch.setattr(files, "on_write_point", stop_at_point)

    with pytest.raises(_Killed):
        _write(tmp_path, step)

    monkeypatch.undo()
    WeightsFolder(str(tmp_path))
    left = complete_checkpoints(str(tmp_path))

    assert 10 in left or 30 in left
    assert not any(describe_damage(prefix) for prefix in left.values())
    assert len(list(tmp_path.glob("*_temp"))) == len(list(tmp_path.glob(".*"))) == 0

    _write(tmp_path, 30)

    assert list(complete_checkpoints(str(tmp_path)))[-1] == 30
    assert _read_value(tmp_path) == 30.0


def test_a_full_disk_is_a_storage_error_and_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path, 10, 10)

    def stop_at_point(name: str, path: str) -> None:
        if name == "checkpoint.written":
            raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(files, "on_write_point", stop_at_point)

    with pytest.raises(StorageError, match=r"ckpt-20 was not written: No space left"):
        _write(tmp_path, 20)

    assert list(complete_checkpoints(str(tmp_path))) == [10]
    assert not list(tmp_path.glob(".*"))


def test_a_worker_that_is_not_the_chief_leaves_no_files(tmp_path: Path) -> None:
    saved: list[str] = []

    WeightsFolder(str(tmp_path / "ema"), is_writer=False).write(10, saved.append, [10])

    assert len(saved) == 1
    assert not (tmp_path / "ema").exists()
    assert not Path(saved[0]).parent.exists()
