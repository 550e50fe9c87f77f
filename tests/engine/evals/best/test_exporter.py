"""The best checkpoint, with real files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.info_json import read_info


class _Weights:
    """Weights that hold the step they are of."""

    def __init__(self) -> None:
        self.value = tf.Variable(0)
        self.checkpoint = tf.train.Checkpoint(value=self.value)

    def at(self, step: int) -> tf.train.Checkpoint:
        self.value.assign(step)
        return self.checkpoint


def _run(folder: Path, values: list[float], comp: str = "higher", first_step: int = 1) -> BestCheckpoint:
    weights, best = _Weights(), BestCheckpoint(str(folder), "accuracy", comp)
    for step, value in enumerate(values, first_step):
        best.maybe_export_checkpoint(weights.at(step), {"accuracy": value, "validation_loss": 1.0}, step)
    return best


def _saved_step(folder: Path) -> int:
    weights = _Weights()
    info = json.loads((folder / "info.json").read_text())
    weights.checkpoint.read(str(folder / info["checkpoint"])).assert_consumed()
    assert int(weights.value.numpy()) == info["step"]
    return int(info["step"])


@pytest.mark.parametrize(("comp", "step"), [("higher", 3), ("lower", 2)])
def test_the_best_step_is_the_one_with_the_best_metric(tmp_path: Path, comp: str, step: int) -> None:
    best = _run(tmp_path, [0.5, 0.2, 0.9, 0.6], comp)
    assert _saved_step(tmp_path) == step
    assert best.best is not None and best.best[2] == step


def test_only_the_weights_of_the_best_are_left(tmp_path: Path) -> None:
    _run(tmp_path, [0.1, 0.2, 0.3])
    assert sorted(path.name for path in tmp_path.glob("ckpt-*.index")) == ["ckpt-3.index"]


@pytest.mark.parametrize("values", [[float("nan"), 0.5, 0.4], [0.5, float("inf"), 0.4], [0.4, 0.5, float("nan")]])
def test_values_that_are_not_finite_are_never_best(tmp_path: Path, values: list[float]) -> None:
    _run(tmp_path, values)
    assert _saved_step(tmp_path) == values.index(0.5) + 1


def test_the_best_survives_a_restart(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    again = _run(tmp_path, [0.8, 0.7], first_step=3)
    assert _saved_step(tmp_path) == 2
    assert again.best_ckpt_logs == {"accuracy": 0.9, "validation_loss": 1.0}


def test_the_first_of_equals_stays(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.5])
    assert _saved_step(tmp_path) == 1


def test_an_unknown_metric_is_an_error_that_lists_the_metrics(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path), "acuracy")
    with pytest.raises(UsageError, match=r"did you mean accuracy\?.*all: accuracy, validation_loss"):
        best.check_metric(["accuracy", "validation_loss"])
    with pytest.raises(UsageError, match="acuracy"):
        best.maybe_export_checkpoint(_Weights().at(1), {"accuracy": 1.0}, 1)
    assert not list(tmp_path.iterdir())


def test_nested_metrics_are_named_with_a_bar(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path), "far|accuracy")
    assert best.maybe_export_checkpoint(_Weights().at(1), {"far": {"accuracy": 0.3}, "near": {"accuracy": 0.9}}, 1)
    assert best.best == ("far|accuracy", 0.3, 1)


def test_what_is_no_single_number_is_left_out_of_the_record(tmp_path: Path) -> None:
    logs = {"accuracy": 0.5, "per_class": [0.1, 0.2], "f1": None, "far": {"note": "x", "loss": tf.constant(1.0)}}
    best = BestCheckpoint(str(tmp_path), "accuracy")
    assert best.maybe_export_checkpoint(_Weights().at(1), {**logs, "one": tf.constant([1.0])}, 1)
    assert best.best_ckpt_logs == {"accuracy": 0.5, "far|loss": 1.0}
    assert json.loads((tmp_path / "info.json").read_text())["metrics"] == {"accuracy": 0.5, "far|loss": 1.0}


@pytest.mark.parametrize("value", [None, [0.1, 0.2], "0.5"])
def test_a_metric_that_is_not_a_single_number_is_an_error(tmp_path: Path, value: object) -> None:
    best = BestCheckpoint(str(tmp_path), "f1")
    message = r"'f1' is not a validation metric, or not a single number; there are: accuracy$"
    with pytest.raises(UsageError, match=message):
        best.maybe_export_checkpoint(_Weights().at(1), {"f1": value, "accuracy": 0.5}, 1)
    assert not list(tmp_path.iterdir())


def test_a_crash_before_the_record_keeps_the_old_best_whole(tmp_path: Path) -> None:
    from trainer_kit import files

    _run(tmp_path, [0.5])

    def crash(point: str, path: str) -> None:
        raise KeyboardInterrupt(point)

    best = BestCheckpoint(str(tmp_path), "accuracy")
    files.on_write_point = crash
    try:
        with pytest.raises(KeyboardInterrupt):
            best.maybe_export_checkpoint(_Weights().at(2), {"accuracy": 0.9}, 2)
    finally:
        files.on_write_point = None
    assert _saved_step(tmp_path) == 1


@pytest.mark.parametrize("text", ["", '{"checkpoint": "ckpt-1"', '{"accuracy": 0.5}', "[]"])
def test_a_damaged_info_is_named_and_does_not_stop_the_run(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "info.json").write_text(text)
    assert read_info(str(tmp_path)) is None
    assert "info.json" in caplog.text
    _run(tmp_path, [0.5])
    assert _saved_step(tmp_path) == 1


# ---- a record that is damaged


def _record(text: Callable[[dict[str, Any]], str]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "info.json"
        path.write_text(text(json.loads(path.read_text())))

    return damage


def _cut_to(share: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "info.json"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])

    return damage


def _with(**values: Any) -> Callable[[Path], None]:
    return _record(lambda info: json.dumps({**info, **values}))


def _without(*keys: str) -> Callable[[Path], None]:
    return _record(lambda info: json.dumps({key: info[key] for key in info if key not in keys}))


MUTILATIONS: dict[str, Callable[[Path], object]] = {
    **{f"cut to {share:.0%}": _cut_to(share) for share in (0.02, 0.25, 0.5, 0.75, 0.97)},
    "empty": _cut_to(0.0),
    "missing": lambda folder: (folder / "info.json").unlink(),
    "binary": lambda folder: (folder / "info.json").write_bytes(bytes(range(256))),
    "zeros": lambda folder: (folder / "info.json").write_bytes(bytes(200)),
    "a list": _record(lambda info: json.dumps([info])),
    "null": _record(lambda _: "null"),
    "a text": _record(lambda info: json.dumps(json.dumps(info))),
    "other keys": _record(lambda info: json.dumps({f"my_{key}": value for key, value in info.items()})),
    "of Model Garden": _record(lambda info: json.dumps({"best_ckpt_global_step": info["step"], **info["metrics"]})),
    "without a step": _without("step"),
    "without a metric": _without("metric", "metrics"),
    "step as text": _with(step="2"),
    "value as text": _with(value="0.9"),
    "value null": _with(value=None),
    "value NaN": _with(value=float("nan")),
    "value true": _with(value=True),
    "metrics as a list": _with(metrics=[0.9]),
    "weights that are missing": _with(checkpoint="ckpt-7", step=7),
    "weights of another step": _with(checkpoint="ckpt-1"),
    "weights elsewhere": _with(checkpoint="../ckpt-2"),
    "no name": _with(checkpoint=""),
}


@pytest.mark.parametrize("kind", MUTILATIONS)
def test_a_damaged_info_is_written_again_with_a_warning(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, [0.5, 0.9])
    whole = (tmp_path / "info.json").read_text()
    MUTILATIONS[kind](tmp_path)
    best = BestCheckpoint(str(tmp_path), "accuracy")
    best.resume(2, [{"step": 2, "metrics": {"accuracy": 0.9, "validation_loss": 1.0}}])
    is_told = kind not in ("missing", "weights that are missing", "of Model Garden")
    assert [str(tmp_path / "info.json") in record.getMessage() for record in caplog.records] == [True] * is_told
    assert (tmp_path / "info.json").read_text() == whole
    assert best.best == ("accuracy", 0.9, 2)
    assert not best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.8}, 3)
    assert best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.95}, 4)
    assert _saved_step(tmp_path) == 4
    caplog.clear()
    assert BestCheckpoint(str(tmp_path), "accuracy").best == ("accuracy", 0.95, 4)
    assert caplog.records == []


@pytest.mark.parametrize("kind", MUTILATIONS)
def test_without_a_commit_record_the_ledger_gives_the_metrics(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, [0.5, 0.9])
    whole = (tmp_path / "info.json").read_text()
    (tmp_path / "ckpt-2.commit.json").unlink()
    MUTILATIONS[kind](tmp_path)
    best = BestCheckpoint(str(tmp_path), "accuracy")
    best.resume(2, [{"step": 2, "metrics": {"accuracy": 0.9, "validation_loss": 1.0}}])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    is_told = kind not in ("missing", "weights that are missing")
    assert len(warnings) == is_told and all("info.json" in told for told in warnings)
    assert (tmp_path / "info.json").read_text() == whole
    assert not best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.8}, 3)
    assert _saved_step(tmp_path) == 2


@pytest.mark.parametrize("name", ["ckpt-2.index", "ckpt-2.data-00000-of-00001"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-3])], ids=["missing", "cut"]
)
def test_a_damaged_best_is_reported_and_replaced_by_the_next(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, [0.5, 0.9])
    damage(tmp_path / name)
    best = BestCheckpoint(str(tmp_path), "accuracy")
    best.resume(2, [{"step": 2, "metrics": {"accuracy": 0.9}}])
    assert len(caplog.records) == 1 and "has lost the weights of step 2" in caplog.text
    assert best.best == ("accuracy", 0.9, 2)
    assert best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.7}, 3)
    assert _saved_step(tmp_path) == 3
    assert best.best == ("accuracy", 0.9, 2)
    assert not best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.6}, 4)
    assert best.maybe_export_checkpoint(_Weights().at(5), {"accuracy": 0.8}, 5)
    assert _saved_step(tmp_path) == 5
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {"checkpoint", "info", "ckpt-5"}


def test_a_new_metric_keeps_the_old_best_until_its_first_export(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    other = BestCheckpoint(str(tmp_path), "validation_loss", "lower")
    other.resume(2, [])
    assert other.best is None and _saved_step(tmp_path) == 2
    assert other.maybe_export_checkpoint(_Weights().at(3), {"validation_loss": 4.0}, 3)
    assert _saved_step(tmp_path) == 3


def test_files_of_others_and_debris_of_the_dead_are_told_apart(tmp_path: Path) -> None:
    _run(tmp_path, [0.5])
    for name in ("ckpt-notes.txt", "ckpt-0.data-00000-of-00001", f".info.json.{os.getpid() + 1}.tmp"):
        (tmp_path / name).write_text("x")
    (tmp_path / "ckpt-9_temp").mkdir()
    shutil.copy(tmp_path / "ckpt-1.index", tmp_path / "ckpt-7.index")  # it has no record, so somebody else wrote it
    (tmp_path / ".saving-ckpt-0").mkdir()
    BestCheckpoint(str(tmp_path), "accuracy")
    there = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert there == {"checkpoint", "info", "ckpt-1", "ckpt-7", "ckpt-notes"}


# ---- a run that goes on


def test_a_killed_run_reports_the_best_so_far_and_keeps_others(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    best = BestCheckpoint(str(tmp_path), "accuracy")
    best.resume(1, [{"step": 1, "metrics": {"accuracy": 0.5, "far": {"loss": 1.0}}}])
    assert best.best == ("accuracy", 0.5, 1)
    assert best.best_ckpt_logs == {"accuracy": 0.5, "far|loss": 1.0}
    assert not best.maybe_export_checkpoint(_Weights().at(2), {"accuracy": 0.9}, 2)
    assert best.best == ("accuracy", 0.9, 2)
    assert _saved_step(tmp_path) == 2


def test_a_killed_run_without_evaluations_keeps_its_weights(tmp_path: Path) -> None:
    _run(tmp_path, [0.5])
    best = BestCheckpoint(str(tmp_path), "accuracy")
    best.resume(0, [])
    assert best.best is None and best.best_ckpt_logs is None
    assert _saved_step(tmp_path) == 1
    assert best.maybe_export_checkpoint(_Weights().at(1), {"accuracy": 0.6}, 1)


@pytest.mark.parametrize("killed", [False, True])
def test_a_rewind_forgets_later_bests_across_restarts(tmp_path: Path, killed: bool) -> None:
    best = _run(tmp_path, [0.5, 0.6, 0.9])
    told = {"step": 2, "metrics": {"accuracy": 0.6}}
    best.rewind(2, [told, {"step": 3, "metrics": {"accuracy": 0.9}}])
    assert sorted(path.name for path in (tmp_path / "archived").glob("*.index")) == ["ckpt-3.index"]
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
    assert not (tmp_path / "info.json").exists()
    if killed:
        best = BestCheckpoint(str(tmp_path), "accuracy")
        best.resume(2, [told])
    assert best.best == ("accuracy", 0.6, 2)
    assert best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.55}, 3)  # the best that has weights
    assert best.best == ("accuracy", 0.6, 2)
    assert best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.7}, 4)
    assert _saved_step(tmp_path) == 4
    assert best.best == ("accuracy", 0.7, 4)


def test_a_best_from_before_the_rewind_step_stays(tmp_path: Path) -> None:
    best = _run(tmp_path, [0.9, 0.5, 0.6])
    best.rewind(2, [{"step": 1, "metrics": {"accuracy": 0.9}}])
    assert best.best == ("accuracy", 0.9, 1) and _saved_step(tmp_path) == 1
    assert not best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.8}, 3)


def test_workers_that_keep_nothing_decide_like_the_one_that_does(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    (tmp_path / "info.json").write_text("{")
    before = sorted(path.name for path in tmp_path.iterdir())
    other = BestCheckpoint(str(tmp_path), "accuracy", keeps=False)
    assert other.best == ("accuracy", 0.9, 2)
    other.rewind(1, [])
    assert other.maybe_export_checkpoint(_Weights().at(2), {"accuracy": 0.8}, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
