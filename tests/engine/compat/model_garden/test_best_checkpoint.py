"""The best checkpoint by Model Garden's names: beside theirs, read by theirs, in a run of ours."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from official.core import train_utils

from tests.builders import json_lines, read_json
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit import files
from trainer_kit.compat.model_garden.best_checkpoint import (
    BestCheckpointExporter,
    maybe_create_best_ckpt_exporter,
)
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.run.runner import run_experiment
from trainer_kit.training.trainer_creation import create_trainer

NAN = math.nan
METRIC = "val|accuracy"


class _Run:
    """Evaluations that give values in turn, told to an exporter of theirs or ours."""

    def __init__(self, folder: Path, theirs: bool = False, comp: str = "higher") -> None:
        kind = train_utils.BestCheckpointExporter if theirs else BestCheckpointExporter
        self.folder = folder
        self.exporter = kind(str(folder), METRIC, comp)
        self.step = tf.Variable(0, dtype=tf.int64)
        self.value = tf.Variable(0.0)
        self.checkpoint = tf.train.Checkpoint(global_step=self.step, value=self.value)

    def evaluate(self, step: int, value: Any, **options: Any) -> bool:
        self.step.assign(step)
        self.value.assign(float(step))
        logs = {
            "val": {"accuracy": value, "image": tf.zeros([2, 2, 1])},
            "loss": tf.constant(1.5),
            "note": "x",
        }
        if isinstance(self.exporter, train_utils.BestCheckpointExporter):
            del logs["note"]  # which ends theirs with an error
        return bool(self.exporter.maybe_export_checkpoint(self.checkpoint, logs, step, **options))

    @property
    def best(self) -> tuple[int, float, float]:
        """The step of the best weights, and their step and metric in info.json."""
        info = read_json(self.folder / "info.json")
        return (
            _restore_step(self.exporter.best_ckpt_path),
            info["best_ckpt_global_step"],
            info["val"]["accuracy"],
        )


def _restore_step(path: str | None) -> int:
    step = tf.Variable(0, dtype=tf.int64)
    value = tf.Variable(0.0)
    tf.train.Checkpoint(global_step=step, value=value).restore(path).assert_consumed()
    assert int(step) == int(value)
    return int(step)


@pytest.mark.parametrize("comp", ["higher", "lower"])
@pytest.mark.parametrize(
    "values",
    [
        [0.5, 0.7, 0.6, 0.8],
        [0.5, 0.5, 0.4],
        [lambda: tf.constant(0.5), np.float32(0.25), 0.75],
        [0.5, NAN, 0.6],
        [0.3, 0.2, 0.1],
    ],
)
def test_the_exporter_decides_and_records_as_theirs(
    tmp_path: Path, comp: str, values: list[Any]
) -> None:
    ours = _Run(tmp_path / "ours", comp=comp)
    theirs = _Run(tmp_path / "theirs", theirs=True, comp=comp)
    assert ours.exporter.best_ckpt_logs is theirs.exporter.best_ckpt_logs is None
    assert ours.exporter.best_ckpt_path is theirs.exporter.best_ckpt_path is None

    for step, value in enumerate(values, 1):
        if callable(value):  # no tensor exists while tests are collected
            value = value()
        assert ours.evaluate(step, value) == theirs.evaluate(step, value)
        assert ours.best == theirs.best
        assert ours.exporter.best_ckpt_logs["val"]["accuracy"] == float(
            theirs.exporter.best_ckpt_logs["val"]["accuracy"]
        )

    assert Path(ours.exporter.best_ckpt_logs_path).name == "info.json"
    assert Path(theirs.exporter.best_ckpt_logs_path).name == "info.json"
    our_info = read_json(tmp_path / "ours" / "info.json")
    assert our_info == read_json(tmp_path / "theirs" / "info.json")


def test_each_framework_resumes_from_the_others_best(tmp_path: Path) -> None:
    assert _Run(tmp_path).evaluate(10, 0.5)
    for step, value, kind, better in [
        (20, 0.4, True, False),
        (30, 0.6, True, True),
        (40, 0.55, False, False),
        (50, 0.7, False, True),
        (60, 0.65, True, False),
        (70, 0.6, False, False),
    ]:
        run = _Run(tmp_path, theirs=kind)
        assert run.evaluate(step, value) == better
        bests = [(0.5, 10), (0.6, 30), (0.7, 50)]
        best_value, best_step = max(best for best in bests if best[1] <= step)
        assert run.best == (best_step, float(best_step), best_value)

    names = {path.name for path in tmp_path.glob("*.index")}
    assert names == {"ckpt-50.index", "best_ckpt-1.index"}


@pytest.mark.parametrize("values", [[NAN, 0.5, 0.4], [math.inf, 0.5, NAN], [NAN, -math.inf, 0.5]])
def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path, values: list[float]) -> None:
    run = _Run(tmp_path)
    for step, value in enumerate(values, 1):
        assert run.evaluate(step, value) == (value == 0.5)
    assert run.best == (values.index(0.5) + 1, values.index(0.5) + 1, 0.5)


def test_the_logs_before_the_first_best_are_the_last_refused(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    run.evaluate(1, NAN)

    # Model Garden's Trainer asks for these logs.
    assert math.isnan(run.exporter.best_ckpt_logs["val"]["accuracy"])
    assert run.exporter.best is None
    assert not (tmp_path / "info.json").exists()


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"step": 3}'])
def test_a_damaged_info_json_stops_no_start(tmp_path: Path, damage: str, theirs: bool) -> None:
    _Run(tmp_path, theirs=theirs).evaluate(10, 0.5)
    whole = (tmp_path / "info.json").read_bytes()
    (tmp_path / "info.json").write_text(damage)
    run = _Run(tmp_path)

    assert ((tmp_path / "info.json").read_bytes() == whole) != theirs  # ours is made again
    assert run.evaluate(20, 0.4) == theirs
    assert run.best == ((20, 20.0, 0.4) if theirs else (10, 10.0, 0.5))


@pytest.mark.parametrize(
    "point",
    [
        "best.weights",
        "best.record.rename",
        "best.pointer.rename",
        "best.info.open",
        "best.info.rename",
        "checkpoint.remove",
    ],
)
def test_a_kill_at_any_point_leaves_a_consistent_record(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(reached: str, path: str) -> None:
        if reached == point:
            raise Killed

    run = _Run(tmp_path)
    run.evaluate(10, 0.5)
    monkeypatch.setattr(files, "on_write_point", die)
    with pytest.raises(Killed):
        run.evaluate(20, 0.6)
    monkeypatch.undo()

    info = read_info(str(tmp_path))
    assert info is not None
    assert _read_step(tmp_path / info["checkpoint"]) == info["step"]

    again = _Run(tmp_path)
    best = again.best
    assert best in [(10, 10.0, 0.5), (20, 20.0, 0.6)]
    assert again.evaluate(20, 0.6) == (best[0] == 10)
    assert again.best == (20, 20.0, 0.6)
    assert again.evaluate(30, 0.7)
    assert [path.name for path in tmp_path.glob("ckpt-*.index")] == ["ckpt-30.index"]


def _read_step(prefix: Path) -> int:
    return int(
        tf.train.load_checkpoint(str(prefix)).get_tensor("global_step/.ATTRIBUTES/VARIABLE_VALUE")
    )


def test_a_metric_that_is_missing_is_a_value_error_at_once(tmp_path: Path) -> None:
    exporter = BestCheckpointExporter(str(tmp_path), "acuracy", "higher")
    with pytest.raises(ValueError, match=r"did you mean accuracy\?"):
        exporter.maybe_export_checkpoint(tf.train.Checkpoint(), {"accuracy": 0.5}, 1)


@pytest.mark.parametrize("comp", ["more", "Higher", None])
def test_another_comparison_is_a_value_error_as_theirs(tmp_path: Path, comp: Any) -> None:
    for kind in (BestCheckpointExporter, train_utils.BestCheckpointExporter):
        with pytest.raises(ValueError, match="higher"):
            kind(str(tmp_path), "accuracy", comp)


def test_a_folder_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = _Run(tmp_path / "file" / "best")
    with pytest.raises(StorageError, match=r"the checkpoint .*best/ckpt-1 was not written"):
        run.evaluate(1, 0.5)


def test_a_remote_folder_is_refused() -> None:
    with pytest.raises(UsageError, match="local folder, not in gs://bucket/best"):
        BestCheckpointExporter("gs://bucket/best", "accuracy", "higher")


def test_logs_alone_are_written_as_theirs(tmp_path: Path) -> None:
    logs = {
        "val": {"accuracy": tf.constant(0.5), "image": tf.zeros([4, 4, 3])},
        "loss": np.float32(2.0),
    }
    ours = BestCheckpointExporter(str(tmp_path / "ours"), METRIC, "higher")
    theirs = train_utils.BestCheckpointExporter(str(tmp_path / "theirs"), METRIC, "higher")

    for exporter in (ours, theirs):
        exporter.export_best_eval_metric(logs, 100)

    expected = {"val": {"accuracy": 0.5}, "loss": 2.0, "best_ckpt_global_step": 100.0}
    assert read_json(tmp_path / "ours" / "info.json") == expected
    assert read_json(tmp_path / "theirs" / "info.json") == expected


def test_an_overridden_record_is_called_after_each_export(tmp_path: Path) -> None:
    steps: list[int] = []

    class NotingExporter(BestCheckpointExporter):
        def export_best_eval_metric(self, eval_logs: Any, global_step: Any) -> None:
            super().export_best_eval_metric(eval_logs, global_step)
            steps.append(global_step)

    run = _Run(tmp_path)
    run.exporter = NotingExporter(str(tmp_path), METRIC, "higher")
    for step, value in enumerate((0.5, 0.4, 0.6), 1):
        run.evaluate(step, value)
    run.evaluate(4, 0.7, write_logs=False)
    assert steps == [1, 3]
    assert run.best == (4, 4.0, 0.7)
    logs = run.exporter.best_ckpt_logs
    assert logs["val"]["accuracy"] == logs[METRIC] == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("subdir", "metric", "folder"),
    [("best", "accuracy", "/run"), ("", "accuracy", "/run"), ("best", "", "/run")],
)
def test_a_config_decides_about_an_exporter_as_for_theirs(
    subdir: str, metric: str, folder: str
) -> None:
    options = {"best_checkpoint_export_subdir": subdir, "best_checkpoint_eval_metric": metric}
    trainer = SimpleNamespace(**options, best_checkpoint_metric_comp="lower")
    params = SimpleNamespace(trainer=trainer)

    ours = maybe_create_best_ckpt_exporter(params, folder)
    theirs = train_utils.maybe_create_best_ckpt_exporter(params, folder)

    path = getattr(theirs, "best_ckpt_logs_path", None)
    assert getattr(ours, "best_ckpt_logs_path", None) == path
    assert (ours is not None) == bool(subdir and metric)


# ---- in a run of ours


def _run_linear(model_dir: Path, steps: int, **options: Any) -> tuple[BestCheckpointExporter, Any]:
    config = linear_experiment(
        train_steps=steps,
        best_checkpoint_eval_metric="accuracy",
        best_checkpoint_metric_comp="higher",
    )
    exporter = maybe_create_best_ckpt_exporter(config, str(model_dir))
    task = LinearTask(config.task)
    trainer = create_trainer(config, task, checkpoint_exporter=exporter)
    _, logs = run_experiment(
        tf.distribute.get_strategy(),
        task,
        "train_and_eval",
        config,
        str(model_dir),
        trainer=trainer,
        **options,
    )
    return exporter, logs


def test_our_runner_keeps_resumes_and_rewinds_the_best(tmp_path: Path) -> None:
    _run_linear(tmp_path, 20)
    exporter, logs = _run_linear(tmp_path, 40)
    folder = tmp_path / "best_ckpt"
    ledger = json_lines(tmp_path / "evals" / "validation.jsonl")
    best = max(ledger, key=lambda record: record["metrics"]["accuracy"])
    assert exporter.best == ("accuracy", best["metrics"]["accuracy"], best["step"])
    assert logs["best_accuracy"] == best["metrics"]["accuracy"]
    theirs = train_utils.BestCheckpointExporter(str(folder), "accuracy", "higher")
    assert theirs.best_ckpt_logs["best_ckpt_global_step"] == best["step"] > 10
    assert _read_step(Path(theirs.best_ckpt_path)) == best["step"]

    exporter, _ = _run_linear(tmp_path, 10, from_step=10)
    assert exporter.best[2] == exporter.best_ckpt_logs["best_ckpt_global_step"] == 10
    assert exporter.best_ckpt_path is None or _read_step(Path(exporter.best_ckpt_path)) == 10
    assert list((folder / "archived").glob("ckpt-*.index"))
