"""The best checkpoint, with real files."""

import json
from pathlib import Path

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.best import BestCheckpoint, read_info
from trainer_kit.errors import UsageError


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


def test_a_metric_that_does_not_exist_is_an_error_that_names_those_that_do(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path), "acuracy")
    with pytest.raises(UsageError, match=r"did you mean accuracy\?.*all: accuracy, validation_loss"):
        best.check_metric(["accuracy", "validation_loss"])
    with pytest.raises(UsageError, match="acuracy"):
        best.maybe_export_checkpoint(_Weights().at(1), {"accuracy": 1.0}, 1)
    assert not list(tmp_path.iterdir())


def test_nested_metrics_are_named_with_a_bar(tmp_path: Path) -> None:
    best = BestCheckpoint(str(tmp_path), "far|accuracy")
    assert best.maybe_export_checkpoint(_Weights().at(1), {"far": {"accuracy": 0.3}, "near": {"accuracy": 0.9}}, 1)
    assert best.best == ("far|accuracy", pytest.approx(0.3), 1)


def test_what_is_no_single_number_is_left_out_of_the_record(tmp_path: Path) -> None:
    logs = {"accuracy": 0.5, "per_class": [0.1, 0.2], "f1": None, "far": {"note": "x", "loss": tf.constant(1.0)}}
    best = BestCheckpoint(str(tmp_path), "accuracy")
    assert best.maybe_export_checkpoint(_Weights().at(1), {**logs, "one": tf.constant([1.0])}, 1)
    assert best.best_ckpt_logs == {"accuracy": 0.5, "far|loss": 1.0}
    assert json.loads((tmp_path / "info.json").read_text())["metrics"] == {"accuracy": 0.5, "far|loss": 1.0}


@pytest.mark.parametrize("value", [None, [0.1, 0.2], "0.5"])
def test_a_best_metric_that_is_no_single_number_is_an_error_that_says_so(tmp_path: Path, value: object) -> None:
    best = BestCheckpoint(str(tmp_path), "f1")
    message = r"'f1' is no validation metric, or not a single number; there are: accuracy \(all: accuracy\)"
    with pytest.raises(UsageError, match=message):
        best.maybe_export_checkpoint(_Weights().at(1), {"f1": value, "accuracy": 0.5}, 1)
    assert not list(tmp_path.iterdir())


def test_a_crash_between_weights_and_record_leaves_the_old_best_whole(tmp_path: Path) -> None:
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
def test_a_damaged_record_is_told_by_name_and_does_not_stop_the_run(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "info.json").write_text(text)
    assert read_info(str(tmp_path)) is None
    assert "info.json" in caplog.text
    _run(tmp_path, [0.5])
    assert _saved_step(tmp_path) == 1
