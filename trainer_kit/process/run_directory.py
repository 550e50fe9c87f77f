"""The files of a run beside its checkpoints: params.yaml, manifest.json, final.json, and where each thing lies."""

from __future__ import annotations

import functools
import glob
import logging
import os
import platform
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import RECORD, complete_checkpoints
from trainer_kit.config.resume_check import Change, check_resume
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.serialize import write_params
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, StorageError, UsageError
from trainer_kit.folder_identity import lost_folder

FINETUNE = "finetune-"  # and the step: the folder of a run in continuous_train_and_eval
PACKAGES = ("trainer_kit", "tensorflow", "keras", "tf-models-official", "numpy")
_SECTIONS = ("task", "trainer", "runtime")
_LOG = logging.getLogger(__name__)


class RunDirectory:
    """Names and writes the files in `model_dir`. No TensorFlow.

    Args:
      model_dir: of the run, a local folder.
      trainer: the config's section, which names the folders of the best checkpoint and of validation summaries.
      sidecar: name of an evaluation beside the run; what it writes lies apart from the run's own files.

    Raises:
      UsageError: when model_dir is a remote folder.
    """

    def __init__(self, model_dir: str, trainer: TrainerConfig, sidecar: str = "") -> None:
        if model_dir is None:
            raise UsageError("model_dir must be specified, but got None")
        if files.is_remote(model_dir):
            raise UsageError(
                f"--model_dir: {model_dir!r} is a remote folder; only local and mounted folders are allowed: "
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

    def write_record(
        self,
        config: ExperimentConfig,
        experiment: str,
        mode: str,
        texts: Mapping[str, str],
        threads: Mapping[str, int] | None = None,
    ) -> None:
        """Writes params.yaml, manifest.json and the given further files, name -> text; removes an older final.json.

        Thread counts are what a resume goes by.
        What resumes the run on another platform or with other versions is told: it may compute other last bits.
        """
        if os.path.exists(self.final):
            os.remove(self.final)
        before = files.read_json(self.manifest) or {}
        write_params(self.params, config)
        starts = before.get("starts")
        now = {"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), "mode": mode}
        record = {
            "run_id": read_run_id(self.path) or _adopted_run_id(self.path) or uuid.uuid4().hex,
            "experiment": experiment,
            "mode": mode,
            "command": sys.argv,
            "starts": [*(starts if isinstance(starts, list) else []), now],
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in PACKAGES},
            "threads": dict(threads or {}),
            "random_seed": config.runtime.random_seed,
            "executor": _executor(before, config),
        }
        _tell_differences(before, record)
        files.write_json(self.manifest, record, point="manifest")
        for name, text in texts.items():
            files.write_text(os.path.join(self.path, name), text)

    def keep_executor(self, name: str) -> None:
        """Notes in the manifest which executor runtime.executor=auto stands for in this run."""
        files.write_json(self.manifest, {**(files.read_json(self.manifest) or {}), "executor": name}, point="manifest")

    def is_recorded(self) -> bool:
        """Whether a run has been recorded here, which may be gone on with."""
        return os.path.exists(self.params)

    def missing_records(self, names: Iterable[str]) -> list[str]:
        """Returns the paths that write_record, with the further files `names`, would write and that are not there."""
        records = (self.params, self.manifest, *(os.path.join(self.path, name) for name in names))
        return [path for path in records if not os.path.exists(path)]

    def withdraw_record(self, paths: Iterable[str]) -> None:
        """Removes the records at `paths`, for a run that never took a step, unless there is a checkpoint."""
        if has_begun(self.path) or lost_folder(self.path):
            return
        for path in paths:
            if os.path.exists(path):
                os.remove(path)

    def write_final(
        self,
        step: int,
        mode: str,
        metrics: Mapping[str, Any],
        exporter: Any,
        stopped: str = "",
        time: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes final.json: what the finished run ended with, and the best that `exporter`, if any, has kept.

        Args:
          step: the last one.
          mode: of the run.
          metrics: of the last evaluation.
          exporter: with the best so far.
          stopped: why it ended before the steps that its config asks for; "" if it did not.
          time: what the process that ends it has spent its time on, if that is known.
        """
        record: dict[str, Any] = {"step": step, "mode": mode, "metrics": metrics}
        if stopped:
            record["stopped"] = stopped
        best = getattr(exporter, "best", None)
        if best is not None:
            record["best"] = {"metric": best[0], "value": best[1], "step": best[2]}
        if time:
            record["time"] = time
        files.write_json(self.final, record, point="final")

    def read_final(self) -> dict[str, Any] | None:
        """Returns final.json: step, mode, metrics and more; None if there is none or it cannot be read (a warning)."""
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

    def train_steps(self, default: int) -> int:
        """Returns trainer.train_steps of the run that trains here; `default` when params.yaml does not tell."""
        if not os.path.exists(self.params):
            return default
        try:
            values = yaml_loader.parse(_read_params(self.params), self.params, own=True).values
            return int(values["trainer"]["train_steps"])
        except (ConfigError, StorageError, KeyError, TypeError, ValueError):
            return default

    def check_experiment(self, experiment: str) -> None:
        """Raises UsageError when model_dir holds a run of another experiment."""
        manifest = files.read_json(self.manifest) or {}
        there = manifest.get("experiment")
        if there and experiment and there != experiment:
            raise UsageError(
                f"--model_dir: {self.path} holds a run of the experiment {there!r}, not of {experiment!r}; "
                "give another folder"
            )


def check_model_dir(
    directory: RunDirectory, config: ExperimentConfig, experiment: str, allowed: Iterable[str]
) -> list[Change]:
    """Before a training run: can model_dir be written, and does the run in it, if any, fit this config?

    Returns:
      The changes since that run was started, which are safe or allowed.

    Raises:
      StorageError: when it cannot be written, or its params.yaml cannot be read.
      UsageError: when it holds another experiment, or a change is dangerous and not allowed.
    """
    files.check_writable(directory.path)
    directory.check_experiment(experiment)
    if not (directory.is_recorded() and has_begun(directory.path)):
        return []
    kept = (kept_fuse_steps(directory.path), kept_executor(directory.path))
    return check_resume(_read_params(directory.params), config, tuple(allowed), *kept)


def read_run_id(model_dir: str) -> str:
    """Returns the identity of the run in `model_dir`, from its manifest; "" when it has none (yet)."""
    run_id = (files.read_json(os.path.join(model_dir, "manifest.json")) or {}).get("run_id")
    return run_id if isinstance(run_id, str) and re.fullmatch(r"\w+", run_id) else ""


class RunIdentity:
    """Returns the identity of the run in `model_dir` when it is called; reads it until there is one."""

    def __init__(self, model_dir: str) -> None:
        self._model_dir, self._run_id = model_dir, ""

    def __call__(self) -> str:
        """Returns the identity; "" while the run has none."""
        self._run_id = self._run_id or read_run_id(self._model_dir)
        return self._run_id


def _adopted_run_id(model_dir: str) -> str:
    """Returns the identity in the record of the newest checkpoint, for a run that goes on from it without a manifest.

    So checkpoints that were copied to a folder of their own are those of the run that goes on there.
    """
    newest = next(reversed(complete_checkpoints(model_dir).values()), "")
    run_id = (files.read_json(newest + RECORD) or {}).get("run_id") if newest else None
    return run_id if isinstance(run_id, str) else ""


def kept_threads(model_dir: str) -> dict[str, int] | None:
    """Returns the thread counts that the run in `model_dir` was started with; None when it does not tell."""
    threads = (files.read_json(os.path.join(model_dir, "manifest.json")) or {}).get("threads")
    whole = isinstance(threads, dict) and all(type(count) is int and count >= 0 for count in threads.values())
    return threads if whole else None


def kept_fuse_steps(model_dir: str) -> int | None:
    """Returns the number that a run begun with trainer.fuse_steps=auto, a value of earlier releases, has chosen."""
    steps = (files.read_json(os.path.join(model_dir, "manifest.json")) or {}).get("fuse_steps")
    return steps if type(steps) is int and steps > 0 else None


def kept_executor(model_dir: str) -> str | None:
    """Returns the executor that the run in `model_dir` keeps to; None when it has not chosen one."""
    name = (files.read_json(os.path.join(model_dir, "manifest.json")) or {}).get("executor")
    return name if name in ("default", "single_threaded") else None


def _executor(before: Mapping[str, Any], config: ExperimentConfig) -> str:
    """Returns the executor for the manifest; that of runs which were begun by earlier releases is the default."""
    if config.runtime.executor != "auto":
        return config.runtime.executor
    return str(before.get("executor", "default" if before else "auto"))


def count_starts(model_dir: str | os.PathLike[str]) -> int:
    """Returns how often the run in `model_dir` has begun or gone on, as its manifest tells; 0 when there is none."""
    starts = (files.read_json(os.path.join(model_dir, "manifest.json")) or {}).get("starts")
    return len(starts) if isinstance(starts, list) else 0


def has_begun(model_dir: str) -> bool:
    """Whether there is a checkpoint, or the record of a run that fine-tunes one of another run."""
    inside = glob.escape(model_dir)
    return any(glob.glob(os.path.join(inside, what)) for what in ("ckpt-*.index", f"{FINETUNE}*/params.yaml"))


def _tell_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warns when a run goes on under other versions: then its bits may differ from those of one that never stopped."""
    for name in ("python", "platform", "packages", "threads"):
        if before and before.get(name) != now[name]:
            _LOG.warning(
                "%s: %s when the run was started, %s now; results may differ", name, before.get(name), now[name]
            )


def config_hash(config: ExperimentConfig, validation_set: str = "") -> str:
    """Returns twelve hex digits that change with whatever in the config the result of an evaluation depends on.

    How long and on which batches to train is not in it: a run that is prolonged is not evaluated anew.

    Args:
      config: of the run.
      validation_set: the name of the set that is evaluated, if there are several; the others are not in it.
    """
    import hashlib

    task, steps = config.task.as_dict(), config.trainer.validation_steps
    task.pop("train_data", None)
    if validation_set:
        if validation_set in validation_sets(config.task):
            task["validation_data"] = {validation_set: task["validation_data"][validation_set]}
        own = config.trainer.validation_sets.get(validation_set)
        steps = steps if own is None or own.steps is None else own.steps
    average = config.trainer.optimizer_config.as_dict().get("ema")
    values = [task, average, steps, config.runtime.mixed_precision_dtype]
    if more := {name: value for name, value in config.as_dict().items() if name not in _SECTIONS}:
        values.append(more)  # such as tasks that are only evaluated
    return hashlib.sha256(yaml_loader.dump({"evaluation": values}).encode()).hexdigest()[:12]


def _read_params(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"it is not text in UTF-8 ({error})"
        raise StorageError(
            f"{path}, the config that the run in this folder was started with, cannot be read: {reason}; "
            "restore it, or start in another --model_dir"
        ) from error


@functools.cache
def _warn_once(text: str) -> None:
    # A sidecar asks for final.json again and again.
    _LOG.warning("%s", text)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
