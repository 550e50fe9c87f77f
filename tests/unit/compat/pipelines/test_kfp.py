"""KFPVisualization: the files that Kubeflow Pipelines reads, after the calls of a component."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_kit.compat.pipelines.kfp import KFPVisualization
from trainer_kit.errors import UsageError


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KFPVisualization:
    """The files go to the folder of the test."""
    monkeypatch.setenv("KFP_OUTPUT_FOLDER", str(tmp_path))
    return KFPVisualization("pose", "bucket", "job-1")


def _read_metrics(folder: Path) -> Any:
    return json.loads((folder / "mlpipeline-metrics.json").read_text())


def _read_outputs(folder: Path) -> Any:
    return json.loads((folder / "mlpipeline-ui-metadata.json").read_text())


def test_the_calls_of_a_component_give_both_files(shown: KFPVisualization, tmp_path: Path) -> None:
    shown.produce_ui_metadata_table(
        source="gs://bucket/artifacts/results.csv", header=["roll", "mae"]
    )
    shown.write_ui_metadata()
    shown.produce_metrics(name="mae", value=round(np.mean(np.float32([0.25, 0.5])), 3), f="RAW")
    shown.produce_metrics("accuracy-score", 0.975)
    shown.write_metrics()

    assert _read_metrics(tmp_path) == {
        "metrics": [
            {"name": "mae", "numberValue": 0.375, "format": "RAW"},
            {"name": "accuracy-score", "numberValue": 0.975, "format": "PERCENTAGE"},
        ]
    }

    table = {"type": "table", "storage": "gcs", "format": "csv", "header": ["roll", "mae"]}
    assert _read_outputs(tmp_path) == {
        "outputs": [{**table, "source": "gs://bucket/artifacts/results.csv"}]
    }


def test_nothing_added_gives_empty_lists(shown: KFPVisualization, tmp_path: Path) -> None:
    shown.write_metrics()
    shown.write_ui_metadata()

    assert _read_metrics(tmp_path) == {"metrics": []}
    assert _read_outputs(tmp_path) == {"outputs": []}


def test_a_run_may_say_where_the_files_go(shown: KFPVisualization, tmp_path: Path) -> None:
    shown.produce_metrics("loss", 1, "raw")
    shown.write_metrics(tmp_path / "outputs" / "metrics" / "data")
    shown.write_ui_metadata(str(tmp_path / "outputs" / "ui"))
    written = json.loads((tmp_path / "outputs" / "metrics" / "data").read_text())

    assert written == {"metrics": [{"name": "loss", "numberValue": 1.0, "format": "RAW"}]}
    assert not (tmp_path / "mlpipeline-metrics.json").exists()

    with pytest.raises(UsageError, match="remote file"):
        shown.write_metrics("gs://bucket/metrics.json")


def test_without_a_word_the_files_are_at_the_root(
    monkeypatch: pytest.MonkeyPatch, shown: KFPVisualization
) -> None:
    written = []
    monkeypatch.delenv("KFP_OUTPUT_FOLDER")
    monkeypatch.setattr("trainer_kit.files.write_json", lambda path, content: written.append(path))

    shown.write_metrics()
    shown.write_ui_metadata()

    assert written == ["/mlpipeline-metrics.json", "/mlpipeline-ui-metadata.json"]


def test_a_metric_that_is_not_finite_spoils_no_file(
    shown: KFPVisualization, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown.produce_metrics("loss", float("nan"), "RAW")
    shown.produce_metrics("accuracy", np.float32(0.5))
    shown.produce_metrics("accuracy", np.array(0.75))
    shown.write_metrics()

    assert [
        (metric["name"], metric["numberValue"]) for metric in _read_metrics(tmp_path)["metrics"]
    ] == [("accuracy", 0.75)]
    assert "loss is nan and is left out" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mae", "0.5"), "not a single number"),
        (("mae", np.ones(2)), "not a single number"),
        (("mae", 0.5, "PERCENT"), "did you mean PERCENTAGE"),
    ],
)
def test_mistakes_in_a_metric_are_told(
    shown: KFPVisualization, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        shown.produce_metrics(*arguments)


def test_a_local_table_is_taken_into_the_file(
    shown: KFPVisualization, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "results.csv").write_text("1,2\n")
    shown.produce_ui_metadata_table(tmp_path / "results.csv", np.array(["a", "b"]))
    shown.produce_ui_metadata_table("3,4\n", ["a", "b"], storage="inline")
    shown.produce_ui_metadata_table("minio://bucket/results.csv", ["a", "b"], "minio")
    shown.write_ui_metadata()
    tables = [
        (table["storage"], table["source"], table["header"])
        for table in _read_outputs(tmp_path)["outputs"]
    ]
    columns = ["a", "b"]

    assert tables == [
        ("inline", "1,2\n", columns),
        ("inline", "3,4\n", columns),
        ("minio", "minio://bucket/results.csv", columns),
    ]
    assert caplog.text == ""

    shown.produce_ui_metadata_table("missing.csv", ["a"])

    assert shown.metadata_outputs[-1]["source"] == "missing.csv"
    assert "No such file" in caplog.text

    with pytest.raises(UsageError, match="header"):
        shown.produce_ui_metadata_table("gs://bucket/a.csv", "a,b")


def test_a_local_folder_may_stand_for_the_bucket(tmp_path: Path) -> None:
    assert KFPVisualization("pose", "bucket", "7").job_dir == "gs://bucket/tmp/pose/7"
    assert KFPVisualization("pose", str(tmp_path), "7").job_dir == f"{tmp_path}/tmp/pose/7"
