"""A folder of best weights for both, with real files."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from official.core import train_utils

from trainer_kit.compat.model_garden.files.best_folder import GardenBestFolder, in_their_form, nested
from trainer_kit.evals.best.info import read_info
from trainer_kit.evals.best.kept_weights import info_of

METRICS = {"val": {"accuracy": 0.5}, "loss": 1.0}


def _weights(step: int) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(global_step=tf.Variable(step, dtype=tf.int64), value=tf.Variable(float(step)))


def _put(folder: GardenBestFolder, step: int) -> dict[str, Any]:
    """Writes weights and names them, as an exporter does."""
    _weights(step).write(folder.prefix(step))
    info = info_of(step, METRICS, "val|accuracy")
    folder.note(info)
    folder.name(info)
    folder.remove_others([step])
    return info


def _files(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def _theirs(path: Path, values: dict[int, float]) -> None:
    """Exports by Model Garden's own exporter, the metric of each step."""
    exporter = train_utils.BestCheckpointExporter(str(path), "val|accuracy", "higher")
    for step, value in values.items():
        exporter.maybe_export_checkpoint(_weights(step), {"val": {"accuracy": value}, "loss": 1.0}, step)


def _read(prefix: str | None) -> float:
    return float(tf.train.load_checkpoint(prefix).get_tensor("value/.ATTRIBUTES/VARIABLE_VALUE"))


def test_the_weights_have_two_names_for_one_file_and_the_pointer_names_theirs(tmp_path: Path) -> None:
    folder = GardenBestFolder(str(tmp_path))
    info = _put(folder, 10)
    assert _files(tmp_path) == [
        *("best_ckpt-1.data-00000-of-00001", "best_ckpt-1.index", "checkpoint"),
        *("ckpt-10.commit.json", "ckpt-10.data-00000-of-00001", "ckpt-10.index", "info.json"),
    ]
    data = ".data-00000-of-00001"
    assert os.path.samefile(tmp_path / f"ckpt-10{data}", tmp_path / f"best_ckpt-1{data}")
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "best_ckpt-1")
    written = json.loads((tmp_path / "info.json").read_text())
    assert written == {**METRICS, "best_ckpt_global_step": 10.0}
    assert read_info(str(tmp_path)) == info
    assert folder.name(info) is False


def test_of_the_second_names_only_the_pointers_stays(tmp_path: Path) -> None:
    folder = GardenBestFolder(str(tmp_path))
    for step in (10, 20, 30):
        _put(folder, step)
    assert [name for name in _files(tmp_path) if name.endswith(".index")] == ["best_ckpt-3.index", "ckpt-30.index"]
    assert _read(tf.train.latest_checkpoint(str(tmp_path))) == 30.0
    (tmp_path / "best_ckpt-1.txt").touch()  # a stranger's
    folder.name_none()
    assert not {"info.json", "checkpoint", "best_ckpt-3.index"} & set(_files(tmp_path))
    assert "best_ckpt-1.txt" in _files(tmp_path)


def test_a_file_system_without_links_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    _put(GardenBestFolder(str(tmp_path)), 10)
    assert _read(str(tmp_path / "best_ckpt-1")) == _read(str(tmp_path / "ckpt-10")) == 10.0
    assert GardenBestFolder(str(tmp_path)).name(info_of(10, METRICS, "val|accuracy")) is False


def test_what_theirs_has_left_is_taken_over(tmp_path: Path) -> None:
    _theirs(tmp_path, {10: 0.4, 20: 0.5})
    folder = GardenBestFolder(str(tmp_path))
    folder.adopt("val|accuracy")
    info = info_of(20, METRICS, "val|accuracy")
    assert folder.infos("val|accuracy") == {20: info}
    assert json.loads((tmp_path / "info.json").read_text()) == in_their_form(info)
    assert _read(folder.prefix(20)) == _read(tf.train.latest_checkpoint(str(tmp_path))) == 20.0
    before = _files(tmp_path)
    folder.adopt("val|accuracy")
    assert _files(tmp_path) == before


def test_a_worker_knows_what_the_chief_is_about_to_take_over_and_writes_nothing(tmp_path: Path) -> None:
    _theirs(tmp_path, {10: 0.5})
    before = _files(tmp_path)
    folder = GardenBestFolder(str(tmp_path), writes=False)
    folder.adopt("val|accuracy")
    assert folder.infos("val|accuracy") == {10: info_of(10, METRICS, "val|accuracy")}
    assert folder.name(info_of(10, METRICS, "val|accuracy")) is False
    folder.name_none()
    assert _files(tmp_path) == before


@pytest.mark.parametrize("fault", ["nan", "other metric", "ahead", "damaged", "gone"])
def test_what_cannot_be_trusted_is_not_taken_over_and_the_reason_is_told(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    _theirs(tmp_path, {10: float("nan") if fault == "nan" else 0.5})
    metric, told = "val|accuracy", "it is not finite, or missing"
    if fault == "other metric":
        metric = "val|recall"
    if fault == "ahead":  # theirs writes the record before the weights
        info = json.loads((tmp_path / "info.json").read_text())
        (tmp_path / "info.json").write_text(json.dumps({**info, "best_ckpt_global_step": 20.0}))
        told = "best_ckpt-1 holds the weights of step 10"
    if fault == "damaged":
        (tmp_path / "best_ckpt-1.data-00000-of-00001").write_bytes(b"")
        told = "best_ckpt-1 is damaged"
    if fault == "gone":
        (tmp_path / "checkpoint").unlink()
        told = "there are no weights"
    before = _files(tmp_path)
    with caplog.at_level(logging.WARNING):
        GardenBestFolder(str(tmp_path)).adopt(metric)
    assert told in caplog.text
    assert _files(tmp_path) == before


def test_names_that_were_joined_are_nested_again() -> None:
    flat = {"a|b|c": 1.0, "a|d": 2.0, "e": 3.0}
    assert nested(flat) == {"a": {"b": {"c": 1.0}, "d": 2.0}, "e": 3.0}
