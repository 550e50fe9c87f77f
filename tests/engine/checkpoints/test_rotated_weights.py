"""Checkpoints of weights alone: which are kept, and what is left when the process dies at any moment of a write."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import problem
from trainer_kit.checkpoints.rotated_weights import RotatedWeights
from trainer_kit.errors import StorageError

_WRITES = ("checkpoint.begin", "checkpoint.written", "checkpoint.record", "checkpoint.move")


class _Killed(BaseException):
    """Ends a write as a kill does: nothing handles it."""


def _write(folder: Path, step: int, most: int = 2) -> None:
    weights = tf.train.Checkpoint(weight=tf.Variable(float(step)))
    RotatedWeights(str(folder), most).write(step, weights.write)


def _value(folder: Path) -> float:
    """Reads what TensorFlow's pointer file names."""
    reader = tf.train.load_checkpoint(tf.train.latest_checkpoint(str(folder)))
    return float(reader.get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE"))


def test_the_newest_are_kept_and_those_of_later_steps_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        _write(tmp_path, step)
    assert list(complete_checkpoints(str(tmp_path))) == [20, 30]
    _write(tmp_path, 25)
    assert list(complete_checkpoints(str(tmp_path))) == [20, 25] and _value(tmp_path) == 25.0


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
    for earlier in (10, 20):
        _write(tmp_path, earlier)

    def reached(name: str, path: str) -> None:
        if name.startswith(point):
            raise _Killed

    monkeypatch.setattr(files, "on_write_point", reached)
    with pytest.raises(_Killed):
        _write(tmp_path, step)
    monkeypatch.undo()
    RotatedWeights(str(tmp_path), 2).remove_debris()
    left = complete_checkpoints(str(tmp_path))
    assert 10 in left or 30 in left
    assert not any(problem(prefix) for prefix in left.values())
    assert len(list(tmp_path.glob("*_temp"))) == len(list(tmp_path.glob(".*"))) == 0
    _write(tmp_path, 30)
    assert list(complete_checkpoints(str(tmp_path)))[-1] == 30 and _value(tmp_path) == 30.0


def test_a_full_disk_is_a_storage_error_and_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, 10)

    def reached(name: str, path: str) -> None:
        if name == "checkpoint.written":
            raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(files, "on_write_point", reached)
    with pytest.raises(StorageError, match=r"ckpt-20 was not written: No space left"):
        _write(tmp_path, 20)
    assert list(complete_checkpoints(str(tmp_path))) == [10] and not list(tmp_path.glob(".*"))


def test_a_worker_that_is_not_the_chief_leaves_no_files(tmp_path: Path) -> None:
    saved: list[str] = []
    RotatedWeights(str(tmp_path / "ema"), 1, keeps=False).write(10, saved.append)
    assert len(saved) == 1 and not (tmp_path / "ema").exists() and not Path(saved[0]).parent.exists()
