"""The paths in a run's folder, and its records: params.yaml, manifest.json and final.json."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import platform
import re
import socket
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any, Protocol

from trainer_kit import __version__, files
from trainer_kit.checkpoint_names import RECORD_SUFFIX, complete_checkpoints
from trainer_kit.config.resume_check import Change, check_resume
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.config.schema.evaluation import get_validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig, TrainerConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.config.schema.optimization import AVERAGE, OptimizationConfig
from trainer_kit.config.serialize import write_params
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, StorageError, UsageError
from trainer_kit.process.user_code import describe_code_changes

# With the step it names the folder of a run in continuous_train_and_eval.
FINETUNE = "finetune-"
PACKAGES = ("tensorflow", "keras", "tf-models-official", "numpy")

# The number of folders from evals/<name>/best_ckpt to the folder of the run.
_FOLDERS_UP = 4
_SECTIONS = ("task", "trainer", "runtime")
_LOG = logging.getLogger(__name__)


class BestOwner(Protocol):
    """What final.json needs of the owner of the best checkpoints. See BestCheckpoints."""

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the primary best so far."""


class RunDirectory:
    """Names and writes the files in `model_dir`. Imports no TensorFlow.

    Args:
      model_dir: The folder of the run, a local one.
      trainer: The config's section, which names the folders of the best checkpoint and of
        validation summaries.
      sidecar: The name of a sidecar of the run, which writes to a separate folder. "" for the run
        itself.

    Raises:
      UsageError: when model_dir is a remote folder.
    """

    def __init__(self, model_dir: str, trainer: TrainerConfig, sidecar: str = "") -> None:
        if model_dir is None:
            raise UsageError("model_dir must be specified, but got None")
        if files.is_remote(model_dir):
            raise UsageError(
                f"model_dir: {model_dir!r} is a remote folder; only local and mounted folders are"
                " allowed: mount it (gcsfuse, s3fs, ...) and give the path of the mount"
            )
        self.path = model_dir

        # A sidecar reads the files of the run, and writes to its own folder.
        self.evals_dir = os.path.join(model_dir, "evals")
        sidecar_dir = os.path.join(self.evals_dir, sidecar) if sidecar else ""
        self.output_dir = sidecar_dir or model_dir
        self.best_dir = os.path.join(model_dir, trainer.best_checkpoint_export_subdir)
        self.output_best_dir = self.best_dir
        if sidecar:
            self.output_best_dir = os.path.join(sidecar_dir, trainer.best_checkpoint_export_subdir)
        self.output_named_bests_dir = os.path.join(self.output_dir, BEST_CHECKPOINTS)

        self.train_summary_dir = os.path.join(model_dir, "train")
        self.eval_summary_dir = sidecar_dir or os.path.join(
            model_dir, trainer.validation_summary_subdir
        )
        self.training_ledger_path = os.path.join(self.evals_dir, "validation.jsonl")
        self.ledger_path = self.training_ledger_path
        if sidecar:
            self.ledger_path = os.path.join(self.evals_dir, f"{sidecar}.jsonl")

        self.metrics_path = os.path.join(model_dir, "metrics.jsonl")
        self.params_path = os.path.join(model_dir, "params.yaml")
        self.manifest_path = os.path.join(model_dir, "manifest.json")
        self.final_path = os.path.join(model_dir, "final.json")
        self.log_path = os.path.join(self.output_dir, "log.txt")
        # The identity in the manifest that this process has written.
        self._run_id = ""

    def write_record(
        self,
        config: ExperimentConfig,
        experiment: str,
        mode: str,
        extra_files: Mapping[str, str],
        threads: Mapping[str, int] | None = None,
        setup: Mapping[str, object] | None = None,
    ) -> None:
        """Writes the records of the run, and removes an older final.json.

        The records are params.yaml, manifest.json and the further files. A warning names each
        difference of platform, versions, threads or the user's code to the last start, since the
        results may differ.

        Args:
          config: The config of the run.
          experiment: The registered name of the experiment.
          mode: The mode of the run.
          extra_files: The texts of the further files, by name.
          threads: The thread counts, which a resumed run reuses.
          setup: The numbers of replicas and workers, the device, what describes the data, the steps
            of the run, and what `read_layer_names` and `describe_code` return.
        """
        if os.path.exists(self.final_path):
            os.remove(self.final_path)
        before = read_manifest(self.path)
        write_params(self.params_path, config)

        run_id = read_run_id(self.path)
        if not run_id:
            # A run that resumes from copied checkpoints in another folder owns these checkpoints.
            commit_record: dict[str, Any] = {}
            checkpoints = complete_checkpoints(self.path)
            prefixes = list(checkpoints.values())
            if prefixes:
                newest_record = prefixes[-1] + RECORD_SUFFIX
                commit_record = files.read_json(newest_record) or {}
            adopted_id = commit_record.get("run_id")
            run_id = adopted_id if isinstance(adopted_id, str) else ""
            run_id = run_id or uuid.uuid4().hex

        starts = before.get("starts")
        earlier_starts = starts if isinstance(starts, list) else []
        now = datetime.now(UTC)
        setup = setup or {}
        start = {
            "time": now.isoformat(timespec="seconds"),
            "mode": mode,
            "host": socket.gethostname(),
            "git": setup.get("git", {}),
        }
        record = {
            "run_id": run_id,
            "experiment": experiment,
            "mode": mode,
            "command": sys.argv,
            "starts": [*earlier_starts, start],
            **get_versions(),
            "platform": platform.platform(),
            "threads": dict(threads or {}),
            "random_seed": config.runtime.random_seed,
            **setup,
            "installed": dict(list_installed_packages()),
        }
        differences = describe_differences(before, record)
        if has_begun(self.path):
            # Without a checkpoint the run begins again, with any code.
            differences += describe_code_changes(before, record)
        for difference in differences:
            _LOG.warning("%s; results may differ", difference)

        files.write_json(self.manifest_path, record, point="manifest")
        self._run_id = run_id
        for name, text in extra_files.items():
            path = os.path.join(self.path, name)
            files.write_text(path, text)

    @property
    def run_id(self) -> str:
        """The identity of the run, "" while it has none.

        It comes from the manifest that this process has written, else from the manifest in the
        folder.
        """
        return self._run_id or read_run_id(self.path)

    def check_manifest(self) -> None:
        """Checks that the folder still contains a manifest, for a process that has seen one there.

        Raises:
          StorageError: when the manifest is gone.
        """
        try:
            os.stat(self.manifest_path)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"{self.path} was moved or removed during the run: its manifest.json is gone. Move"
                " the folder back, or give its new path, and run the same command again"
            ) from None
        except OSError:
            # This proves nothing, and a write will fail.
            pass

    def check_run_id(self) -> None:
        """Checks that the folder still contains the manifest that `write_record` has written.

        Raises:
          StorageError: when the manifest is gone, or is that of another run.
        """
        if not self._run_id:
            return

        self.check_manifest()
        run_id = read_run_id(self.path)
        if run_id not in ("", self._run_id):
            raise StorageError(
                f"{self.path} contains another run now, as its manifest.json shows: the folder of"
                " this run was moved or removed. Run the same command again with its new path, or"
                " with another model_dir"
            )

    @contextlib.contextmanager
    def explain_storage_errors(self) -> Iterator[None]:
        """Explains a StorageError whose cause is that the folder was moved.

        It also removes an empty folder that the failed write left at the old place.

        Raises:
          StorageError: when a write failed in this context. It is the error of `check_run_id`
            where that has one, or else the error of the write.
        """
        try:
            yield
        except StorageError:
            # TensorFlow makes a folder again that was moved while it wrote; it is empty by now.
            for folder in (self.best_dir, self.path):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            self.check_run_id()
            raise

    def is_recorded(self) -> bool:
        """Whether a run is recorded here, which can be resumed."""
        return os.path.exists(self.params_path)

    def list_missing_records(self, names: Iterable[str]) -> list[str]:
        """Returns the paths of the missing files among those of write_record and the log.

        Args:
          names: The names of the further files.
        """
        extra_paths = [os.path.join(self.path, name) for name in names]
        paths = [self.params_path, self.manifest_path, self.log_path, *extra_paths]
        return [path for path in paths if not os.path.exists(path)]

    def remove_records(self, paths: Iterable[str]) -> None:
        """Removes the records at `paths`, for a run that never took a step.

        Does nothing if there is a checkpoint, or if the folder contains another run.
        """
        if has_begun(self.path) or read_run_id(self.path) != self._run_id:
            return
        for path in paths:
            if os.path.exists(path):
                os.remove(path)

    def write_final(
        self,
        step: int,
        mode: str,
        metrics: Mapping[str, object],
        best: BestOwner | None,
        stop_reason: str = "",
        time_account: Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Writes final.json and returns it: the final metrics of a run, and the best value, if any.

        Args:
          step: The last step.
          mode: The mode of the run.
          metrics: The metrics of the last evaluation.
          best: The owner of the best checkpoints. None if the run keeps none.
          stop_reason: Why the run ended before the last step of its config. "" if it did not.
          time_account: The time account of the process that ended the run. None if it is not known.
        """
        record: dict[str, Any] = {"step": step, "mode": mode, "metrics": metrics}
        if stop_reason:
            record["stopped"] = stop_reason
        if best is not None and best.best is not None:
            metric, value, best_step = best.best
            record["best"] = {"metric": metric, "value": value, "step": best_step}
        if time_account:
            record["time"] = time_account
        files.write_json(self.final_path, record, point="final")
        return record

    def read_final(self) -> dict[str, Any] | None:
        """Returns the content of final.json: step, mode, metrics and more.

        Returns None if the file is missing. A damaged file counts as missing, with a warning.
        """
        if not os.path.exists(self.final_path):
            return None
        try:
            with open(self.final_path, "rb") as stream:
                final = files.parse_json(stream.read())
            required_values = {
                "step": int(final["step"]),
                "mode": str(final["mode"]),
                "metrics": dict(final["metrics"]),
            }
        except (OSError, ValueError, TypeError, KeyError) as error:
            _warn_once(
                f"{self.final_path} cannot be read ({error!r}); the run counts as not finished"
            )
            return None
        return {**final, **required_values}

    def read_stopped_step(self) -> int | None:
        """Returns the step at which a callback or early stopping ended the run.

        Returns None if none of them did.
        """
        final = self.read_final() or {}
        return final["step"] if final.get("stopped") else None

    def read_last_step(self, default: int | str) -> int | None:
        """Returns the last step of the run that trains here.

        Returns None if the run trains until the data ends, or if the step is not known. Of a run
        that counts epochs it is the number of steps in the manifest.

        Args:
          default: The value of trainer.train_steps if params.yaml has none.
        """
        try:
            steps = self._read_trainer_value("train_steps")
        except (ConfigError, StorageError, KeyError, TypeError):
            steps = default
        if not isinstance(steps, int):
            # Epochs: the manifest contains the steps that the run has made of them.
            steps = read_manifest(self.path).get("train_steps")
        if isinstance(steps, int) and steps >= 0:
            return steps
        return None

    def read_steps_per_epoch(self) -> int | None:
        """Returns trainer.steps_per_epoch of the run that trains here.

        Returns None if params.yaml has no such value.
        """
        try:
            return int(self._read_trainer_value("steps_per_epoch"))
        except (ConfigError, StorageError, KeyError, TypeError, ValueError):
            return None

    def _read_trainer_value(self, name: str) -> Any:
        if not os.path.isfile(self.params_path):
            raise KeyError(name)
        text = _read_params(self.params_path)
        document = yaml_loader.parse(text, self.params_path, is_trusted=True)
        return document.values["trainer"][name]

    def check_experiment(self, experiment: str) -> None:
        """Raises UsageError when model_dir contains a run of another experiment."""
        recorded_experiment = read_manifest(self.path).get("experiment")
        if recorded_experiment and experiment and recorded_experiment != experiment:
            raise UsageError(
                f"model_dir: {self.path} holds a run of the experiment {recorded_experiment!r},"
                f" not of {experiment!r}; give another folder"
            )


def check_model_dir(
    directory: RunDirectory, config: ExperimentConfig, experiment: str, allowed_paths: Iterable[str]
) -> list[Change]:
    """Checks before a training run that model_dir can be written and fits the config.

    The run in it, if any, has to be one of this config.

    Args:
      directory: The folder of the run.
      config: The config of the run.
      experiment: The registered name of the experiment.
      allowed_paths: Paths of config values that may differ from those of the run in the folder.

    Returns:
      The safe or allowed changes of the config since that run was started.

    Raises:
      StorageError: when model_dir cannot be written, or its params.yaml cannot be read.
      UsageError: when its path cannot be that of a checkpoint, it contains another experiment, or a
        change is dangerous and not allowed.
    """
    absolute_path = os.path.abspath(directory.path)
    wildcards = [character for character in "*?[" if character in absolute_path]
    if wildcards:
        listed_wildcards = " and ".join(wildcards)
        raise UsageError(
            f"model_dir={directory.path!r}: TensorFlow reads {listed_wildcards} in the path"
            " of a checkpoint as a pattern, and would not find the checkpoint again; give a path"
            " without *, ? and ["
        )

    for path in (
        directory.params_path,
        directory.manifest_path,
        directory.final_path,
        directory.metrics_path,
        directory.ledger_path,
    ):
        # To read a FIFO or a device may never end.
        is_readable = os.path.isfile(path) or os.path.isdir(path)
        if os.path.exists(path) and not is_readable:
            raise StorageError(f"{path} is not a file; remove it, or give another model_dir")
    files.check_writable(directory.path)
    files.check_writable(directory.best_dir)

    directory.check_experiment(experiment)
    if not (directory.is_recorded() and has_begun(directory.path)):
        return []
    recorded_params = _read_params(directory.params_path)
    return check_resume(recorded_params, config, tuple(allowed_paths))


def read_manifest(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the manifest of the run in `model_dir`, {} if there is none."""
    path = os.path.join(model_dir, "manifest.json")
    return files.read_json(path) or {}


def read_run_id(model_dir: str) -> str:
    """Returns the identity of the run in `model_dir`, from its manifest, or "" without one."""
    manifest = read_manifest(model_dir)
    run_id = manifest.get("run_id")
    if not isinstance(run_id, str):
        return ""
    if re.fullmatch(r"\w+", run_id):
        return run_id
    return ""


def read_layer_names(prefix: str) -> dict[str, str] | None:
    """Reads the names that the user's program gives to the variables of a checkpoint.

    Keras numbers layers of a process, such as `dense_7`, so that a checkpoint may have another
    number than the program. The manifest of the run records both.

    Args:
      prefix: The prefix of a checkpoint or of best weights.

    Returns:
      The program's names, by those of the checkpoint. None if the checkpoint is not in the folder
      of a run with a commit record beside it, or if the run did not record names.
    """
    folder = os.path.dirname(os.path.abspath(prefix))
    has_record = os.path.exists(prefix + RECORD_SUFFIX)
    folder_count = _FOLDERS_UP if has_record else 0
    for _ in range(folder_count):
        if manifest := read_manifest(folder):
            names = manifest.get("layer_names")
            return names if isinstance(names, dict) else None
        folder = os.path.dirname(folder)
    return None


def read_thread_counts(model_dir: str) -> dict[str, int] | None:
    """Returns the thread counts that the run in `model_dir` was started with.

    Returns None without a valid record of them.
    """
    manifest = read_manifest(model_dir)
    threads = manifest.get("threads")
    if not isinstance(threads, dict):
        return None
    for count in threads.values():
        # A bool is an int for Python.
        if type(count) is not int or count < 0:
            return None
    return threads


def count_starts(model_dir: str | os.PathLike[str]) -> int:
    """Returns the number of starts and resumes of the run in `model_dir`, by its manifest.

    Returns 0 without a manifest.
    """
    manifest = read_manifest(model_dir)
    starts = manifest.get("starts")
    if isinstance(starts, list):
        return len(starts)
    return 0


def has_begun(model_dir: str) -> bool:
    """Whether `model_dir` contains a checkpoint, or the record of a fine-tuning."""
    folder = glob.escape(model_dir)
    patterns = ("ckpt-*.index", f"{FINETUNE}*/params.yaml")
    for pattern in patterns:
        path_pattern = os.path.join(folder, pattern)
        if glob.glob(path_pattern):
            return True
    return False


def get_versions() -> dict[str, Any]:
    """Returns the versions of Python and of the packages, for the manifest."""
    return {
        "python": platform.python_version(),
        "packages": {
            "trainer_kit": __version__,
            **{name: _version(name) for name in PACKAGES},
        },
    }


@functools.cache
def list_installed_packages() -> tuple[tuple[str, str], ...]:
    """Returns the names and versions of all installed packages, in the order of their names."""
    packages = []
    for distribution in metadata.distributions():
        # Each access to the metadata parses it again. A damaged package may have no name.
        description = distribution.metadata
        name = str(description["Name"])
        version = str(description["Version"])
        packages.append((name, version))
    return tuple(sorted(packages))


def describe_differences(before: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Returns a phrase for each difference of two manifests that may change a run's last bits."""
    names = ("python", "platform", "packages", "threads", "replicas", "workers", "device")
    differences = []
    for name in (*names, "device_name"):
        if name not in before or name not in now:
            continue
        old_value = before[name]
        new_value = now[name]
        if old_value != new_value:
            differences.append(f"{name}: {old_value} when the run was started, {new_value} now")
    return differences


def compute_config_hash(config: ExperimentConfig, validation_set: str = "") -> str:
    """Returns a hash of the config values that the result of an evaluation depends on.

    The number of training steps and the training data are not among them, so a longer run is not
    evaluated again.

    Args:
      config: The config of the run.
      validation_set: The name of the evaluated set, if there are several. The other sets are left
        out.

    Returns:
      Twelve hex digits.
    """
    import hashlib

    # With overfit_batches, evaluations use the training data.
    overfit = getattr(config.trainer, "overfit_batches", None)
    task_values = _select_task_values(config.task, validation_set)
    if overfit:
        task_values["train_data"] = config.task.as_dict()["train_data"]
    task_values = _remove_later_fields(task_values)

    # The number of batches of this validation set.
    steps = config.trainer.validation_steps
    if validation_set:
        set_options = config.trainer.validation_sets.get(validation_set)
        if set_options is not None and set_options.steps is not None:
            steps = set_options.steps

    # The averaged weights, of one optimizer or of several.
    average = _select_average_values(config.trainer.optimizer_config)
    averages: dict[str, Any] = {}
    for name, optimizer_config in config.trainer.optimizers.items():
        if ema := _select_average_values(optimizer_config):
            averages[name] = ema
    if averages:
        average = averages

    values = [task_values, average, steps, config.runtime.mixed_precision_dtype]
    if overfit:
        values.append({"overfit_batches": overfit})

    # Further sections, such as tasks that are only evaluated.
    more_sections = config.as_dict()
    for name in _SECTIONS:
        more_sections.pop(name, None)
    if more_sections:
        values.append(more_sections)
    text = yaml_loader.dump({"evaluation": values})
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()[:12]


def _select_task_values(task: TaskConfig, validation_set: str) -> dict[str, Any]:
    """Returns the section `task` as far as an evaluation depends on it."""
    if isinstance(task, MultiTaskConfig):
        return task.get_evaluation_values(validation_set)
    values: dict[str, Any] = task.as_dict()
    values.pop("train_data", None)
    if validation_set and validation_set in get_validation_sets(task):
        data_sections = values["validation_data"]
        values["validation_data"] = {validation_set: data_sections[validation_set]}
    return values


def _select_average_values(options: OptimizationConfig) -> dict[str, Any] | None:
    """Returns the section `ema` as far as evaluations depend on it.

    Fields that earlier releases did not have are left out unless they are used: the hash stays
    theirs.
    """
    average: dict[str, Any] | None = options.as_dict().get("ema")
    if average is None:
        return None

    more_decays = average.pop("more_decays", {})
    evaluated = list(average.pop("evaluate", ()))
    if evaluated not in ([], [AVERAGE]):
        average["evaluate"] = evaluated
        average["more_decays"] = {
            name: more_decays[name] for name in evaluated if name in more_decays
        }
    return average


def _remove_later_fields(values: Mapping[str, object]) -> dict[str, Any]:
    """Leaves out fields whose values mean the same as their absence in earlier releases.

    So the hash stays that of earlier releases.
    """
    later_fields = (("dataset", {"type": None}), ("data_is_sharded", False))
    remaining = {}
    for name, value in values.items():
        if (name, value) in later_fields:
            continue
        if isinstance(value, dict):
            value = _remove_later_fields(value)
        remaining[name] = value
    return remaining


def _read_params(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"it is not text in UTF-8 ({error})"
        raise StorageError(
            f"{path}, the config that the run in this folder was started with, cannot be read:"
            f" {reason}; restore it, or start in another model_dir"
        ) from error


# A sidecar reads final.json again and again.
@functools.cache
def _warn_once(text: str) -> None:
    _LOG.warning("%s", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
