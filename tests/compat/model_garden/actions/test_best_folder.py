"""A folder of best weights for both, with real files."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from official.core import train_utils

from trainer_kit.compat.model_garden.actions import best_folder
from trainer_kit.compat.model_garden.actions.best_folder import GardenBestFolder, nested
from trainer_kit.evals.best.info_json import read_info
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


def test_the_pointer_and_info_json_name_the_best_weights_in_the_form_of_model_garden(tmp_path: Path) -> None:
    folder = GardenBestFolder(str(tmp_path))
    _put(folder, 10)
    info = _put(folder, 20)
    assert _files(tmp_path) == [
        *("best_ckpt-1.data-00000-of-00001", "best_ckpt-1.index", "checkpoint"),
        *("ckpt-20.commit.json", "ckpt-20.data-00000-of-00001", "ckpt-20.index", "info.json"),
    ]
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-20")
    written = json.loads((tmp_path / "info.json").read_text())
    assert written == {**METRICS, "best_ckpt_global_step": 20.0}
    assert read_info(str(tmp_path)) == info
    assert _read(str(tmp_path / "best_ckpt-1")) == 20.0
    assert folder.name(info) is False
    folder.name_none()
    assert [name for name in _files(tmp_path) if name.endswith(".index")] == ["ckpt-20.index"]
    assert not {"info.json", "checkpoint"} & set(_files(tmp_path))


def _refuse(*_: Any) -> None:
    raise OSError(errno.EPERM, "no links here")


@pytest.mark.parametrize("links", [True, False])
def test_the_second_name_is_whole_at_each_moment_and_its_index_comes_last(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GardenBestFolder(str(tmp_path))
    _put(folder, 10)
    seconds = [f"best_ckpt-1{suffix}" for suffix in (".data-00000-of-00001", ".index")]
    renamed: list[str] = []

    def look() -> None:
        """Each file of the second name is as it was before, or as it shall be."""
        for name in seconds:
            now = (tmp_path / name).read_bytes()
            new = (tmp_path / name.replace("best_ckpt-1", "ckpt-20")).read_bytes()
            assert now == (new if name in renamed else begun[name])

    def watched(function: Any) -> Any:
        def call(source: str, target: str) -> Any:
            look()
            done = function(source, target)
            if os.path.basename(target) in seconds:
                renamed.append(os.path.basename(target))
            look()
            return done

        return call

    def cut(source: str, target: str) -> None:
        Path(target).write_bytes(Path(source).read_bytes()[:7])
        raise OSError(errno.ENOSPC, "the disk is full")

    _weights(20).write(folder.prefix(20))
    begun = {name: (tmp_path / name).read_bytes() for name in seconds}
    monkeypatch.setattr(os, "link", _refuse)
    with monkeypatch.context() as full, pytest.raises(OSError, match="the disk is full"):
        full.setattr(shutil, "copyfile", cut)
        best_folder._link(folder.prefix(20), str(tmp_path / "best_ckpt-1"))
    look()
    (tmp_path / f".{seconds[1]}.tmp").write_text("of a run that was killed")
    if links:
        monkeypatch.undo()
    for module, name in ((os, "link"), (os, "replace"), (shutil, "copyfile")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    best_folder._link(folder.prefix(20), str(tmp_path / "best_ckpt-1"))
    assert renamed == seconds
    assert _read(str(tmp_path / "best_ckpt-1")) == 20.0
    assert not [name for name in _files(tmp_path) if name.endswith(".tmp")]
    linked = os.path.samefile(tmp_path / "ckpt-20.index", tmp_path / "best_ckpt-1.index")
    assert linked is links


@pytest.mark.parametrize("links", [True, False])
def test_weights_that_model_garden_has_left_are_taken_over(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", _refuse)
    _theirs(tmp_path, {10: 0.4, 20: 0.5})
    folder = GardenBestFolder(str(tmp_path))
    folder.adopt("val|accuracy")
    info = info_of(20, METRICS, "val|accuracy")
    assert folder.infos("val|accuracy") == {20: info}
    assert json.loads((tmp_path / "info.json").read_text()) == folder.written_form(info)
    assert _read(folder.prefix(20)) == _read(tf.train.latest_checkpoint(str(tmp_path))) == 20.0
    before = _files(tmp_path)
    assert [name for name in before if name.endswith(".index")] == ["best_ckpt-1.index", "ckpt-20.index"]
    folder.adopt("val|accuracy")
    assert _files(tmp_path) == before


def test_weights_of_ours_with_an_info_json_of_a_program_are_taken_over(tmp_path: Path) -> None:
    folder = GardenBestFolder(str(tmp_path))
    _put(folder, 10)
    (tmp_path / "info.json").write_text(json.dumps({"val": {"accuracy": 0.75}, "best_ckpt_global_step": 10.0}))
    folder.adopt("val|accuracy")
    assert folder.infos("val|accuracy")[10]["value"] == 0.75
    assert _read(tf.train.latest_checkpoint(str(tmp_path))) == 10.0


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
