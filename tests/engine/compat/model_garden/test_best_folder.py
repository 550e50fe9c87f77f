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

from trainer_kit.compat.model_garden.best_checkpoint import (
    BestCheckpointExporter,
    GardenBestFolder,
    nest_metrics,
)
from trainer_kit.errors import StorageError
from trainer_kit.evals.best.info_json import build_info, read_info
from trainer_kit.telemetry.scalars import flatten_scalars

LINKS = ["best_ckpt-1.data-00000-of-00001", "best_ckpt-1.index"]
OURS = [
    "checkpoint",
    "ckpt-20.commit.json",
    "ckpt-20.data-00000-of-00001",
    "ckpt-20.index",
    "info.json",
]
METRICS = {"val": {"accuracy": 0.5}, "loss": 1.0}


def _weights(step: int) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(
        global_step=tf.Variable(step, dtype=tf.int64), value=tf.Variable(float(step))
    )


def _write_best(folder: GardenBestFolder, step: int) -> dict[str, Any]:
    """Writes weights and names them, as an exporter does."""
    _weights(step).write(folder.prefix(step))
    info = build_info(step, METRICS, "val|accuracy")
    folder.write_info_record(info)
    folder.write_best(info)
    folder.rotate([step])
    return info


def _files(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def _export_by_model_garden(path: Path, values: dict[int, float]) -> None:
    """Exports by Model Garden's own exporter, the metric of each step."""
    exporter = train_utils.BestCheckpointExporter(str(path), "val|accuracy", "higher")
    checkpoint = _weights(0)
    for step, value in values.items():
        checkpoint.global_step.assign(step)
        checkpoint.value.assign(step)
        exporter.maybe_export_checkpoint(
            checkpoint, {"val": {"accuracy": value}, "loss": 1.0}, step
        )


def _read_value(prefix: str | None) -> float:
    return float(tf.train.load_checkpoint(prefix).get_tensor("value/.ATTRIBUTES/VARIABLE_VALUE"))


def test_the_best_weights_are_named_in_model_gardens_form(tmp_path: Path) -> None:
    folder = GardenBestFolder(str(tmp_path))
    _write_best(folder, 10)
    info = _write_best(folder, 20)

    assert _files(tmp_path) == [*LINKS, *OURS]
    assert os.path.samefile(tmp_path / "best_ckpt-1.index", tmp_path / "ckpt-20.index")
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "ckpt-20")

    written = json.loads((tmp_path / "info.json").read_text())
    assert written == {**METRICS, "best_ckpt_global_step": 20.0}
    assert read_info(str(tmp_path)) == info

    folder.write_best(info)
    assert json.loads((tmp_path / "info.json").read_text()) == written

    folder.clear_best()
    assert [name for name in _files(tmp_path) if name.endswith(".index")] == ["ckpt-20.index"]
    assert not {"info.json", "checkpoint"} & set(_files(tmp_path))


def _refuse(*_: Any) -> None:
    raise OSError(errno.EPERM, "no links here")


@pytest.mark.parametrize("point", range(1, 5))  # before each copied file and each link
def test_a_start_that_was_killed_while_it_took_over_is_repeated(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    calls: list[Any] = []

    def fail_at_point(function: Any) -> Any:
        def call(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == point:
                raise Killed
            function(*arguments)

        return call

    _export_by_model_garden(tmp_path, {10: 0.4, 20: 0.5})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "link", fail_at_point(os.link))
        patch.setattr(shutil, "copyfile", fail_at_point(shutil.copyfile))
        BestCheckpointExporter(str(tmp_path), "val|accuracy", "higher")
    assert _read_value(tf.train.latest_checkpoint(str(tmp_path))) == 20.0
    BestCheckpointExporter(str(tmp_path), "val|accuracy", "higher")
    assert set(_files(tmp_path)) >= {*LINKS, *OURS}
    assert _read_value(str(tmp_path / "best_ckpt-1")) == 20.0


def test_links_that_fail_end_no_run_and_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GardenBestFolder(str(tmp_path))
    _weights(20).write(folder.prefix(20))
    monkeypatch.setattr(os, "link", _refuse)
    folder.write_best(build_info(20, METRICS, "val|accuracy"))

    assert tf.train.latest_checkpoint(str(tmp_path)) == folder.prefix(20)
    assert not {*LINKS} & {*_files(tmp_path)}


def test_weights_that_cannot_be_copied_are_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _export_by_model_garden(tmp_path, {10: 0.5})
    monkeypatch.setattr(shutil, "copyfile", _refuse)
    with pytest.raises(StorageError, match=r"ckpt-1 cannot be copied to .*ckpt-10: no links here"):
        GardenBestFolder(str(tmp_path)).import_garden_weights("val|accuracy")


def test_a_worker_foresees_the_takeover_and_writes_nothing(tmp_path: Path) -> None:
    _export_by_model_garden(tmp_path, {10: 0.5})
    before = _files(tmp_path)
    folder = GardenBestFolder(str(tmp_path), is_writer=False)
    folder.import_garden_weights("val|accuracy")

    assert folder.read_infos("val|accuracy") == {10: build_info(10, METRICS, "val|accuracy")}

    folder.write_best(build_info(10, METRICS, "val|accuracy"))
    folder.clear_best()

    assert _files(tmp_path) == before


@pytest.mark.parametrize("fault", ["nan", "other metric", "damaged", "gone"])
def test_untrusted_weights_are_not_taken_over_for_a_reason(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    _export_by_model_garden(tmp_path, {10: float("nan") if fault == "nan" else 0.5})
    metric = "val|recall" if fault == "other metric" else "val|accuracy"
    if fault == "damaged":
        (tmp_path / "best_ckpt-1.data-00000-of-00001").write_bytes(b"")
    if fault == "gone":
        (tmp_path / "checkpoint").unlink()
    before = _files(tmp_path)
    with caplog.at_level(logging.WARNING):
        GardenBestFolder(str(tmp_path)).import_garden_weights(metric)

    assert f"is damaged or has no finite {metric}" in caplog.text
    assert _files(tmp_path) == before


@pytest.mark.parametrize(
    "names", [("a|b|c", "a|d", "e"), ("a", "a|b"), ("a|b", "a"), ("x|a", "x|a|b"), ("x|a|b", "x|a")]
)
def test_joined_names_are_nested_even_if_a_metric_is_a_group(names: tuple[str, ...]) -> None:
    flat = {name: float(number) for number, name in enumerate(names)}
    assert flatten_scalars(nest_metrics(flat), "|") == flat
