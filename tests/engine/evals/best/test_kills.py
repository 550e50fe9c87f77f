"""Several best weights in one folder, with real files, and a fault at each write."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.commit import describe_damage, read_commit_record
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.ledger import Ledger

VALUES = [0.5, 0.8, 0.3, 0.7, 0.9, 0.85, 0.2, 0.95]


class _Run:
    """A run that evaluates VALUES at steps 1, 2, ..., and its ledger; weights hold their step."""

    def __init__(self, folder: Path, keep: int = 2, min_delta: float = 0.0) -> None:
        self.folder = folder
        self.options = {"keep": keep, "min_delta": min_delta}
        self.value = tf.Variable(0)
        self.checkpoint = tf.train.Checkpoint(value=self.value)
        self.ledger: list[dict[str, Any]] = []
        self.best = BestWeightsExporter(str(folder), "accuracy", **self.options)

    def to(self, step: int) -> _Run:
        """Evaluates up to `step`; an evaluation that is on record is not recorded again."""
        first = self.at + 1
        for self.at in range(first, step + 1):
            self.value.assign(self.at)
            metrics = {"accuracy": VALUES[self.at - 1]}
            self.best.maybe_export_checkpoint(self.checkpoint, metrics, self.at)
            if self.at not in [record["step"] for record in self.ledger]:
                self.ledger.append({"step": self.at, "metrics": metrics})

        return self

    at = 0

    def again_from(self, step: int) -> _Run:
        """Another process, which goes on from the checkpoint of `step`."""
        self.at = step
        self.best = BestWeightsExporter(str(self.folder), "accuracy", **self.options)
        self.best.resume(step, self.ledger)
        return self


def _list_steps(folder: Path) -> list[int]:
    """The steps of the weights there, each of which has to be whole, of its step, and noted."""
    for step, prefix in complete_checkpoints(str(folder)).items():
        assert describe_damage(prefix) == ""
        assert int(tf.train.load_variable(prefix, "value/.ATTRIBUTES/VARIABLE_VALUE")) == step
        assert (read_commit_record(prefix) or {})["info"]["step"] == step
    return list(complete_checkpoints(str(folder)))


def _read_best_step(folder: Path) -> int:
    info = json.loads((folder / "info.json").read_text())
    assert (read_commit_record(str(folder / info["checkpoint"])) or {})["info"] == info
    assert tf.train.latest_checkpoint(str(folder)) == str(folder / info["checkpoint"])
    return int(info["step"])


@pytest.fixture
def no_faults() -> Iterator[None]:
    yield
    files.on_write_point = None


def test_the_best_two_are_there_and_info_names_the_best_of_them(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    for step, kept, best in (
        (1, [1], 1),
        (3, [1, 2], 2),
        (4, [2, 4], 2),
        (5, [2, 5], 5),
        (7, [5, 6], 5),
        (8, [5, 8], 8),
    ):
        run.to(step)
        assert _list_steps(tmp_path) == kept
        assert _read_best_step(tmp_path) == best
        assert run.best.best == ("accuracy", VALUES[best - 1], best)


def test_weights_removed_during_the_run_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Run(tmp_path / "best").to(3)
    (tmp_path / "best").rename(tmp_path / "elsewhere")

    run.to(4)

    assert _list_steps(tmp_path / "best") == [4]
    assert _read_best_step(tmp_path / "best") == 4

    run.to(5)

    assert caplog.text.count("has lost the weights of step 1, 2: they are missing") == 1
    assert caplog.text.count("has lost the weights") == 1


def test_with_a_min_delta_a_small_gain_displaces_nothing(tmp_path: Path) -> None:
    _Run(tmp_path, keep=1, min_delta=0.2).to(8)
    assert _list_steps(tmp_path) == [2]
    assert _read_best_step(tmp_path) == 2


@pytest.mark.parametrize("start", [0, 2, 4, 5, 7, 8])
def test_repeated_evaluations_write_no_weights(
    tmp_path: Path, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Run(tmp_path).to(8)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    run.again_from(start)

    expected = None
    if start:
        best = max(VALUES[:start])
        expected = ("accuracy", best, VALUES.index(best) + 1)
    assert run.best.best == expected

    run.to(8)

    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert run.best.best == ("accuracy", 0.95, 8)
    assert caplog.records == []


POINTS = [
    "best.weights",
    "best.record.open",
    "best.record.flush",
    "best.record.rename",
    "best.info.open",
    "best.info.flush",
    "best.info.rename",
    "best.pointer.open",
    "best.pointer.rename",
    "checkpoint.remove",
]


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.parametrize(
    ("point", "occurrence"),
    [(point, number) for point in POINTS for number in (1, 2)],
)
def test_a_run_that_dies_at_any_write_and_goes_on_keeps_the_same(
    tmp_path: Path,
    point: str,
    occurrence: int,
    start: int,
    no_faults: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Death(BaseException):
        pass

    left = occurrence

    def die(reached: str, path: str) -> None:
        nonlocal left
        left -= reached == point
        if left == 0:
            raise Death

    run = _Run(tmp_path).to(3)
    files.on_write_point = die

    with pytest.raises(Death):
        run.to(8)

    files.on_write_point = None
    died_at = run.at
    info = json.loads((tmp_path / "info.json").read_text())  # tells of weights that exist

    assert (read_commit_record(str(tmp_path / info["checkpoint"])) or {})["info"] == info
    assert describe_damage(str(tf.train.latest_checkpoint(str(tmp_path)))) == ""

    prefixes = complete_checkpoints(str(tmp_path)).values()
    records = [read_commit_record(prefix) or {} for prefix in prefixes]
    assert len([record for record in records if record.get("info")]) >= 2

    run.again_from(start)

    assert len(_list_steps(tmp_path)) == 2
    assert _read_best_step(tmp_path) in (2, 5, 8)

    run.to(8)

    assert died_at > 3
    assert _list_steps(tmp_path) == [5, 8]
    assert _read_best_step(tmp_path) == 8
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_changed_keep_adds_or_removes_weights(tmp_path: Path) -> None:
    run = _Run(tmp_path).to(8)
    run.options["keep"] = 3

    run.again_from(8)

    assert _list_steps(tmp_path) == [5, 8]
    assert _read_best_step(tmp_path) == 8

    run.options["keep"] = 1

    run.again_from(8)

    assert _list_steps(tmp_path) == [8]
    assert _read_best_step(tmp_path) == 8


# ---- weights that are missing


def test_lost_weights_are_reported_and_the_next_best_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _Run(tmp_path).to(8)
    (tmp_path / "ckpt-8.index").unlink()

    run.again_from(8)

    assert _read_best_step(tmp_path) == 5
    assert caplog.text.count("has lost the weights of step 8") == 1
    assert run.best.best == ("accuracy", 0.95, 8)


def test_a_kill_between_two_sets_keeps_the_weights_of_that_step(tmp_path: Path) -> None:
    sets = {"often": "a", "rare": "b"}
    ledger = Ledger(tmp_path / "evals.jsonl", dataset="", config_hash="", sets=sets)
    folder = tmp_path / "best"
    checkpoint = tf.train.Checkpoint(value=tf.Variable(0))
    best = BestWeightsExporter(str(folder), "rare|accuracy")
    for step, accuracy in ((1, 0.5), (2, 0.9)):
        metrics = {name: {"accuracy": accuracy} for name in sets}
        best.maybe_export_checkpoint(checkpoint, metrics, step)
        ledger.append(step, metrics, dict.fromkeys(sets, 0.1))

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    records = ledger.get_active_evaluations()

    for step, accuracy in ((1, 0.5), (2, 0.9)):
        best = BestWeightsExporter(str(folder), "rare|accuracy")
        best.resume(step, records[:-1])
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert best.best == ("rare|accuracy", accuracy, step)

    (folder / "info.json").unlink()
    (folder / "ckpt-2.commit.json").unlink()

    BestWeightsExporter(str(folder), "rare|accuracy").resume(2, records)

    assert (folder / "info.json").read_bytes() == before["info.json"]
