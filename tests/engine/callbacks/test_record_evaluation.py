"""What is on record of an evaluation, on which worker, and when."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer_kit.callbacks.callback import Evaluation, Run
from trainer_kit.callbacks.record_evaluation import RecordEvaluation, RecordSidecarEvaluation
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.evals.ledger import Ledger, remove_best_values
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import Report, Writer


class _RecordedRun:
    """A run with a ledger; sets of the given names, if any, are recorded each for itself."""

    def __init__(self, folder: Path, *sets: str, chief: bool = True) -> None:
        path = folder / "evals.jsonl"
        hashes = dict.fromkeys(sets, "a")
        self.ledger = Ledger(path, dataset="validation", config_hash="a", sets=hashes)
        history = JsonLinesWriter(folder / "metrics.jsonl") if chief else None
        self.callback = RecordEvaluation(
            RunHistory(self.ledger, history, (SimpleNamespace(), SimpleNamespace()), None)
        )
        self.run = Run(SimpleNamespace(), str(folder), chief)

    def evaluate(self, step: int, logs: dict[str, Any], **evaluation: Any) -> list[tuple[Any, ...]]:
        """Returns step, checkpoint, metrics and seconds of each record after an evaluation."""
        self.run.evaluation = Evaluation(step, logs, **evaluation)
        self.callback.evaluation_end(self.run, logs)
        return [
            tuple(record[key] for key in ("step", "checkpoint", "metrics", "seconds"))
            for record in self.ledger.records()
        ]


def test_an_evaluation_is_on_record_with_its_checkpoint(tmp_path: Path) -> None:
    logs = {"accuracy": np.float32(0.5), "best_accuracy": 0.75}
    recorded = _RecordedRun(tmp_path).evaluate(
        10, logs, seconds=2.0, checkpoint=str(tmp_path / "ckpt-10")
    )

    assert recorded == [(10, "ckpt-10", {"accuracy": 0.5}, 2.0)]


def test_of_several_sets_those_just_evaluated_are_recorded(tmp_path: Path) -> None:
    run = _RecordedRun(tmp_path, "dev", "test")
    logs = {"dev": {"loss": 1.0, "best_loss": 0.5}}

    recorded = run.evaluate(10, logs, sets=("dev",), seconds=9.0, seconds_of_sets={"dev": 3.0})

    assert recorded == [(10, None, {"dev": {"loss": 1.0}}, 3.0)]


@pytest.mark.parametrize(
    ("chief", "replayed", "recorded"),
    [(True, False, [(10, None, {"accuracy": 0.5}, 0.0)]), (True, True, []), (False, False, [])],
    ids=["without a checkpoint", "before a restart", "on another worker"],
)
def test_new_evaluations_are_recorded_by_the_chief(
    tmp_path: Path, chief: bool, replayed: bool, recorded: list[Any]
) -> None:
    run = _RecordedRun(tmp_path, chief=chief)

    assert run.evaluate(10, {"accuracy": 0.5}, is_replayed=replayed) == recorded


def test_a_rewind_takes_later_evaluations_away(tmp_path: Path) -> None:
    run = _RecordedRun(tmp_path)
    for step in (10, 20):
        run.evaluate(step, {"accuracy": 0.5})

    run.callback.rewound(run.run, 10)

    assert [record["step"] for record in run.ledger.get_active_evaluations()] == [10]


@pytest.mark.parametrize(
    ("logs", "own"),
    [
        ({"loss": 1, "best_loss": 0}, {"loss": 1}),
        ({"best_effort": 1}, {"best_effort": 1}),
        ({"dev": {"loss": 1, "best_loss": 0}, "loss": 2}, {"dev": {"loss": 1}, "loss": 2}),
    ],
)
def test_the_best_so_far_is_no_result_of_an_evaluation(
    logs: dict[str, Any], own: dict[str, Any]
) -> None:
    assert remove_best_values(logs) == own


class _Reports(Writer):
    """Notes which evaluations are on record when reports are flushed."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.recorded: list[list[Any]] = []

    def write(self, report: Report) -> None: ...

    def flush(self) -> None:
        self.recorded.append(self._ledger.records())

    def close(self) -> None: ...


def test_a_sidecar_records_what_it_has_reported(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path), TrainerConfig(), "side")
    ledger = Ledger(directory.ledger_path, dataset="eval", config_hash="a")
    reports = _Reports(ledger)
    run = Run(SimpleNamespace(), str(tmp_path))
    callback = RecordSidecarEvaluation(ledger, reports)
    logs = {"accuracy": np.float32(0.5), "best_accuracy": 0.75}
    run.evaluation = Evaluation(10, logs, seconds=2.0, checkpoint=str(tmp_path / "ckpt-10"))

    callback.boundary_end(run)
    (record,) = ledger.records()

    assert record["step"] == 10
    assert record["checkpoint"] == "ckpt-10"
    assert record["metrics"] == {"accuracy": 0.5}
    assert reports.recorded == [[]]  # the report comes first
