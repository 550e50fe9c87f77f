"""The best checkpoint, with real files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.evals.best.exporter import BestWeightsExporter


class _Weights:
    """Weights that hold the step they are of."""

    def __init__(self) -> None:
        self.value = tf.Variable(0)
        self.checkpoint = tf.train.Checkpoint(value=self.value)

    def at(self, step: int) -> tf.train.Checkpoint:
        self.value.assign(step)
        return self.checkpoint


def _run(
    folder: Path, values: list[float], comp: str = "higher", first_step: int = 1
) -> BestWeightsExporter:
    weights = _Weights()
    best = BestWeightsExporter(str(folder), "accuracy", comp)
    for step, value in enumerate(values, first_step):
        best.maybe_export_checkpoint(
            weights.at(step), {"accuracy": value, "validation_loss": 1.0}, step
        )

    return best


def _read_saved_step(folder: Path) -> int:
    weights = _Weights()
    info = json.loads((folder / "info.json").read_text())
    weights.checkpoint.read(str(folder / info["checkpoint"])).assert_consumed()
    assert int(weights.value.numpy()) == info["step"]
    return int(info["step"])


@pytest.mark.parametrize(("comp", "step"), [("higher", 3), ("lower", 2)])
def test_the_best_step_is_the_first_with_the_best_metric(
    tmp_path: Path, comp: str, step: int
) -> None:
    best = _run(tmp_path, [0.5, 0.2, 0.9, 0.9, 0.2], comp)

    assert _read_saved_step(tmp_path) == step
    assert best.best is not None
    assert best.best[2] == step
    assert [path.name for path in tmp_path.glob("ckpt-*.index")] == [f"ckpt-{step}.index"]


@pytest.mark.parametrize(
    "values", [[float("nan"), 0.5, 0.4], [0.5, float("inf"), 0.4], [0.4, 0.5, float("nan")]]
)
def test_values_that_are_not_finite_are_never_best(tmp_path: Path, values: list[float]) -> None:
    _run(tmp_path, values)
    assert _read_saved_step(tmp_path) == values.index(0.5) + 1


def test_what_is_no_single_number_is_left_out_of_the_record(tmp_path: Path) -> None:
    logs = {
        "accuracy": 0.5,
        "per_class": [0.1, 0.2],
        "f1": None,
        "far": {"note": "x", "loss": tf.constant(1.0)},
    }
    best = BestWeightsExporter(str(tmp_path), "accuracy")

    assert best.maybe_export_checkpoint(_Weights().at(1), {**logs, "one": tf.constant([1.0])}, 1)
    assert best.best_ckpt_logs == {"accuracy": 0.5, "far|loss": 1.0}
    assert json.loads((tmp_path / "info.json").read_text())["metrics"] == {
        "accuracy": 0.5,
        "far|loss": 1.0,
    }


@pytest.mark.parametrize("value", [None, [0.1, 0.2], "0.5"])
def test_a_metric_that_is_not_a_single_number_is_an_error(tmp_path: Path, value: object) -> None:
    best = BestWeightsExporter(str(tmp_path), "f1")
    message = r"'f1' is not a validation metric, or not a single number; there are: accuracy$"

    with pytest.raises(UsageError, match=message):
        best.maybe_export_checkpoint(_Weights().at(1), {"f1": value, "accuracy": 0.5}, 1)

    assert not list(tmp_path.iterdir())


# ---- a record that is damaged


# What becomes of the text of info.json; None: the file is gone.
MUTILATIONS: dict[str, Callable[[str], str | None]] = {
    "cut in the middle": lambda text: text[: len(text) // 2],
    "cut at the end": lambda text: text[:-2],
    "empty": lambda text: "",
    "missing": lambda text: None,
    "zeros": lambda text: 200 * chr(0),
    "a list": lambda text: f"[{text}]",
    "null": lambda text: "null",
    "other keys": lambda text: text.replace('"step"', '"my_step"').replace(
        '"metric"', '"my_metric"'
    ),
    "step as text": lambda text: text.replace('"step": 2', '"step": "2"'),
    "value null": lambda text: text.replace('"value": 0.9', '"value": null'),
    "value NaN": lambda text: text.replace('"value": 0.9', '"value": NaN'),
    "metrics as a list": lambda text: json.dumps({**json.loads(text), "metrics": [0.9]}),
    "of Model Garden": lambda text: (
        '{"best_ckpt_global_step": 2, "accuracy": 0.9, "validation_loss": 1.0}'
    ),
    "weights that are missing": lambda text: json.dumps(
        {**json.loads(text), "checkpoint": "ckpt-7", "step": 7}
    ),
    "weights of another step": lambda text: text.replace("ckpt-2", "ckpt-1"),
    "weights elsewhere": lambda text: text.replace("ckpt-2", "../ckpt-2"),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["with record", "without"])
@pytest.mark.parametrize("kind", MUTILATIONS)
def test_a_damaged_info_is_written_again_with_a_warning(
    tmp_path: Path, kind: str, recorded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, [0.5, 0.9])
    info = tmp_path / "info.json"
    whole = info.read_text()
    damaged = MUTILATIONS[kind](whole)
    assert damaged != whole

    if damaged is None:
        info.unlink()
    else:
        info.write_text(damaged)
    if not recorded:
        (tmp_path / "ckpt-2.commit.json").unlink()

    best = BestWeightsExporter(str(tmp_path), "accuracy")
    best.resume(2, [{"step": 2, "metrics": {"accuracy": 0.9, "validation_loss": 1.0}}])

    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    silent = ["missing", "weights that are missing"]
    if recorded:
        silent.append("of Model Garden")
    assert [str(info) in warning for warning in warnings] == [True] * (kind not in silent)
    assert info.read_text() == whole
    assert best.best == ("accuracy", 0.9, 2)
    assert not best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.8}, 3)
    assert best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.95}, 4)
    assert _read_saved_step(tmp_path) == 4

    caplog.clear()

    assert BestWeightsExporter(str(tmp_path), "accuracy").best == ("accuracy", 0.95, 4)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["ckpt-2.index", "ckpt-2.data-00000-of-00001"])
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-3])],
    ids=["missing", "cut"],
)
def test_a_damaged_best_is_reported_and_replaced_by_the_next(
    tmp_path: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    _run(tmp_path, [0.5, 0.9])
    damage(tmp_path / name)
    best = BestWeightsExporter(str(tmp_path), "accuracy")

    best.resume(2, [{"step": 2, "metrics": {"accuracy": 0.9}}])

    assert len(caplog.records) == 1
    assert "has lost the weights of step 2" in caplog.text
    assert best.best == ("accuracy", 0.9, 2)
    assert best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.7}, 3)
    assert _read_saved_step(tmp_path) == 3
    assert best.best == ("accuracy", 0.9, 2)
    assert not best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.6}, 4)
    assert best.maybe_export_checkpoint(_Weights().at(5), {"accuracy": 0.8}, 5)
    assert _read_saved_step(tmp_path) == 5
    assert {path.name.split(".")[0] for path in tmp_path.iterdir()} == {
        "checkpoint",
        "info",
        "ckpt-5",
    }


def test_a_new_metric_keeps_the_old_best_until_its_first_export(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    other = BestWeightsExporter(str(tmp_path), "validation_loss", "lower")

    other.resume(2, [])

    assert other.best is None
    assert _read_saved_step(tmp_path) == 2
    assert other.maybe_export_checkpoint(_Weights().at(3), {"validation_loss": 4.0}, 3)
    assert _read_saved_step(tmp_path) == 3


def test_files_of_others_and_debris_of_the_dead_are_told_apart(tmp_path: Path) -> None:
    _run(tmp_path, [0.5])
    for name in (
        "ckpt-notes.txt",
        "ckpt-0.data-00000-of-00001",
        f".info.json.{os.getpid() + 1}.tmp",
    ):
        (tmp_path / name).write_text("x")

    (tmp_path / "ckpt-9_temp").mkdir()
    # It has no record, so somebody else wrote it.
    shutil.copy(tmp_path / "ckpt-1.index", tmp_path / "ckpt-7.index")
    (tmp_path / ".saving-ckpt-0").mkdir()
    BestWeightsExporter(str(tmp_path), "accuracy")

    names = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert names == {"checkpoint", "info", "ckpt-1", "ckpt-7", "ckpt-notes"}


# ---- a run that goes on


@pytest.mark.parametrize("killed", [False, True])
def test_a_rewind_forgets_later_bests_across_restarts(tmp_path: Path, killed: bool) -> None:
    best = _run(tmp_path, [0.5, 0.6, 0.9])
    told = {"step": 2, "metrics": {"accuracy": 0.6}}

    best.rewind(2, [told, {"step": 3, "metrics": {"accuracy": 0.9}}])

    assert sorted(path.name for path in (tmp_path / "archived").glob("*.index")) == ["ckpt-3.index"]
    assert tf.train.latest_checkpoint(str(tmp_path)) is None
    assert not (tmp_path / "info.json").exists()

    if killed:
        best = BestWeightsExporter(str(tmp_path), "accuracy")
        best.resume(2, [told])

    assert best.best == ("accuracy", 0.6, 2)
    # The best that has weights.
    assert best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.55}, 3)
    assert best.best == ("accuracy", 0.6, 2)
    assert best.maybe_export_checkpoint(_Weights().at(4), {"accuracy": 0.7}, 4)
    assert _read_saved_step(tmp_path) == 4
    assert best.best == ("accuracy", 0.7, 4)


def test_a_best_from_before_the_rewind_step_stays(tmp_path: Path) -> None:
    best = _run(tmp_path, [0.9, 0.5, 0.6])

    best.rewind(2, [{"step": 1, "metrics": {"accuracy": 0.9}}])

    assert best.best == ("accuracy", 0.9, 1)
    assert _read_saved_step(tmp_path) == 1
    assert not best.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.8}, 3)


def test_workers_that_keep_nothing_decide_like_the_one_that_does(tmp_path: Path) -> None:
    _run(tmp_path, [0.5, 0.9])
    (tmp_path / "info.json").write_text("{")
    before = sorted(path.name for path in tmp_path.iterdir())

    other = BestWeightsExporter(str(tmp_path), "accuracy", is_chief=False)

    assert other.best == ("accuracy", 0.9, 2)

    other.rewind(1, [])

    assert other.maybe_export_checkpoint(_Weights().at(2), {"accuracy": 0.8}, 2)
    # The chief would remove step 2.
    assert other.maybe_export_checkpoint(_Weights().at(3), {"accuracy": 0.95}, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
