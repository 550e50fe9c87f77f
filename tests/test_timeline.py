"""History, curves, ledger and best go back together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.best import BestCheckpoint
from trainer_kit.checkpoints.ledger import Ledger
from trainer_kit.checkpoints.names import complete_checkpoints
from trainer_kit.errors import StorageError
from trainer_kit.telemetry.history import JsonLinesWriter, active_history
from trainer_kit.telemetry.report import Report
from trainer_kit.timeline import Timeline


class _Curves:
    """Notes the steps that it was taken to."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def resume(self, step: int) -> None:
        self.steps.append(step)


class _Told:
    """A run that has evaluated at 10, 20 and 30, best at 20, and reported it all."""

    def __init__(self, folder: Path, chief: bool = True) -> None:
        self.best = BestCheckpoint(str(folder / "best_ckpt"), "accuracy")
        self.ledger = Ledger(folder / "evals.jsonl", dataset="validation", config_hash="a")
        self.history = JsonLinesWriter(folder / "metrics.jsonl")
        self.curves = (_Curves(), _Curves())
        self.flushed = 0
        self.timeline = Timeline(
            self.ledger, self.history if chief else None, self.curves, self.best, flush=self._flush
        )
        self._checkpoint = tf.train.Checkpoint(model={"w": tf.Variable(1.0)})

    def _flush(self) -> None:
        self.flushed += 1

    def evaluate(self, *accuracies: tuple[int, float]) -> None:
        for step, accuracy in accuracies:
            self.best.maybe_export_checkpoint(self._checkpoint, {"accuracy": accuracy}, step)
            self.ledger.append(step, {"accuracy": accuracy}, 0.1)
            self.history.write(Report(kind="validation", step=step, total_steps=None, metrics={"accuracy": accuracy}))


EVALUATIONS = ((10, 0.5), (20, 0.9), (30, 0.7))


@pytest.fixture
def told(tmp_path: Path) -> _Told:
    run = _Told(tmp_path)
    run.evaluate(*EVALUATIONS)
    return run


def _steps(run: _Told) -> list[Any]:
    return [record["step"] for record in active_history(run.history.path)]


def test_a_resume_takes_back_reports_and_the_best_so_far_but_no_evaluation(told: _Told, tmp_path: Path) -> None:
    told.timeline.resume(10)
    assert _steps(told) == [10]
    assert told.best.best == ("accuracy", 0.5, 10)
    assert [record["step"] for record in told.ledger.records()] == [10, 20, 30]
    assert (tmp_path / "best_ckpt" / "ckpt-20.index").exists()  # it will come to be the best again
    assert told.flushed == 1
    told.evaluate(*EVALUATIONS[1:])
    assert _steps(told) == [10, 20, 30]
    assert told.best.best == ("accuracy", 0.9, 20)


def test_going_back_for_good_takes_back_evaluations_and_the_best_too(told: _Told, tmp_path: Path) -> None:
    told.timeline.rewind(10)
    assert told.ledger.counting()[-1]["step"] == 10
    told.evaluate((20, 0.6))
    assert told.best.best == ("accuracy", 0.6, 20)
    assert [item["metrics"]["accuracy"] for item in told.ledger.counting()] == [0.5, 0.6]


def test_weights_that_count_no_more_are_gone_when_the_ledger_notes_it(
    told: _Told, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(point: str, path: str) -> None:
        if point == "ledger.append":
            raise KeyboardInterrupt

    monkeypatch.setattr(files, "on_write_point", die)
    with pytest.raises(KeyboardInterrupt):
        told.timeline.rewind(10)
    assert list(complete_checkpoints(str(tmp_path / "best_ckpt/archived"))) == [20]


def test_a_start_from_nothing_is_refused_when_the_ledger_tells_of_a_checkpoint(told: _Told) -> None:
    told.timeline.begin(0, anew=True)  # none of these were saved
    told.ledger.append(40, {"accuracy": 0.1}, 0.1, "ckpt-40")
    told.timeline.begin(40, anew=False)
    told.timeline.begin(0, anew=False)  # a run that was about to go back to its initial weights
    with pytest.raises(StorageError, match=r"tells of a checkpoint, ckpt-40, but there is none.*--from_step=0"):
        told.timeline.begin(0, anew=True)
    told.timeline.rewind(0)
    told.timeline.begin(0, anew=True)


def test_an_evaluation_that_is_not_in_the_history_is_to_be_made_again(told: _Told) -> None:
    told.ledger.append(40, {"accuracy": 0.1}, 0.1)
    assert told.timeline.recorded_sets(30) == {""}
    assert told.timeline.recorded_sets(40) == set()


def test_the_curve_of_validation_goes_back_one_step_further_when_its_last_point_is_to_come_again(told: _Told) -> None:
    told.timeline.resume(30)
    told.timeline.resume(25)
    assert [curve.steps for curve in told.curves] == [[30, 25], [30, 24]]


def test_a_worker_that_is_not_the_chief_writes_nothing_and_follows(told: _Told, tmp_path: Path) -> None:
    before = (tmp_path / "evals.jsonl").read_text()
    follower = _Told(tmp_path, chief=False)
    follower.timeline.rewind(10)
    assert (tmp_path / "evals.jsonl").read_text() == before
    assert [curve.steps for curve in follower.curves] == [[], []]
    assert follower.best.best == ("accuracy", 0.5, 10)
