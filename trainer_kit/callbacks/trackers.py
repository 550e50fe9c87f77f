"""Trackers: copy the reports of a run to Weights & Biases, MLflow or Trackio, as callbacks.

A tracker follows metrics.jsonl in a thread. That file has each report once, in the order of steps,
also after a kill. So a tracker continues after the last report that it has copied, and what a
failure has kept from it follows later.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from trainer_kit import files
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.config.serialize import parse_params
from trainer_kit.errors import PreemptedError, UsageError
from trainer_kit.evals.ledger import read_records
from trainer_kit.process.run_directory import read_manifest
from trainer_kit.telemetry.metrics_jsonl import read_reports_from

if TYPE_CHECKING:
    from trainer_kit.telemetry.report import Report

_LOG = logging.getLogger(__name__)

# Reports that come within this time are copied together.
_BATCHING_SECONDS = 1.0
# The wait after a failure. The libraries repeat requests themselves.
_RETRY_SECONDS = 300.0
# The kinds of reports that are copied. At a step they come in this order.
_KINDS = ("train", "validation")
_RATES = ("steps_per_second", "examples_per_second")

# What MLflow accepts in a request.
_MAX_PARAMS = 100
_MAX_METRICS = 1000


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker stores it.

    A run that goes back to an earlier step, by a rollback or --from_step, continues as another run
    of the tracker, since curves there can only grow.

    Attributes:
      id: The identity, which all starts of a run share until it goes back.
      name: The name of the run's folder, with the number of times that the run has gone back.
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


class Tracker(Callback):
    """Copies the reports of a training run to another program.

    Subclasses implement `start`, `log` and `finish`, which are called in a thread. An error in them
    causes one warning. The tracker is tried again every five minutes, at the end of the run and at
    its next start, and then gets what is missing. It never ends or delays the training. At its end
    the run waits up to a minute for the tracker.

    Runs on the host, on the chief, in modes that train.
    """

    name: str = "tracker"
    required = False
    # The longest time that the run waits at its end.
    timeout_seconds = 60.0

    _follower: _Follower | None = None
    _status = "stopped"

    def start(self, tracked_run: TrackedRun) -> int | None:
        """Starts or continues the run in the tracker.

        Returns:
          The last step that the tracker has of it, -1 for none. None if only the run knows.
        """
        raise NotImplementedError

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Stores reports of training loops and evaluations in the tracker.

        Args:
          reports: (global step, numbers) in the order of steps. Numbers have names such as
            train/training_loss and validation/accuracy. A step may occur twice, with an evaluation.
        """
        raise NotImplementedError

    def finish(self, status: str) -> None:
        """Ends the run in the tracker.

        Args:
          status: "finished", "failed", or "stopped" if the run continues later or as another.
        """
        raise NotImplementedError

    def train_begin(self, run: Run) -> None:
        """Begins to copy reports."""
        if self._follower is None:
            self._status = "stopped"
            self._follower = _Follower(self, run.directory)
            self._follower.start()

    def rewound(self, run: Run, step: int) -> None:
        """Continues as another run of the tracker."""
        del run, step
        if self._follower is not None:
            self._follower.is_rewound.set()

    def run_end(self, run: Run) -> None:
        """Remembers whether an error ends the run."""
        if isinstance(run.error, Exception) and not isinstance(run.error, PreemptedError):
            self._status = "failed"

    def run_finished(self, run: Run, record: Mapping[str, Any]) -> None:
        """Remembers that the run has finished."""
        del run, record
        self._status = "finished"

    def write(self, report: Report) -> None:
        """Wakes the tracker, since metrics.jsonl has a new report."""
        del report
        if self._follower is not None:
            self._follower.has_news.set()

    def flush(self) -> None:
        """Does nothing, since metrics.jsonl keeps what the tracker has not copied yet."""

    def close(self) -> None:
        """Copies the last reports, and ends the run in the tracker."""
        follower = self._follower
        self._follower = None
        if follower is None:
            return

        follower.close(self._status)
        follower.join(self.timeout_seconds)
        if follower.is_alive():
            _LOG.warning(
                "%s: the tracker was not ready in %g s; the next start of this run copies what is"
                " missing",
                self.name,
                self.timeout_seconds,
            )


