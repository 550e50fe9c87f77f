"""What the numbers of a run are written to."""

from __future__ import annotations

from pathlib import Path

from tests.engine.linear_task import linear_experiment
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.telemetry.report_writers import ReportWriters


def _open_writers(folder: Path, **options: bool) -> ReportWriters:
    writers = ReportWriters.open(RunDirectory(str(folder), linear_experiment().trainer), **options)
    writers.writer.close()
    return writers


def test_a_worker_that_is_not_the_chief_reports_to_nothing(tmp_path: Path) -> None:
    assert _open_writers(tmp_path, is_chief=False).history is None
    assert list(tmp_path.iterdir()) == []


def test_only_runs_that_train_have_a_history(tmp_path: Path) -> None:
    assert _open_writers(tmp_path, trains=True, save_summary=False).history is not None
    assert _open_writers(tmp_path, trains=False, save_summary=False).history is None
