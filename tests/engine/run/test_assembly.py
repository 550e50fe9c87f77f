"""Which callbacks runs of each kind have, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer_kit.callbacks.callback import Callback, Loop, Run
from trainer_kit.callbacks.early_stopping import EarlyStopping
from trainer_kit.callbacks.profile import Profile
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.config.schema.evaluation import EarlyStoppingConfig
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.ledger import Ledger
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.run.assembly import assemble_callbacks
from trainer_kit.run.orbit_adapters import Actions
from trainer_kit.telemetry.report import Report, Writer
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer_creation import create_trainer


class _Mine(Callback):
    """Of a user."""


class _Kept(Writer):
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def write(self, report: Report) -> None:
        self.reports.append(report)

    def close(self) -> None: ...


class _Made:
    """The parts that callbacks are made with."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.config = tiny_experiment(**options)
        self.trainer = create_trainer(self.config, TinyTask(self.config.task), True, True, None)
        self.directory = RunDirectory(str(folder), self.config.trainer, "side")
        self.manager = CheckpointManager(self.trainer, self.directory, self.config.trainer)
        self.history = RunHistory(
            Ledger(self.directory.ledger_path, dataset="d", config_hash="a"), None, (), None
        )

        self.writer = _Kept()

    def callbacks(self, trainer: Any = None, **more: Any) -> list[Callback]:
        parts = (
            self.config,
            trainer or self.trainer,
            self.manager,
            self.history,
            self.writer,
            [_Mine()],
            Actions(),
        )
        return assemble_callbacks(*parts, **more)

    def names(self, trainer: Any = None, **more: Any) -> list[str]:
        return [callback.name for callback in self.callbacks(trainer, **more)]


@pytest.mark.parametrize(
    ("options", "more", "last"),
    [
        ({}, {}, ["report", "finite_check", "recovery"]),
        ({"recovery_max_trials": -1}, {}, ["report"]),
        ({}, {"trains": False}, ["report"]),
        ({}, {"trainer": object()}, ["report"]),
    ],
    ids=[
        "a run that trains",
        "switched off",
        "a run that does not train",
        "a trainer of another kind",
    ],
)
def test_a_record_comes_first_and_the_divergence_checks_last(
    tmp_path: Path, options: dict[str, Any], more: dict[str, Any], last: list[str]
) -> None:
    assert _Made(tmp_path, **options).names(**more) == ["ledger", "_Mine", "actions", *last]


def test_a_sidecar_records_last_and_checks_no_divergence(tmp_path: Path) -> None:
    setup = _Made(tmp_path)
    lease = Lease(setup.directory.evals_dir, "side", lambda: ("wait", 0))

    sidecar = Sidecar(
        setup.directory, setup.history.ledger, None, None, lease, 20, setup.trainer.global_step
    )

    assert setup.names(sidecar=sidecar, trains=False) == ["_Mine", "actions", "report", "ledger"]


def test_reports_follow_all_that_may_report(tmp_path: Path) -> None:
    setup = _Made(tmp_path)
    early = EarlyStopping(
        EarlyStoppingConfig(metric="accuracy", patience=3), setup.history.ledger, ""
    )

    names = setup.names(early_stopping=early, profile=Profile("1:2", str(tmp_path), 100))

    assert names[1:6] == ["trace", "_Mine", "actions", early.name, "report"]


def test_rates_count_the_examples_of_a_training_batch(tmp_path: Path) -> None:
    setup = _Made(tmp_path)
    run = Run(setup.trainer, str(tmp_path))
    run.loop = Loop(0, 10, 5.0, {})

    for callback in setup.callbacks():
        callback.loop_end(run, {})
    (report,) = setup.writer.reports

    assert report.steps_per_second == 2.0
    assert report.examples_per_second == 2.0 * 8
