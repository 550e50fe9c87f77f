"""History, curves, ledger and best go back together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD_SUFFIX
from trainer_kit.errors import StorageError
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.ledger import Ledger
from trainer_kit.evals.run_history import RunHistory
from trainer_kit.process.sidecar_lease import Lease
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter, read_active_history
from trainer_kit.telemetry.report import Report


class _Curves:
    """Notes the steps that it was taken to."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def resume(self, step: int) -> None:
        self.steps.append(step)


class _Setup:
    """A run that has evaluated at 10, 20 and 30, best at 20, and reported it all."""

    def __init__(self, folder: Path, chief: bool = True) -> None:
        self.best = BestWeightsExporter(str(folder / "best_ckpt"), "accuracy")
        self.ledger = Ledger(folder / "evals.jsonl", dataset="validation", config_hash="a")
        self.history = JsonLinesWriter(folder / "metrics.jsonl")
        self.curves = (_Curves(), _Curves())
        self.flushed = 0
        self.run_history = RunHistory(
            self.ledger,
            self.history if chief else None,
            self.curves,
            self.best,
            background_writer=SimpleNamespace(flush=self._flush),
            checkpoint_folder=str(folder),
        )
        self._checkpoint = tf.train.Checkpoint(model={"w": tf.Variable(1.0)})

    def _flush(self) -> None:
        self.flushed += 1

    def evaluate(self, *accuracies: tuple[int, float]) -> None:
        for step, accuracy in accuracies:
            self.best.maybe_export_checkpoint(self._checkpoint, {"accuracy": accuracy}, step)
            self.ledger.append(step, {"accuracy": accuracy}, 0.1)
            self.history.write(
                Report(
                    kind="validation", step=step, total_steps=None, metrics={"accuracy": accuracy}
                )
            )


EVALUATIONS = ((10, 0.5), (20, 0.9), (30, 0.7))


@pytest.fixture
def setup(tmp_path: Path) -> _Setup:
    run = _Setup(tmp_path)
    run.evaluate(*EVALUATIONS)
    return run


def _list_steps(run: _Setup) -> list[Any]:
    return [record["step"] for record in read_active_history(run.history.path)]


def test_a_resume_rewinds_reports_and_best_but_no_evaluation(setup: _Setup, tmp_path: Path) -> None:
    setup.run_history.resume(10)

    assert _list_steps(setup) == [10]
    assert setup.best.best == ("accuracy", 0.5, 10)
    assert [record["step"] for record in setup.ledger.records()] == [10, 20, 30]
    assert (tmp_path / "best_ckpt" / "ckpt-20.index").exists()  # it will come to be the best again
    assert setup.flushed == 1

    setup.evaluate(*EVALUATIONS[1:])

    assert _list_steps(setup) == [10, 20, 30]
    assert setup.best.best == ("accuracy", 0.9, 20)


def test_a_start_at_0_is_refused_if_the_ledger_has_a_checkpoint(setup: _Setup) -> None:
    setup.run_history.begin(0, is_new=True)  # none of these were saved
    setup.ledger.append(40, {"accuracy": 0.1}, 0.1, "ckpt-40")
    setup.run_history.begin(40, is_new=False)
    # A run that was about to go back to its initial weights.
    setup.run_history.begin(0, is_new=False)

    with pytest.raises(
        StorageError,
        match=r"names the checkpoint ckpt-40, but the folder holds none.*--from_step=0",
    ):
        setup.run_history.begin(0, is_new=True)

    setup.run_history.rewind(0)
    setup.run_history.begin(0, is_new=True)


def test_an_evaluation_missing_in_the_history_is_repeated(setup: _Setup) -> None:
    setup.ledger.append(40, {"accuracy": 0.1}, 0.1)

    assert setup.run_history.find_recorded_sets(30) == {""}
    assert setup.run_history.find_recorded_sets(40) == set()


def test_the_validation_curve_drops_a_point_that_is_repeated(setup: _Setup) -> None:
    setup.run_history.resume(30)
    setup.run_history.resume(25)

    assert [curve.steps for curve in setup.curves] == [[30, 25], [30, 24]]


