"""The paths in a run's folder, and its records: params.yaml, manifest.json and final.json."""

from __future__ import annotations

import contextlib
import functools
import glob
import logging
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD, complete_checkpoints
from trainer_kit.config.resume_check import Change, check_resume
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.config.schema.optimization import AVERAGE, OptimizationConfig
from trainer_kit.config.serialize import write_params
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, StorageError, UsageError

FINETUNE = "finetune-"  # and the step: the folder of a run in continuous_train_and_eval
_FOLDERS_UP = 4  # from evals/<name>/best_ckpt to the folder of the run
PACKAGES = ("trainer_kit", "tensorflow", "keras", "tf-models-official", "numpy")
_SECTIONS = ("task", "trainer", "runtime")
_LOG = logging.getLogger(__name__)


class RunDirectory:
    """Names and writes the files in `model_dir`. Imports no TensorFlow.

    Args:
      model_dir: The folder of the run, a local one.
      trainer: The config's section, which names the folders of the best checkpoint and of validation summaries.
      sidecar: The name of a sidecar of the run, which writes to a separate folder; "" for the run itself.

    Raises:
      UsageError: when model_dir is a remote folder.
    """

    def __init__(self, model_dir: str, trainer: TrainerConfig, sidecar: str = "") -> None:
        if model_dir is None:
            raise UsageError("model_dir must be specified, but got None")
        if files.is_remote(model_dir):
            raise UsageError(
                f"model_dir: {model_dir!r} is a remote folder; only local and mounted folders are allowed: "
                "mount it (gcsfuse, s3fs, ...) and give the path of the mount"
            )
        self.evals = os.path.join(model_dir, "evals")
        own = os.path.join(self.evals, sidecar) if sidecar else ""
        self.path = model_dir
        self.own = own or model_dir
        self.best = os.path.join(model_dir, trainer.best_checkpoint_export_subdir)
        self.own_best = os.path.join(own, trainer.best_checkpoint_export_subdir) if own else self.best
        self.own_named_bests = os.path.join(self.own, BEST_CHECKPOINTS)
        self.train_summaries = os.path.join(model_dir, "train")
        self.eval_summaries = own or os.path.join(model_dir, trainer.validation_summary_subdir)
        self.training_ledger = os.path.join(self.evals, "validation.jsonl")
        self.ledger = os.path.join(self.evals, f"{sidecar}.jsonl") if sidecar else self.training_ledger
        self.metrics = os.path.join(model_dir, "metrics.jsonl")
        self.params = os.path.join(model_dir, "params.yaml")
        self.manifest = os.path.join(model_dir, "manifest.json")
        self.final = os.path.join(model_dir, "final.json")
        self._run_id = ""

    def write_record(
        self,
        config: ExperimentConfig,
        experiment: str,
        mode: str,
        texts: Mapping[str, str],
        threads: Mapping[str, int] | None = None,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes params.yaml, manifest.json and the further files `texts`, by name; removes an older final.json.

        A resumed run reuses the thread counts `threads`. A warning names each difference of platform, versions or
        threads to the first start, since the results may differ in their last bits. `setup` has the numbers of
        replicas and workers, the kind of device, what describes the data, the steps of the run,
        and what `read_layer_names` returns.
        """
        if os.path.exists(self.final):
            os.remove(self.final)
        before = read_manifest(self.path)
        write_params(self.params, config)
        run_id = read_run_id(self.path)
        if not run_id:
            # A run that resumes from copied checkpoints in another folder owns these checkpoints.
            newest = next(reversed(complete_checkpoints(self.path).values()), "")
            adopted = (files.read_json(newest + RECORD) or {}).get("run_id") if newest else None
            run_id = adopted if adopted and isinstance(adopted, str) else uuid.uuid4().hex
        starts = before.get("starts")
        now = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "mode": mode}
        record = {
            "run_id": run_id,
            "experiment": experiment,
            "mode": mode,
            "command": sys.argv,
            "starts": [*(starts if isinstance(starts, list) else []), now],
            **versions(),
            "platform": platform.platform(),
            "threads": dict(threads or {}),
            "random_seed": config.runtime.random_seed,
            **(setup or {}),
        }
        for difference in differences(before, record):
            _LOG.warning("%s; results may differ", difference)
        files.write_json(self.manifest, record, point="manifest")
        self._run_id = run_id
        for name, text in texts.items():
            files.write_text(os.path.join(self.path, name), text)

    @property
    def run_id(self) -> str:
        """The identity of the run, from the manifest that this process has written, else from the one that is there.

        It is "" while the run has none.
        """
        return self._run_id or read_run_id(self.path)

    def check_manifest(self) -> None:
        """Checks that the folder still contains a manifest, for a process that has seen one there.

        Raises:
          StorageError: when the manifest is gone.
        """
        try:
            os.stat(self.manifest)
        except (FileNotFoundError, NotADirectoryError):
            raise StorageError(
                f"{self.path} was moved or removed during the run: its manifest.json is gone. Move the "
                "folder back, or give its new path, and run the same command again"
            ) from None
        except OSError:
            pass  # this proves nothing, and a write will fail

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
                f"{self.path} contains another run now, as its manifest.json shows: the folder of this "
                "run was moved or removed. Run the same command again with its new path, or with "
                "another model_dir"
            )

    @contextlib.contextmanager
    def explain_storage_errors(self) -> Iterator[None]:
        """Explains a StorageError whose cause is that the folder was moved, and leaves no empty folder behind.

        Raises:
          StorageError: when a write failed in this context: that of `check_run_id`, or else the one of the write.
        """
        try:
            yield
        except StorageError:
            # TensorFlow makes a folder again that was moved while it wrote; it is empty by now.
            for folder in (self.best, self.path):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            self.check_run_id()
            raise

    def is_recorded(self) -> bool:
        """Whether a run is recorded here, which can be resumed."""
        return os.path.exists(self.params)

    def missing_records(self, names: Iterable[str]) -> list[str]:
        """Returns the missing ones of the files that write_record writes, with the further files `names`."""
        records = (self.params, self.manifest, *(os.path.join(self.path, name) for name in names))
        return [path for path in records if not os.path.exists(path)]

    def withdraw_record(self, paths: Iterable[str]) -> None:
        """Removes the records at `paths`, for a run that never took a step, unless there is a checkpoint."""
        if has_begun(self.path) or read_run_id(self.path) != self._run_id:
            return
        for path in paths:
            if os.path.exists(path):
                os.remove(path)

    def write_final(
        self,
        step: int,
        mode: str,
        metrics: Mapping[str, Any],
        best: Any,
        stopped: str = "",
        time: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Writes final.json and returns it: the final metrics of a run, and the best value, if any.

        Args:
          step: The last step.
          mode: The mode of the run.
          metrics: The metrics of the last evaluation.
          best: The owner of the best checkpoints; None if the run keeps none.
          stopped: Why the run ended before the last step of its config; "" if it did not.
          time: The time account of the process that ended the run; None: not known.
        """
        record: dict[str, Any] = {"step": step, "mode": mode, "metrics": metrics}
        if stopped:
            record["stopped"] = stopped
        if best is not None and best.best is not None:
            metric, value, best_step = best.best
            record["best"] = {"metric": metric, "value": value, "step": best_step}
        if time:
            record["time"] = time
        files.write_json(self.final, record, point="final")
        return record

    def read_final(self) -> dict[str, Any] | None:
        """Returns final.json: step, mode, metrics and more; None if it is missing or, with a warning, damaged."""
        if not os.path.exists(self.final):
            return None
        try:
            with open(self.final, "rb") as stream:
                final = files.parse_json(stream.read())
            known = {key: kind(final[key]) for key, kind in (("step", int), ("mode", str), ("metrics", dict))}
        except (OSError, ValueError, TypeError, KeyError) as error:
            _warn_once(f"{self.final} cannot be read ({error!r}); the run counts as not finished")
            return None
        return {**final, **known}

    def stopped_step(self) -> int | None:
        """Returns the step at which a callback or early stopping ended the run; None if none of them did."""
        final = self.read_final() or {}
        return final["step"] if final.get("stopped") else None

    def last_step(self, default: int | str) -> int | None:
        """Returns the last step of the run that trains here; None if it trains until the data ends, or is not known.

        Of a run that counts epochs it is the number of steps in the manifest.

        Args:
          default: The value of trainer.train_steps if params.yaml has none.
        """
        try:
            steps = self._trainer_value("train_steps")
        except (ConfigError, StorageError, KeyError, TypeError):
            steps = default
        if not isinstance(steps, int):  # epochs: the manifest has what the run has made of them
            steps = read_manifest(self.path).get("train_steps")
        return steps if isinstance(steps, int) and steps >= 0 else None

    def steps_per_epoch(self) -> int | None:
        """Returns trainer.steps_per_epoch of the run that trains here; None if params.yaml has no such value."""
        try:
            return int(self._trainer_value("steps_per_epoch"))
        except (ConfigError, StorageError, KeyError, TypeError, ValueError):
            return None

    def _trainer_value(self, name: str) -> Any:
        if not os.path.isfile(self.params):
            raise KeyError(name)
        return yaml_loader.parse(_read_params(self.params), self.params, own=True).values["trainer"][name]

    def check_experiment(self, experiment: str) -> None:
        """Raises UsageError when model_dir holds a run of another experiment."""
        there = read_manifest(self.path).get("experiment")
        if there and experiment and there != experiment:
            raise UsageError(
                f"model_dir: {self.path} holds a run of the experiment {there!r}, not of {experiment!r}; "
                "give another folder"
            )


def check_model_dir(
    directory: RunDirectory, config: ExperimentConfig, experiment: str, allowed: Iterable[str]
) -> list[Change]:
    """Checks before a training run that model_dir can be written and that the run in it, if any, fits this config.

    Returns:
      The safe or allowed changes of the config since that run was started.

    Raises:
      StorageError: when model_dir cannot be written, or its params.yaml cannot be read.
      UsageError: when its path cannot be that of a checkpoint, it holds another experiment, or a change is dangerous
        and not allowed.
    """
    if found := [one for one in "*?[" if one in os.path.abspath(directory.path)]:
        raise UsageError(
            f"model_dir={directory.path!r}: TensorFlow reads {' and '.join(found)} in the path of a checkpoint as a "
            "pattern, and would not find the checkpoint again; give a path without *, ? and ["
        )
    for path in (directory.params, directory.manifest, directory.final, directory.metrics, directory.ledger):
        # To read a FIFO or a device may never end.
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            raise StorageError(f"{path} is not a file; remove it, or give another model_dir")
    files.check_writable(directory.path)
    files.check_writable(directory.best)
    directory.check_experiment(experiment)
    if not (directory.is_recorded() and has_begun(directory.path)):
        return []
    return check_resume(_read_params(directory.params), config, tuple(allowed))


def read_manifest(model_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the manifest of the run in `model_dir`; {} if there is none."""
    return files.read_json(os.path.join(model_dir, "manifest.json")) or {}


def read_run_id(model_dir: str) -> str:
    """Returns the identity of the run in `model_dir`, from its manifest; "" when it has none yet."""
    run_id = read_manifest(model_dir).get("run_id")
    return run_id if isinstance(run_id, str) and re.fullmatch(r"\w+", run_id) else ""


def read_layer_names(prefix: str) -> dict[str, str] | None:
    """Returns, for the variables in a checkpoint, their names with the user's numbers of layers, from the manifest.

    The keys are the names that the checkpoint has.

    Args:
      prefix: The prefix of a checkpoint or of best weights.

    Returns:
      None for a checkpoint without a commit record in the folder of a run, and of a run that did not record it.
    """
    folder = os.path.dirname(os.path.abspath(prefix))
    for _ in range(_FOLDERS_UP if os.path.exists(prefix + RECORD) else 0):
        if manifest := read_manifest(folder):
            names = manifest.get("layer_names")
            return names if isinstance(names, dict) else None
        folder = os.path.dirname(folder)
    return None


def kept_threads(model_dir: str) -> dict[str, int] | None:
    """Returns the thread counts that the run in `model_dir` was started with; None without a record of them."""
    threads = read_manifest(model_dir).get("threads")
    valid = isinstance(threads, dict) and all(type(count) is int and count >= 0 for count in threads.values())
    return threads if valid else None


def count_starts(model_dir: str | os.PathLike[str]) -> int:
    """Returns the number of starts and resumes in the manifest of the run in `model_dir`; 0 without a manifest."""
    starts = read_manifest(model_dir).get("starts")
    return len(starts) if isinstance(starts, list) else 0


def has_begun(model_dir: str) -> bool:
    """Whether `model_dir` holds a checkpoint, or the record of a fine-tuning."""
    inside = glob.escape(model_dir)
    return any(glob.glob(os.path.join(inside, what)) for what in ("ckpt-*.index", f"{FINETUNE}*/params.yaml"))


def versions() -> dict[str, Any]:
    """Returns the versions of Python and of the packages, for the manifest."""
    return {"python": platform.python_version(), "packages": {name: _version(name) for name in PACKAGES}}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each difference of two manifests that may change the last bits of a run."""
    return [
        f"{name}: {before[name]} when the run was started, {now[name]} now"
        for name in ("python", "platform", "packages", "threads", "replicas", "workers", "device")
        if name in before and name in now and before[name] != now[name]
    ]


def config_hash(config: ExperimentConfig, validation_set: str = "") -> str:
    """Returns twelve hex digits that change with the config values that the result of an evaluation depends on.

    The number of training steps and the training data are not among them, so a longer run is not evaluated again.

    Args:
      config: The config of the run.
      validation_set: The name of the evaluated set, if there are several; the other sets are left out.
    """
    import hashlib

    overfit = getattr(config.trainer, "overfit_batches", None)  # evaluations then use the training data
    evaluated = _evaluated_task(config.task, validation_set)
    if overfit:
        evaluated["train_data"] = config.task.as_dict()["train_data"]
    task = _without_later_fields(evaluated)
    steps = config.trainer.validation_steps
    if validation_set:
        own = config.trainer.validation_sets.get(validation_set)
        steps = steps if own is None or own.steps is None else own.steps
    average = _evaluated_average(config.trainer.optimizer_config)
    if several := {name: ema for name, one in config.trainer.optimizers.items() if (ema := _evaluated_average(one))}:
        average = several
    values = [task, average, steps, config.runtime.mixed_precision_dtype]
    if overfit:
        values.append({"overfit_batches": overfit})
    if more := {name: value for name, value in config.as_dict().items() if name not in _SECTIONS}:
        values.append(more)  # such as tasks that are only evaluated
    return hashlib.sha256(yaml_loader.dump({"evaluation": values}).encode()).hexdigest()[:12]


def _evaluated_task(task: Any, validation_set: str) -> dict[str, Any]:
    """Returns the section `task` as far as an evaluation depends on it."""
    if isinstance(task, MultiTaskConfig):
        return task.evaluated_values(validation_set)
    values: dict[str, Any] = task.as_dict()
    values.pop("train_data", None)
    if validation_set and validation_set in validation_sets(task):
        values["validation_data"] = {validation_set: values["validation_data"][validation_set]}
    return values


def _evaluated_average(options: OptimizationConfig) -> dict[str, Any] | None:
    """Returns the section `ema` as far as evaluations depend on it.

    Fields that earlier releases did not have are left out unless they are used: the hash stays theirs.
    """
    average: dict[str, Any] | None = options.as_dict().get("ema")
    if average is None:
        return None
    more, evaluated = average.pop("more_decays", {}), list(average.pop("evaluate", ()))
    if evaluated not in ([], [AVERAGE]):
        average |= {"evaluate": evaluated, "more_decays": {name: more[name] for name in evaluated if name in more}}
    return average


def _without_later_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Leaves out fields with values that mean the same as their absence in earlier releases: the hash stays theirs."""
    return {
        name: _without_later_fields(value) if isinstance(value, dict) else value
        for name, value in values.items()
        if (name, value) not in (("dataset", {"type": None}), ("data_is_sharded", False))
    }


def _read_params(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"it is not text in UTF-8 ({error})"
        raise StorageError(
            f"{path}, the config that the run in this folder was started with, cannot be read: {reason}; "
            "restore it, or start in another model_dir"
        ) from error


@functools.cache
def _warn_once(text: str) -> None:
    # A sidecar reads final.json again and again.
    _LOG.warning("%s", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
