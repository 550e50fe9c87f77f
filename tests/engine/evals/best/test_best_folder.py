"""The files of a folder of best weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.commit import read_record
from trainer_kit.evals.best.best_folder import BestFolder
from trainer_kit.evals.best.info_json import info_of


def _info(step: int, value: float = 0.5) -> dict[str, Any]:
    return info_of(step, {"accuracy": value}, "accuracy")


@pytest.fixture
def folder(tmp_path: Path) -> BestFolder:
    """Holds weights of the steps 1, 2 and 3; of 3 nothing is noted, of 2 by another metric."""
    for step in (1, 2, 3):
        tf.train.Checkpoint(value=tf.Variable(step)).write(str(tmp_path / f"ckpt-{step}"))
    made = BestFolder(str(tmp_path))
    made.note(_info(1))
    made.note({**_info(2), "metric": "loss"})
    return made


def test_what_is_noted_of_weights_is_found_again_by_its_metric(folder: BestFolder) -> None:
    assert folder.infos("accuracy") == {1: _info(1)}
    assert list(folder.infos("loss")) == [2]
    assert (read_record(folder.prefix(1)) or {})["info"] == _info(1)


def test_info_json_tells_of_weights_without_a_note(folder: BestFolder) -> None:
    folder.name(_info(3, 0.7))
    assert folder.infos("accuracy") == {1: _info(1), 3: _info(3, 0.7)}


def test_damaged_weights_are_not_whole_whatever_their_record(folder: BestFolder, tmp_path: Path) -> None:
    (tmp_path / "ckpt-1.data-00000-of-00001").write_bytes(b"x")
    assert (folder.steps(), folder.whole_steps(()), folder.infos("accuracy")) == ([1, 2, 3], {2, 3}, {})
    assert folder.whole_steps({1}) == {1, 2, 3}


def test_info_json_is_written_only_when_it_says_something_else(folder: BestFolder, tmp_path: Path) -> None:
    info = info_of(1, {"accuracy": 0.5, "other": float("nan")}, "accuracy")
    folder.name(info)
    before = (tmp_path / "info.json").stat().st_mtime_ns
    folder.name(json.loads(json.dumps(info)))
    assert (tmp_path / "info.json").stat().st_mtime_ns == before


def test_other_weights_are_removed_and_what_is_none_stays(folder: BestFolder, tmp_path: Path) -> None:
    (tmp_path / "ckpt-notes.txt").touch()
    folder.note(_info(3))
    folder.remove_others({2})
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"ckpt-2", "ckpt-notes"}


def test_where_another_process_writes_nothing_is_changed(folder: BestFolder, tmp_path: Path) -> None:
    folder.name(_info(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = BestFolder(str(tmp_path), writes=False)
    other.name(_info(3))
    other.name_none()
    other.note(_info(3))
    other.remove_others({2})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
