"""Which checkpoint is meant, and what a miss tells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.checkpoint_selection import find_newest_checkpoint, select_checkpoint


def _create_folder(path: Path, *steps: int) -> str:
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        tf.train.Checkpoint(value=tf.Variable(step)).write(str(path / f"ckpt-{step}"))

    return str(path)


def test_the_newest_has_the_largest_step_whatever_the_pointer(tmp_path: Path) -> None:
    folder = _create_folder(tmp_path, 100, 20)

    assert find_newest_checkpoint(folder) == f"{folder}/ckpt-100"

    tf.compat.v1.train.update_checkpoint_state(folder, f"{folder}/ckpt-20", [f"{folder}/ckpt-20"])

    assert find_newest_checkpoint(folder) == f"{folder}/ckpt-100"

    (tmp_path / "checkpoint").write_text("")

    assert find_newest_checkpoint(folder) == f"{folder}/ckpt-100"
    assert find_newest_checkpoint(str(tmp_path / "missing")) is None


def test_checkpoints_with_other_names_are_found_by_the_pointer(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(value=tf.Variable(1)).write(str(tmp_path / "model.ckpt-9"))

    assert find_newest_checkpoint(str(tmp_path)) is None

    tf.compat.v1.train.update_checkpoint_state(str(tmp_path), path, [path])

    assert find_newest_checkpoint(str(tmp_path)) == path

    (tmp_path / "checkpoint").write_text("")

    assert find_newest_checkpoint(str(tmp_path)) is None


def test_a_damaged_newest_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _create_folder(tmp_path, 100, 20)
    (tmp_path / "ckpt-100.index").write_bytes(b"broken")

    before = sorted(path.name for path in tmp_path.iterdir())

    assert find_newest_checkpoint(folder) == f"{folder}/ckpt-20"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "ckpt-100 is damaged: it cannot be read" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("pointer", ["", 'model_checkpoint_path: "ckpt-100"\n'])
def test_with_only_damaged_checkpoints_latest_is_a_storage_error(
    tmp_path: Path, pointer: str
) -> None:
    folder = _create_folder(tmp_path, 100, 20)
    (tmp_path / "checkpoint").write_text(pointer)
    for step in (20, 100):
        (tmp_path / f"ckpt-{step}.index").write_bytes(b"broken")

    with pytest.raises(StorageError, match=f"no checkpoint in {folder} is whole"):
        select_checkpoint(folder, "latest", "")


def test_a_path_in_another_folder_can_be_selected(tmp_path: Path) -> None:
    path = f"{_create_folder(tmp_path / 'other', 5)}/ckpt-5"
    assert select_checkpoint(str(tmp_path / "run"), path, "") == path


@pytest.mark.parametrize("which", ["7", "best", "{}/ckpt-7", "lates"])
def test_a_miss_names_the_request_and_lists_existing_steps(tmp_path: Path, which: str) -> None:
    folder = _create_folder(tmp_path, 100, 20)
    which = which.format(tmp_path)

    with pytest.raises(UsageError, match=r"there are the steps 20, 100$") as error:
        select_checkpoint(folder, which, str(tmp_path / "best_ckpt"))

    assert re.search(rf"no (checkpoint (of step|at) |){re.escape(which)}", str(error.value))


def test_a_path_that_is_missing_says_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give latest, best, a step or a path without \.index"):
        select_checkpoint(_create_folder(tmp_path, 1), f"{tmp_path}/ckpt-1.index", "")


@pytest.mark.parametrize("which", ["latest", "7", "best", "elsewhere"])
def test_an_empty_folder_is_named(tmp_path: Path, which: str) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} holds no checkpoint"):
        select_checkpoint(str(tmp_path), which, str(tmp_path / "best_ckpt"))


def test_the_initial_weights_need_no_checkpoint(tmp_path: Path) -> None:
    assert select_checkpoint(str(tmp_path), "initial", "") == ""
