"""Tracker: what it copies from the files of a run, after kills, rewinds and failures."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.callbacks import trackers
from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.configured_callbacks import create_callbacks
from trainer_kit.callbacks.trackers import (
    MLflowTracker,
    TrackedRun,
    Tracker,
    TrackioTracker,
    WandbTracker,
    warn_of_autologging,
)
from trainer_kit.config.schema.experiment import CallbackConfig, ExperimentConfig, TrainerConfig
from trainer_kit.config.serialize import write_params
from trainer_kit.errors import DivergedError, PreemptedError, UsageError
from trainer_kit.evals.ledger import Ledger
from trainer_kit.files import write_json
from trainer_kit.process.run_lock import EndState
from trainer_kit.telemetry.metrics_jsonl import JsonLinesWriter
from trainer_kit.telemetry.report import CHANGE, Report

RUN_ID = "0123456789abcdef0123456789abcdef"


class Recorder(Tracker):
    """A tracker that keeps the runs and reports that it gets, as a server would."""

    name = "recorder"

    def __init__(self) -> None:
        self.started: list[TrackedRun] = []
        self.curves: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self.end_states: list[EndState] = []
        self.failures = 0

    def start(self, tracked_run: TrackedRun) -> None:
        self.started.append(tracked_run)
        self.curves.setdefault(tracked_run.id, [])

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the server is away")
        self.curves[self.started[-1].id] += reports

    def finish(self, end_state: EndState) -> None:
        self.end_states.append(end_state)

    def list_steps(self, number: int = 0, kind: str = "train") -> list[int]:
        """Returns the steps of the curve with this lineage."""
        curve = self.curves[f"{RUN_ID[:12]}-{number}"]
        return [step for step, numbers in curve if f"{kind}/loss" in numbers]


class RunFiles:
    """The files of a run that a tracker reads, as the run writes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Run(None, str(folder))  # type: ignore[arg-type]
        self.history = JsonLinesWriter(folder / "metrics.jsonl")
        self.ledger = Ledger(folder / "evals/validation.jsonl", dataset="", config_hash="")
        write_json(folder / "manifest.json", {"run_id": RUN_ID, "experiment": "group/tiny"})
        config = ExperimentConfig(trainer=TrainerConfig(train_steps=50))
        write_params(folder / "params.yaml", config)

    def report(self, *steps: int, kind: str = "train") -> None:
        """Reports `steps`, as the thread of the reports does."""
        for step in steps:
            metrics = {"loss": 1 / step}
            report = Report(kind=kind, step=step, total_steps=50, metrics=metrics)
            self.history.write(report)

    def rewind(self, step: int) -> None:
        """Takes ledger and history back, as a rollback does before the callbacks hear of it."""
        self.ledger.rewind(step)
        self.history.resume(step)


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    return RunFiles(tmp_path / "first")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(trackers, "_RETRY_SECONDS", 0.0)


def test_the_tracker_gets_config_and_numbers_of_a_run(files: RunFiles) -> None:
    recorder = Recorder()
    with recorder:
        recorder.train_begin(files.run)
        files.history.write(Report(kind="train", step=5, total_steps=50, metrics={"loss": 0.5}))
        files.history.write(Report(kind=CHANGE, step=5, total_steps=50, metrics={"rate": 1.0}))
        metrics = {"dev": {"loss": 2.0}, "accuracy": 0.25}
        files.history.write(Report(kind="validation", step=5, total_steps=50, metrics=metrics))

    (tracked_run,) = recorder.started
    assert tracked_run.id == "0123456789ab-0"
    assert tracked_run.parent == ""
    assert tracked_run.name == "first"
    assert tracked_run.project == "group_tiny"
    assert tracked_run.config["trainer.train_steps"] == 50
    assert recorder.curves[tracked_run.id] == [
        (5, {"train/loss": 0.5}),
        (5, {"validation/dev/loss": 2.0, "validation/accuracy": 0.25}),
    ]


def test_reports_are_copied_while_the_run_goes_on(files: RunFiles) -> None:
    has_logged = threading.Event()

    class Waker(Recorder):
        def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
            super().log(reports)
            has_logged.set()

    recorder = Waker()
    with recorder:
        recorder.train_begin(files.run)
        files.report(5)

        assert has_logged.wait(10)
        assert recorder.list_steps() == [5]


def test_a_resumed_run_continues_its_curve(files: RunFiles) -> None:
    killed = Recorder()
    with killed:
        killed.train_begin(files.run)
        files.report(5, 10, 15)
    # The last checkpoint is that of step 10.
    files.history.resume(10)
    resumed = Recorder()
    with resumed:
        resumed.train_begin(files.run)
        files.report(15)
        files.report(15, kind="validation")
        files.report(20)

    assert resumed.started[0].id == killed.started[0].id
    assert killed.list_steps() == [5, 10, 15]
    assert resumed.list_steps() == [20]
    assert resumed.list_steps(kind="validation") == [15]


