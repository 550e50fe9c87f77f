"""The pointer file, as TensorFlow reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.pointer_file import PointerFile


@pytest.fixture
def saved(tmp_path: Path) -> list[str]:
    """Prefixes of three checkpoints, by their index files."""
    prefixes = [str(tmp_path / f"ckpt-{step}") for step in (1, 2, 10)]
    for prefix in prefixes:
        Path(f"{prefix}.index").touch()
    return prefixes


def _read(folder: Path) -> tuple[str, list[str]]:
    state = tf.train.get_checkpoint_state(str(folder))
    return state.model_checkpoint_path, list(state.all_model_checkpoint_paths)


def test_an_added_or_overwritten_checkpoint_becomes_the_newest(tmp_path: Path, saved: list[str]) -> None:
    pointer = PointerFile(str(tmp_path))
    for prefix in (*saved[:2], saved[0]):
        pointer.add(prefix)
    assert pointer.newest == saved[0] and pointer.listed == [saved[1], saved[0]]
    assert _read(tmp_path) == (saved[0], [saved[1], saved[0]])
    assert str(tmp_path) not in (tmp_path / "checkpoint").read_text()  # a folder that is moved stays readable


def test_times_are_those_that_tensorflow_would_have_written(tmp_path: Path, saved: list[str]) -> None:
    pointer = PointerFile(str(tmp_path))
    pointer.add(saved[0])
    state = tf.train.get_checkpoint_state(str(tmp_path))
    (time,) = state.all_model_checkpoint_timestamps
    assert 0 < time - state.last_preserved_timestamp < 60


def test_a_followed_folder_is_written_with_the_next_change(tmp_path: Path, saved: list[str]) -> None:
    pointer = PointerFile(str(tmp_path))
    pointer.follow(saved, list_them=True)
    assert pointer.newest == saved[-1] and not (tmp_path / "checkpoint").exists()
    pointer.drop([saved[0], str(tmp_path / "ckpt-5")])
    assert _read(tmp_path) == (saved[-1], saved[1:])
    pointer.follow(saved, list_them=False)
    assert pointer.newest == saved[-1] and pointer.listed == []
    pointer.follow([], list_them=True)
    assert pointer.newest is None


def test_dropping_unlisted_or_all_checkpoints_writes_nothing(tmp_path: Path, saved: list[str]) -> None:
    pointer = PointerFile(str(tmp_path))
    pointer.drop(saved)
    pointer.follow(saved[:1], list_them=True)
    pointer.drop(saved)
    assert not (tmp_path / "checkpoint").exists()