def test_a_worker_that_is_not_the_chief_writes_nothing(setup: _Setup, tmp_path: Path) -> None:
    before = (tmp_path / "evals.jsonl").read_text()
    follower = _Setup(tmp_path, chief=False)

    follower.run_history.rewind(10)

    assert (tmp_path / "evals.jsonl").read_text() == before
    assert [curve.steps for curve in follower.curves] == [[], []]
    assert follower.best.best == ("accuracy", 0.5, 10)


def test_a_restarted_run_informs_sidecars_with_old_evaluations(tmp_path: Path) -> None:
    side = Ledger(tmp_path / "side.jsonl", dataset="eval", config_hash="a")
    side.append(10, {"accuracy": 0.5}, 0.1)

    _Setup(tmp_path).run_history.begin(0, is_new=True)

    assert side.follow(tmp_path / "evals.jsonl") == 0
    assert side.get_metrics_by_step() == {}

    _Setup(tmp_path).run_history.begin(0, is_new=True)  # nothing was evaluated since

    assert side.follow(tmp_path / "evals.jsonl") is None


def test_a_restarted_run_informs_a_sidecar_that_is_evaluating(tmp_path: Path) -> None:
    with Lease(tmp_path, "side", lambda: ("evaluate", 0)) as lease:
        lease.protect_checkpoints(after_step=-1, reading_step=None)
        run = _Setup(tmp_path)
        run.run_history.begin(0, is_new=True)
        assert run.ledger.lineage == 0
        lease.protect_checkpoints(after_step=4, reading_step=5)
        for _ in range(2):
            run = _Setup(tmp_path)
            run.run_history.begin(0, is_new=True)
            assert run.ledger.lineage == 1


@pytest.mark.parametrize(
    ("left", "history_end", "ledger_end"),
    [
        (0, "and now 0 bytes", "and now 0"),
        (1, " bytes", "and now 1"),
    ],
)
def test_losses_of_history_and_ledger_are_reported(
    setup: _Setup,
    tmp_path: Path,
    left: int,
    history_end: str,
    ledger_end: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files.write_json(
        str(tmp_path / "ckpt-30") + RECORD_SUFFIX,
        {"files": {}, "recorded": setup.run_history.read_extent(30)},
    )
    setup.history.close()
    for name in ("metrics.jsonl", "evals.jsonl"):
        path = tmp_path / name
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:left]))

    setup.run_history.begin(30, is_new=False)

    of_history, of_ledger = [
        record.getMessage() for record in caplog.records if "has lost" in record.getMessage()
    ]
    assert "up to step 30 when ckpt-30 was saved" in of_history
    assert of_history.endswith(history_end)
    assert "2 before step 30, up to step 20" in of_ledger
    assert of_ledger.endswith(ledger_end)


def test_a_whole_history_and_ledger_give_no_alarm(
    setup: _Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files.write_json(
        str(tmp_path / "ckpt-30") + RECORD_SUFFIX,
        {"files": {}, "recorded": setup.run_history.read_extent(30)},
    )
    setup.history.close()

    setup.run_history.begin(30, is_new=False)

    assert "has lost" not in caplog.text


@pytest.mark.parametrize(
    "recorded", [None, {}, {"history": None, "evaluations": ["2", 20]}, {"history": 7}, []]
)
def test_a_checkpoint_that_records_nothing_gives_no_alarm(
    setup: _Setup, tmp_path: Path, recorded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files.write_json(str(tmp_path / "ckpt-30") + RECORD_SUFFIX, {"files": {}, "recorded": recorded})
    (Path(setup.history.path)).unlink()

    setup.run_history.begin(30, is_new=False)

    assert "has lost" not in caplog.text


def test_a_ledger_cut_during_a_run_is_reported_once(
    setup: _Setup, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "evals.jsonl").write_text("")

    setup.evaluate((40, 0.6), (50, 0.6))

    assert [record.getMessage().partition(" during the run: ")[2] for record in caplog.records] == [
        "the evaluations of 3 steps are lost"
    ]