def test_a_rewind_begins_a_run_that_names_its_parent(files: RunFiles) -> None:
    recorder = Recorder()
    with recorder:
        recorder.train_begin(files.run)
        files.report(5, 10, 15)
    with recorder:
        recorder.train_begin(files.run)
        files.rewind(10)
        recorder.rewound(files.run, 10)
        files.report(12, 14)

    parents = {tracked_run.id: tracked_run.parent for tracked_run in recorder.started}
    assert parents == {"0123456789ab-0": "", "0123456789ab-1": "0123456789ab-0"}
    assert recorder.list_steps(0) == [5, 10, 15]
    assert recorder.list_steps(1) == [5, 10, 12, 14]


def test_a_start_from_an_earlier_step_begins_a_run(files: RunFiles) -> None:
    first = Recorder()
    with first:
        first.train_begin(files.run)
        files.report(5, 10, 15)
    files.rewind(10)
    second = Recorder()
    with second:
        second.train_begin(files.run)
        files.report(12)

    assert second.started[0].parent == first.started[0].id
    assert second.list_steps(1) == [5, 10, 12]


def test_a_failure_is_one_warning_and_is_caught_up(
    files: RunFiles, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    recorder.failures = 2
    with recorder:
        recorder.train_begin(files.run)
        files.report(5, 10, 15)
    recorder.failures = 0
    with recorder:
        recorder.train_begin(files.run)
        files.report(20)

    assert recorder.list_steps() == [5, 10, 15, 20]
    (warning,) = caplog.messages
    assert "recorder failed" in warning
    assert "the server is away" in warning


def test_an_exit_in_a_library_ends_nothing(
    files: RunFiles, caplog: pytest.LogCaptureFixture
) -> None:
    class Exits(Recorder):
        def start(self, tracked_run: TrackedRun) -> None:
            sys.exit("no key")

    exits = Exits()
    with exits:
        exits.train_begin(files.run)
        files.report(5)

    assert exits.end_states == []
    assert "no key" in caplog.text


class Hangs(Recorder):
    """A tracker that does not end before `is_over` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def finish(self, end_state: EndState) -> None:
        self.is_over.wait(60)


def test_a_tracker_that_hangs_ends_no_run(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(trackers._END_SECONDS, "done", 0.1)
    hangs = Hangs()
    with hangs:
        hangs.train_begin(files.run)
    hangs.is_over.set()

    (message,) = caplog.messages
    assert message.startswith("recorder is not ready yet; what is missing is copied when")


def test_a_preempted_run_does_not_wait_long_for_a_tracker(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trackers._END_SECONDS["stopped"] <= 5
    monkeypatch.setitem(trackers._END_SECONDS, "stopped", 0.1)
    hangs = Hangs()
    begin = time.monotonic()
    with pytest.raises(PreemptedError), hangs:
        hangs.train_begin(files.run)
        raise PreemptedError("SIGTERM")
    seconds = time.monotonic() - begin
    hangs.is_over.set()

    assert seconds < 10


@pytest.mark.parametrize(
    ("error", "end_state"),
    [
        (None, "done"),
        (DivergedError("the loss is nan"), "failed"),
        (PreemptedError("SIGTERM"), "stopped"),
        (KeyboardInterrupt(), "stopped"),
    ],
)
def test_the_tracker_hears_how_the_run_ended(
    files: RunFiles, error: BaseException | None, end_state: str
) -> None:
    recorder = Recorder()
    with contextlib.suppress(DivergedError, PreemptedError, KeyboardInterrupt), recorder:
        recorder.train_begin(files.run)
        if error is not None:
            raise error

    assert recorder.end_states == [end_state]


def test_a_process_that_trains_nothing_logs_nothing(files: RunFiles) -> None:
    recorder = Recorder()
    with recorder:
        files.report(5, kind="validation")

    assert recorder.started == []


def test_a_tracker_without_its_methods_is_refused() -> None:
    class Empty(Tracker):
        """Defines nothing."""

    with pytest.raises(TypeError, match=r"abstract methods.* finish, log, start"):
        Empty()  # type: ignore[abstract]


def test_autologging_of_mlflow_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disabled = {"tensorflow"}
    mlflow = types.SimpleNamespace(autologging_is_disabled=disabled.__contains__)
    warn_of_autologging()
    monkeypatch.setitem(sys.modules, "mlflow.utils.autologging_utils", mlflow)
    warn_of_autologging()
    assert caplog.messages == []

    disabled.clear()
    warn_of_autologging()

    (warning,) = caplog.messages
    assert warning.startswith("mlflow.tensorflow.autolog() logs Keras's own fit")
    assert "MLflowTracker()" in warning


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # A folder of this name is not the package.
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [sys.meta_path[-1]])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)

    for tracker in (WandbTracker, MLflowTracker):
        with pytest.raises(UsageError, match=r"pip install 'tf-trainer-kit\[tracking\]'"):
            tracker()


def test_a_tracker_is_made_from_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: json.__spec__)
    sections: list[Any] = [
        CallbackConfig(name="mlflow", args={"uri": "sqlite:///a.db"}),
        CallbackConfig(name="wandb", args={"mode": "offline"}),
        CallbackConfig(name="trackio"),
    ]

    mlflow, wandb, trackio = create_callbacks(sections)

    assert isinstance(mlflow, MLflowTracker) and mlflow.uri == "sqlite:///a.db"
    assert isinstance(wandb, WandbTracker) and wandb.mode == "offline"
    assert trackio.name == "trackio"
    with pytest.raises(UsageError, match="there is no argument 'projct'"):
        create_callbacks([CallbackConfig(name="wandb", args={"projct": "a"})])


def _train_kill_and_rewind(files: RunFiles, create: Callable[[], Tracker]) -> None:
    """Copies 5, 10, 15 and, after a kill at 15, 15 and 20, then goes back to 10 and copies 12."""
    killed = create()
    with pytest.raises(PreemptedError), killed:
        killed.train_begin(files.run)
        files.report(5, 10, 15)
        raise PreemptedError("SIGTERM")
    files.history.resume(10)
    resumed = create()
    with resumed:
        resumed.train_begin(files.run)
        files.report(15, 20)
    files.rewind(10)
    rewound = create()
    with pytest.raises(PreemptedError), rewound:
        rewound.train_begin(files.run)
        files.report(12)
        raise PreemptedError("SIGTERM")


def test_mlflow_has_the_curve_and_its_child(files: RunFiles) -> None:
    pytest.importorskip("mlflow.store.tracking.sqlalchemy_store")
    from mlflow import MlflowClient

    uri = f"sqlite:///{files.folder}/mlflow.db"
    _train_kill_and_rewind(files, lambda: MLflowTracker(uri=uri))

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("group_tiny")
    rewound, first = client.search_runs([experiment.experiment_id])
    curves = []
    for mlflow_run in (first, rewound):
        history = client.get_metric_history(mlflow_run.info.run_id, "train/loss")
        curves.append([(metric.step, metric.value) for metric in history])
    assert curves[0] == [(5, 1 / 5), (10, 1 / 10), (15, 1 / 15), (20, 1 / 20)]
    assert curves[1] == [(5, 1 / 5), (10, 1 / 10), (12, 1 / 12)]
    assert first.info.status == "FINISHED"
    assert rewound.info.status == "KILLED"
    assert first.data.params["trainer.train_steps"] == "50"
    assert rewound.data.tags["trainer_kit.parent"] == first.data.tags["trainer_kit.run"]


def test_trackio_has_the_curve_and_its_child(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Trackio reads it when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(files.folder / "trackio"))
    trackio = pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    _train_kill_and_rewind(files, TrackioTracker)

    first, rewound = trackio.Api().runs("group_tiny")
    curves = []
    for trackio_run in (first, rewound):
        logs = SQLiteStorage.get_logs("group_tiny", trackio_run.name)
        curves.append([log["step"] for log in logs])
    assert curves == [[5, 10, 15, 20], [5, 10, 12]]
    assert first.config["trainer.train_steps"] == 50
    assert rewound.config["parent"] == "0123456789ab-0"


def test_wandb_gets_one_identity_and_rising_steps(
    files: RunFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    init = wandb.init
    handed_over: dict[str, list[int]] = {}
    tags = []

    def record_init(**options: Any) -> Any:
        wandb_run = init(**options)
        log = wandb_run.log
        steps = handed_over.setdefault(options["id"], [])
        tags.append(options["tags"])

        def record_log(numbers: dict[str, float]) -> None:
            steps.append(int(numbers["step"]))
            log(numbers)

        wandb_run.log = record_log
        return wandb_run

    monkeypatch.setattr(wandb, "init", record_init)
    monkeypatch.setenv("WANDB_SILENT", "true")
    _train_kill_and_rewind(files, lambda: WandbTracker(mode="offline"))

    assert handed_over == {"0123456789ab-0": [5, 10, 15, 20], "0123456789ab-1": [5, 10, 12]}
    assert tags == [[], [], ["parent:0123456789ab-0"]]
    folders = list((files.folder / "trackers/wandb").glob("offline-run-*"))
    assert len(folders) == 3