class _Follower(threading.Thread):
    """Copies the lines of metrics.jsonl to a tracker.

    Args:
      tracker: The tracker.
      directory: The folder of the run.

    Attributes:
      has_news: Set when metrics.jsonl may have new lines.
      is_rewound: Set when the run and its files have gone back to an earlier step.
    """

    def __init__(self, tracker: Tracker, directory: str) -> None:
        super().__init__(name=tracker.name, daemon=True)
        self.has_news = threading.Event()
        self.is_rewound = threading.Event()
        self._is_closing = threading.Event()
        self._status = ""
        self._tracker = tracker
        self._directory = directory
        self._folder = os.path.join(directory, "trackers")
        self._position_path = os.path.join(self._folder, f"{tracker.name}.json")
        # The identity of the started run. "" before the start.
        self._run_id = ""
        # The step of the last copied report, and the place of its kind.
        self._position = (-1, 0)
        self._has_warned = False

    def close(self, status: str) -> None:
        """Asks the thread to copy what is left and to end."""
        self._status = status
        self._is_closing.set()
        self.has_news.set()

    def run(self) -> None:
        """Copies new lines until `close`."""
        while True:
            self.has_news.clear()
            is_last_pass = self._is_closing.is_set()
            wait_seconds = _BATCHING_SECONDS
            try:
                self._copy_new_reports()
                if is_last_pass:
                    self._tracker.finish(self._status)
            # Libraries may even raise SystemExit.
            except BaseException as error:
                self._warn_once(error)
                wait_seconds = _RETRY_SECONDS

            if is_last_pass:
                return
            self._is_closing.wait(wait_seconds)
            self.has_news.wait()

    def _copy_new_reports(self) -> None:
        if self.is_rewound.is_set() and self._run_id:
            self._run_id = ""
            self._tracker.finish("stopped")
        if not self._run_id:
            self.is_rewound.clear()
            self._start()

        reports = []
        position = self._position
        path = os.path.join(self._directory, "metrics.jsonl")
        for record in read_reports_from(path, position[0]):
            kind = record["kind"]
            if kind not in _KINDS:
                continue
            place = (record["step"], _KINDS.index(kind))
            if place <= position:
                continue
            position = place

            numbers = record["metrics"]
            for rate in _RATES:
                if record.get(rate) is not None:
                    numbers[rate] = record[rate]
            named_numbers = {f"{kind}/{name}": number for name, number in numbers.items()}
            reports.append((record["step"], named_numbers))

        # If the run has gone back by now, the lines may be those of the next run of the tracker.
        if reports and not self.is_rewound.is_set():
            self._tracker.log(reports)
            self._position = position
            state = {"run": self._run_id, "position": position}
            files.write_json(self._position_path, state)

    def _start(self) -> None:
        manifest = read_manifest(self._directory)
        ledger_path = os.path.join(self._directory, "evals", "validation.jsonl")
        lineages = [record["lineage"] for record in read_records(ledger_path)]
        lineage = max(lineages, default=0)
        with open(os.path.join(self._directory, "params.yaml"), encoding="utf-8") as stream:
            config = parse_params(stream.read()).values

        run_id = manifest["run_id"][:12]
        name = os.path.basename(self._directory)
        parent = ""
        if lineage:
            name = f"{name} (rewind {lineage})"
            parent = f"{run_id}-{lineage - 1}" if lineage > 1 else run_id
            run_id = f"{run_id}-{lineage}"
        project = re.sub(r"[^\w.-]", "_", manifest["experiment"]) or "trainer_kit"
        os.makedirs(self._folder, exist_ok=True)
        tracked_run = TrackedRun(run_id, name, parent, project, _flatten(config), self._folder)
        last_step = self._tracker.start(tracked_run)

        self._run_id = run_id
        self._position = (-1, 0)
        state = files.read_json(self._position_path) or {}
        if state.get("run") == run_id:
            step, kind = state["position"]
            self._position = (step, kind)
        # A tracker may have lost what its process had not stored yet.
        if last_step is not None and last_step < self._position[0]:
            self._position = (last_step, len(_KINDS))

    def _warn_once(self, error: BaseException) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        kind = type(error).__name__
        _LOG.warning(
            "%s: the tracker failed (%s: %s); the run continues, and the tracker is tried again"
            " every %g minutes, at the end of the run and at its next start",
            self._tracker.name,
            kind,
            error,
            _RETRY_SECONDS / 60,
        )


