"""The pointer file, as TensorFlow reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.pointer_file import read_checkpoint_names, write_pointer


@pytest.fixture
def saved_paths(tmp_path: Path) -> list[str]:
    """Prefixes of three checkpoints, by their index files."""
    prefixes = [str(tmp_path / f"ckpt-{step}") for step in (1, 2, 10)]
    for prefix in prefixes:
        Path(f"{prefix}.index").touch()
    return prefixes


def test_tensorflow_reads_the_listed_checkpoints_and_the_newest(
    tmp_path: Path, saved_paths: list[str]
) -> None:
    write_pointer(str(tmp_path), saved_paths)
    state = tf.train.get_checkpoint_state(str(tmp_path))

    assert state.model_checkpoint_path == saved_paths[-1]
    assert list(state.all_model_checkpoint_paths) == saved_paths
    assert read_checkpoint_names(str(tmp_path)) == ["ckpt-10", "ckpt-1", "ckpt-2", "ckpt-10"]
    # A folder that is moved stays readable.
    assert str(tmp_path) not in (tmp_path / "checkpoint").read_text()


def test_times_are_those_that_tensorflow_would_have_written(
    tmp_path: Path, saved_paths: list[str]
) -> None:
    write_pointer(str(tmp_path), saved_paths)
    state = tf.train.get_checkpoint_state(str(tmp_path))

    assert all(
        0 < time - state.last_preserved_timestamp < 60
        for time in state.all_model_checkpoint_timestamps
    )


def test_a_pointer_file_is_written_only_if_it_changes(
    tmp_path: Path, saved_paths: list[str]
) -> None:
    write_pointer(str(tmp_path), saved_paths)
    path = tmp_path / "checkpoint"
    before = path.stat().st_ino

    write_pointer(str(tmp_path), saved_paths)

    assert path.stat().st_ino == before

    path.write_text(path.read_text()[:-1])  # torn
    write_pointer(str(tmp_path), saved_paths)

    assert path.stat().st_ino != before or path.read_text().endswith("\n")


def test_a_folder_without_checkpoints_has_no_pointer_file(
    tmp_path: Path, saved_paths: list[str]
) -> None:
    write_pointer(str(tmp_path), [])
    write_pointer(str(tmp_path), saved_paths)
    write_pointer(str(tmp_path), [])

    assert not (tmp_path / "checkpoint").exists()
