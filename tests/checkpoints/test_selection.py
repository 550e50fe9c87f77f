"""Which checkpoint is meant, and what a miss tells."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.selection import (
    complete_checkpoints,
    newest_checkpoint,
    select_checkpoint,
)
from trainer_kit.errors import UsageError


def _folder(path: Path, *steps: int) -> str:
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        tf.train.Checkpoint(value=tf.Variable(step)).write(str(path / f"ckpt-{step}"))
    return str(path)


def test_only_checkpoints_with_an_index_count_in_the_order_of_steps(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 100, 20, 3)
    for name in ("ckpt-7.data-00000-of-00001", "ckpt-8.index.tmp", "other-9.index", "ckpt-x.index"):
        (tmp_path / name).write_text("")
    assert complete_checkpoints(folder) == {step: f"{folder}/ckpt-{step}" for step in (3, 20, 100)}
    assert list(complete_checkpoints(folder)) == [3, 20, 100]
    assert complete_checkpoints(str(tmp_path / "missing")) == {}


def test_without_a_pointer_file_the_newest_is_the_one_with_the_largest_step(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 100, 20)
    assert newest_checkpoint(folder) == f"{folder}/ckpt-100"
    tf.compat.v1.train.update_checkpoint_state(folder, f"{folder}/ckpt-20", [f"{folder}/ckpt-20"])
    assert newest_checkpoint(folder) == f"{folder}/ckpt-20"
    assert newest_checkpoint(str(tmp_path / "missing")) is None


def test_a_path_in_another_folder_can_be_selected(tmp_path: Path) -> None:
    path = f"{_folder(tmp_path / 'other', 5)}/ckpt-5"
    assert select_checkpoint(str(tmp_path / "run"), path, "") == path


@pytest.mark.parametrize("which", ["7", "best", "{}/ckpt-7", "lates"])
def test_a_miss_names_what_was_asked_for_and_lists_the_steps_there_are(tmp_path: Path, which: str) -> None:
    folder, which = _folder(tmp_path, 100, 20), which.format(tmp_path)
    with pytest.raises(UsageError, match=r"there are the steps 20, 100$") as error:
        select_checkpoint(folder, which, str(tmp_path / "best_ckpt"))
    assert re.search(rf"no (checkpoint (of step|at) |){re.escape(which)}", str(error.value))


def test_a_path_that_is_missing_says_what_may_be_given(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"give latest, best, a step or a path without \.index"):
        select_checkpoint(_folder(tmp_path, 1), f"{tmp_path}/ckpt-1.index", "")


@pytest.mark.parametrize("which", ["latest", "7", "best", "elsewhere"])
def test_an_empty_folder_is_named(tmp_path: Path, which: str) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path} holds no checkpoint"):
        select_checkpoint(str(tmp_path), which, str(tmp_path / "best_ckpt"))