class WandbTracker(Tracker):
    """Copies the reports of a run to Weights & Biases.

    The axis of the curves is the metric `step`. In the mode "offline" W&B writes to the folder
    `trackers/wandb` of the run, from which `wandb sync` uploads.

    Args:
      project: The project. "" for the name of the experiment.
      entity: The user or team. None for W&B's own choice.
      mode: "online" or "offline". None for the environment variable WANDB_MODE, or "online".

    Raises:
      UsageError: when the package wandb is not installed.
    """

    name = "wandb"

    def __init__(
        self, project: str = "", entity: str | None = None, mode: str | None = None
    ) -> None:
        _check_installed("wandb")
        self._project = project
        self._entity = entity
        self._mode: Any = mode
        self._wandb_run: Any = None

    def start(self, tracked_run: TrackedRun) -> int | None:
        """Starts or continues the run with this identity. Returns None."""
        import wandb

        tags = []
        if tracked_run.parent:
            tags.append(f"parent:{tracked_run.parent}")
        self._wandb_run = wandb.init(
            project=self._project or tracked_run.project,
            entity=self._entity,
            mode=self._mode,
            id=tracked_run.id,
            name=tracked_run.name,
            tags=tags,
            config=tracked_run.config,
            dir=tracked_run.folder,
            resume="allow",
        )
        # W&B would drop reports of a step for which it has others.
        self._wandb_run.define_metric("*", step_metric="step")
        return None

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs each report."""
        for step, numbers in reports:
            self._wandb_run.log({**numbers, "step": step})

    def finish(self, status: str) -> None:
        """Waits until everything is uploaded, and ends the run."""
        exit_code = int(status == "failed")
        self._wandb_run.finish(exit_code)


class MLflowTracker(Tracker):
    """Copies the reports of a run to MLflow.

    The tag trainer_kit.run of a run in MLflow is its identity, trainer_kit.parent is its parent.

    Args:
      uri: The address of the tracking server or the database, such as sqlite:///mlflow.db. "" for
        the environment variable MLFLOW_TRACKING_URI, or MLflow's default.
      experiment: The experiment in MLflow. "" for the name of trainer_kit's experiment.

    Raises:
      UsageError: when the package mlflow is not installed.
    """

    name = "mlflow"

    def __init__(self, uri: str = "", experiment: str = "") -> None:
        _check_installed("mlflow")
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._mlflow_id = ""

    def start(self, tracked_run: TrackedRun) -> int | None:
        """Starts the run, or continues the one whose tag names it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(self._uri or None)
        name = self._experiment or tracked_run.project
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id

        query = f"tags.`trainer_kit.run` = '{tracked_run.id}'"
        runs = client.search_runs([experiment_id], query)
        if runs:
            mlflow_run = runs[0]
        else:
            tags = {"trainer_kit.run": tracked_run.id, "trainer_kit.parent": tracked_run.parent}
            mlflow_run = client.create_run(experiment_id, tags=tags, run_name=tracked_run.name)
        self._client = client
        self._mlflow_id = mlflow_run.info.run_id
        client.update_run(self._mlflow_id, status="RUNNING")

        # MLflow refuses to change them.
        if not mlflow_run.data.params:
            params = [Param(path, str(value)) for path, value in tracked_run.config.items()]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._mlflow_id, params=params[first : first + _MAX_PARAMS])
        return None if runs else -1

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs the numbers of all reports in few requests."""
        from mlflow.entities import Metric

        milliseconds = int(1000 * time.time())
        metrics = []
        for step, numbers in reports:
            for name, number in numbers.items():
                mlflow_name = re.sub(r"[^\w./ -]", "_", name)
                metrics.append(Metric(mlflow_name, number, milliseconds, step))
        for first in range(0, len(metrics), _MAX_METRICS):
            batch = metrics[first : first + _MAX_METRICS]
            self._client.log_batch(self._mlflow_id, metrics=batch)

    def finish(self, status: str) -> None:
        """Sets the status FINISHED, FAILED, or KILLED."""
        statuses = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._mlflow_id, statuses[status])


class TrackioTracker(Tracker):
    """Copies the reports of a run to Trackio.

    Trackio has no tags. The identity of a run is in its name, and `parent` is in its config.

    Args:
      project: The project. "" for the name of the experiment.

    Raises:
      UsageError: when the package trackio is not installed.
    """

    name = "trackio"

    def __init__(self, project: str = "") -> None:
        _check_installed("trackio")
        self._project = project
        self._trackio_run: Any = None

    def start(self, tracked_run: TrackedRun) -> int | None:
        """Starts or continues the run of this name. Returns the last step in a local database."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = self._project or tracked_run.project
        name = f"{tracked_run.name} {tracked_run.id}"
        config = {**tracked_run.config, "parent": tracked_run.parent}
        # Trackio stores twice a second, so a killed process has lost its last reports.
        last_step = SQLiteStorage.get_max_step_for_run(project, name)
        self._trackio_run = trackio.init(project, name, config=config, resume="allow", embed=False)
        return last_step

    def log(self, reports: Sequence[tuple[int, dict[str, float]]]) -> None:
        """Logs each report."""
        for step, numbers in reports:
            self._trackio_run.log(numbers, step)

    def finish(self, status: str) -> None:
        """Waits until everything is stored, and ends the run."""
        del status
        self._trackio_run.finish()


def _check_installed(package: str) -> None:
    """Raises UsageError unless the package is installed. It is not imported."""
    spec = find_spec(package)
    # A folder of this name, such as that of W&B's files, has no origin.
    if spec is None or spec.origin is None:
        raise UsageError(
            f"the callback {package} needs the package {package}, which is not installed:"
            " pip install 'trainer_kit[tracking]'"
        )


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested sections by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat
