"""Trackers: callbacks that copy the reports of a run to Weights & Biases, MLflow or Trackio.

A tracker reads metrics.jsonl in a thread. This file contains each report once, in the order of
steps, even after a kill. The tracker records the last report that it has copied. After a failure
or a restart it continues with the next one.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.serialize import parse_params
from trainer_kit.errors import UsageError, get_install_command
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.run_directory import read_manifest
from trainer_kit.process.run_lock import EndState, get_end_state
from trainer_kit.telemetry.metrics_jsonl import read_reports_from
from trainer_kit.telemetry.report import CHANGE

_LOG = logging.getLogger(__name__)

# The time between two reads of metrics.jsonl. New reports are copied together.
_WAIT_SECONDS = 1.0
# The wait after a failure. The libraries repeat requests themselves.
_RETRY_SECONDS = 300.0
# The longest time that a run waits for a tracker at its end. A preempted machine is soon gone.
_END_SECONDS: dict[EndState, float] = {"done": 60.0, "failed": 60.0, "stopped": 5.0}
_REMEDY = "what is missing is copied when the run trains on"


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker stores it.

    A run that goes back to an earlier step, by a rollback or --from_step, continues as another run
    of the tracker, since curves there can only grow.

    Attributes:
      id: The identity, which all starts of a run share until it goes back. It ends with the number
        of times that the run has gone back.
      name: The name of the run's folder.
      parent: The identity from before the run went back. "" if it never did.
      project: The name of the experiment.
      config: The values of the config by path, such as trainer.train_steps.
      folder: An existing folder for files of the tracker.
    """

    id: str
    name: str
    parent: str
    project: str
    config: dict[str, Any]
    folder: str


class Tracker(Callback, contextlib.AbstractContextManager["Tracker"]):
    """Copies the reports of a training run to another program.

    Subclasses implement `start`, `log` and `finish`, which are called in a thread. An error in them
    causes a warning. The tracker is tried again every five minutes, at the end of the run and at
    its next start, and then gets what is missing. It never ends or delays the training. At its end
    the run waits up to a minute for the tracker, and after a preemption or Ctrl-C five seconds.

    The run enters the tracker as a context, and leaves it once all reports are on the disk. Runs on
    the host, on the chief, in modes that train.
    """

    name: str = "tracker"
    required = False
    _thread: threading.Thread | None = None
    _end_state: EndState

    @abstractmethod
    def start(self, tracked_run: TrackedRun) -> None:
        """Starts or continues the run in the tracker."""

    @abstractmethod
    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Stores reports of training loops and evaluations in the tracker.

        Args:
          reports: (global step, numbers) in the order of steps. Numbers have names such as
            train/training_loss and validation/accuracy. A step may occur twice, with an evaluation.
        """

    @abstractmethod
    def finish(self, end_state: EndState) -> None:
        """Ends the run in the tracker.

        Args:
          end_state: "done", "failed", or "stopped" if the run continues later or as another.
        """

    def train_begin(self, run: Run) -> None:
        """Begins to copy reports."""
        # Training begins again if the run goes back in its last evaluation.
        if self._thread is not None:
            return
        self._directory = Path(run.directory)
        # The identity of the started run. "" before the start.
        self._tracked_id = ""
        self._is_rewound = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._follow_reports, name=self.name, daemon=True)
        self._thread.start()

    def rewound(self, run: Run, step: int) -> None:
        """Continues as another run of the tracker, since files of the run have gone back."""
        self._is_rewound.set()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Copies the last reports, and ends the run in the tracker."""
        if self._thread is None:
            return
        self._end_state = get_end_state(error)
        self._is_closing.set()
        self._thread.join(_END_SECONDS[self._end_state])
        if self._thread.is_alive():
            _LOG.warning("%s is not ready yet; %s", self.name, _REMEDY)
        self._thread = None

    def _follow_reports(self) -> None:
        """Copies new lines of metrics.jsonl until the end of the run, in the thread."""
        is_last_pass = False
        wait_seconds = _WAIT_SECONDS
        while not is_last_pass:
            is_last_pass = self._is_closing.wait(wait_seconds)
            wait_seconds = _WAIT_SECONDS
            try:
                self._copy_new_reports()
                if is_last_pass:
                    self.finish(self._end_state)
            # Libraries may even raise SystemExit.
            except BaseException as error:
                wait_seconds = _RETRY_SECONDS
                _LOG.warning("%s failed: %r; %s", self.name, error, _REMEDY)

    def _copy_new_reports(self) -> None:
        if self._is_rewound.is_set() and self._tracked_id:
            self._tracked_id = ""
            self.finish("stopped")
        if not self._tracked_id:
            self._is_rewound.clear()
            self._start_or_continue()

        # The step and kind of the last report that each run of the tracker has got.
        tracked_id = self._tracked_id
        positions_path = self._directory / "trackers" / f"{self.name}.json"
        positions = files.read_json(positions_path) or {}
        position = positions.get(tracked_id, [-1, ""])
        history_path = self._directory / "metrics.jsonl"
        records = read_reports_from(history_path, position[0])
        reports = []
        for record in records:
            step = record["step"]
            kind = record["kind"]
            metrics = record["metrics"]
            place = [step, kind]
            # At a step the training comes before the evaluation, also in the alphabet.
            if kind != CHANGE and place > position:
                numbers = {f"{kind}/{name}": number for name, number in metrics.items()}
                report = (step, numbers)
                reports.append(report)
                position = place

        # If the run has gone back by now, the lines may be those of the next run of the tracker.
        if reports and not self._is_rewound.is_set():
            self.log(reports)
            files.write_json(positions_path, {tracked_id: position})

    def _start_or_continue(self) -> None:
        import pandas

        directory = self._directory
        ledger_path = directory / "evals" / "validation.jsonl"
        ledger = Ledger(ledger_path, dataset="", config_hash="")
        lineage = ledger.lineage
        manifest = read_manifest(directory)
        experiment = manifest["experiment"] or "trainer_kit"
        project = re.sub(r"[^\w.-]", "_", experiment)
        run_id = manifest["run_id"][:12]
        parent = f"{run_id}-{lineage - 1}"

        params_path = directory / "params.yaml"
        text = params_path.read_text(encoding="utf-8")
        params = parse_params(text)
        table = pandas.json_normalize(params.values)
        (values,) = table.to_dict("records")
        folder = directory / "trackers"
        folder.mkdir(exist_ok=True)
        tracked_run = TrackedRun(
            id=f"{run_id}-{lineage}",
            name=directory.name,
            parent=parent if lineage else "",
            project=project,
            config=values,
            folder=str(folder),
        )
        self.start(tracked_run)
        self._tracked_id = tracked_run.id


class _PackagedTracker(Tracker):
    """A tracker that needs the optional package of its name."""

    def __post_init__(self) -> None:
        """Raises UsageError unless the package is installed. It is not imported."""
        spec = find_spec(self.name)
        # A folder of this name, such as that of W&B's files, has no origin.
        if spec is None or spec.origin is None:
            raise UsageError(f"{self.name} is not installed: {get_install_command('tracking')}")


@dataclass(eq=False)
class WandbTracker(_PackagedTracker):
    """Copies the reports of a run to Weights & Biases.

    The axis of the curves is the metric `step`. In the mode "offline" W&B writes to the folder
    `trackers/wandb` of the run, from which `wandb sync` uploads.

    Args:
      project: The project. "" for the name of the experiment.
      mode: "online" or "offline". None for the environment variable WANDB_MODE, or "online".

    Raises:
      UsageError: when the package wandb is not installed.
    """

    name = "wandb"
    project: str = ""
    mode: Any = None

    def start(self, tracked_run: TrackedRun) -> None:
        """Starts or continues the run with this identity."""
        import wandb

        parents = [f"parent:{tracked_run.parent}"] if tracked_run.parent else []
        self._run = wandb.init(
            project=self.project or tracked_run.project,
            mode=self.mode,
            id=tracked_run.id,
            name=tracked_run.name,
            tags=parents,
            config=tracked_run.config,
            dir=tracked_run.folder,
            resume="allow",
        )
        # W&B would drop reports of a step for which it has others.
        self._run.define_metric("*", step_metric="step")

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs each report."""
        for step, numbers in reports:
            row = {**numbers, "step": step}
            self._run.log(row)

    def finish(self, end_state: EndState) -> None:
        """Waits until everything is uploaded, and ends the run."""
        has_failed = end_state == "failed"
        self._run.finish(exit_code=int(has_failed))


@dataclass(eq=False)
class MLflowTracker(_PackagedTracker):
    """Copies the reports of a run to MLflow.

    The tag trainer_kit.run of a run in MLflow is its identity, trainer_kit.parent is its parent.

    Args:
      uri: The address of the tracking server or the database, such as sqlite:///mlflow.db. None for
        the environment variable MLFLOW_TRACKING_URI, or MLflow's default.
      experiment: The experiment in MLflow. "" for the name of trainer_kit's experiment.

    Raises:
      UsageError: when the package mlflow is not installed.
    """

    name = "mlflow"
    uri: str | None = None
    experiment: str = ""

    def start(self, tracked_run: TrackedRun) -> None:
        """Starts the run, or continues the one whose tag names it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self.uri)
        name = self.experiment or tracked_run.project
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id

        query = f"tags.`trainer_kit.run` = '{tracked_run.id}'"
        runs = client.search_runs([experiment_id], query)
        if not runs:
            tags = {"trainer_kit.run": tracked_run.id, "trainer_kit.parent": tracked_run.parent}
            new_run = client.create_run(experiment_id, tags=tags, run_name=tracked_run.name)
            runs = [new_run]
        (mlflow_run,) = runs
        self._client = client
        self._run_id = mlflow_run.info.run_id
        client.update_run(self._run_id, status="RUNNING")

        # MLflow refuses to change them.
        if not mlflow_run.data.params:
            config = tracked_run.config.items()
            params = [Param(path, str(value)) for path, value in config]
            client.log_batch(self._run_id, params=params)

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs the numbers of all reports in few requests."""
        from mlflow.entities import Metric

        seconds = time.time()
        milliseconds = int(1000 * seconds)
        metrics = []
        for step, numbers in reports:
            for name, number in numbers.items():
                mlflow_name = re.sub(r"[^\w./ -]", "_", name)
                metric = Metric(mlflow_name, number, milliseconds, step)
                metrics.append(metric)
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, end_state: EndState) -> None:
        """Sets the status FINISHED, FAILED, or KILLED."""
        statuses = {"done": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._run_id, statuses[end_state])


@dataclass(eq=False)
class TrackioTracker(_PackagedTracker):
    """Copies the reports of a run to Trackio.

    Trackio has no tags. The identity of a run is in its name, and `parent` is in its config.

    Args:
      project: The project. "" for the name of the experiment.

    Raises:
      UsageError: when the package trackio is not installed.
    """

    name = "trackio"
    project: str = ""

    def start(self, tracked_run: TrackedRun) -> None:
        """Starts or continues the run of this name."""
        import trackio

        project = self.project or tracked_run.project
        name = f"{tracked_run.name} {tracked_run.id}"
        config = {**tracked_run.config, "parent": tracked_run.parent}
        self._run = trackio.init(project, name, config=config, resume="allow", embed=False)

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs each report."""
        for step, numbers in reports:
            self._run.log(numbers, step)

    def finish(self, end_state: EndState) -> None:
        """Waits until everything is stored, and ends the run."""
        self._run.finish()


def warn_of_autologging() -> None:
    """Logs a warning if MLflow's autologging is on, since it logs nothing of a run.

    Runs on the host.
    """
    # The module exists if the program has imported it.
    autologging = sys.modules.get("mlflow.utils.autologging_utils")
    if autologging is not None and not autologging.autologging_is_disabled("tensorflow"):
        _LOG.warning(
            "mlflow.tensorflow.autolog() logs Keras's own fit, and nothing of this run; give the"
            " run the callback trainer_kit.callbacks.trackers.MLflowTracker()"
        )
