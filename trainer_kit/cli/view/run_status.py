"""Reads the state of a run from its files, from outside the run and without TensorFlow.

Files that are missing, half written or foreign are left out, so that a run that has just begun, or
was written by another version, can be read too. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer_kit import files
from trainer_kit.config.schema.evaluation import BestCheckpointConfig
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import StorageError, UsageError, suggest_paths
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.evals.run_summary import is_run_folder, read_params

# The largest number of names in a message.
_MAX_LISTED_NAMES = 12


@dataclass(frozen=True)
class Settings:
    """The settings in params.yaml that a viewer needs. Missing ones have the config's defaults.

    Attributes:
      metric: The metric that decides what is best. "" if there is none.
      comparison: "higher" or "lower": which value is better.
      best_folder: The name of the best checkpoint's folder. "" if there is none.
      named_criteria: The criteria of trainer.best_checkpoints by name.
    """

    metric: str
    comparison: str
    best_folder: str
    named_criteria: Mapping[str, Criterion]


def require_folder(argument: str, text: str) -> Path:
    """Returns the path of a local folder. A leading `~` is the home of the user.

    Args:
      argument: The name of the argument, for messages.
      text: Its value.

    Raises:
      UsageError: when there is no such folder, or it is a remote one.
      StorageError: when it cannot be read.
    """
    if files.is_remote(text):
        raise UsageError(
            f"{argument}: {text!r} is a remote folder; give the path that it is mounted at"
        )
    folder = Path(text).expanduser()
    with explain_read_errors(folder):
        if not folder.exists():
            names = [path.name for path in list_folders(folder.parent)]
            suggestion = suggest_paths(folder, names, "folders")
            raise UsageError(f"{argument}: there is no folder {text}; {suggestion}")
        if not folder.is_dir():
            raise UsageError(f"{argument}: {text} is a file; give a folder")
        os.listdir(folder)
    return folder


def require_run(model_dir: str) -> Path:
    """Returns `model_dir` as a path, after checking that it is the folder of a run.

    Raises:
      UsageError: when it is not a folder or contains no run. The message says what it contains.
      StorageError: when it cannot be read.
    """
    folder = require_folder("MODEL_DIR", model_dir)
    if is_run_folder(folder):
        return folder
    names = os.listdir(folder)
    content = f"it holds: {format_names(names)}"
    if any(is_run_folder(path) for path in list_folders(folder)):
        content = f"`trainer-kit runs {shlex.quote(model_dir)}` shows the runs in it"
    raise UsageError(f"MODEL_DIR: {model_dir} holds no run; {content}")


def format_names(names: Iterable[str]) -> str:
    """Returns the first `names` in sorted order, for a message, "nothing" if there are none."""
    sorted_names = sorted(names)
    text = ", ".join(sorted_names[:_MAX_LISTED_NAMES])
    return text or "nothing"


@contextlib.contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turns an OSError into a StorageError which says that `path` cannot be read."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise StorageError(f"{path} cannot be read: {reason}") from error


def read_settings(folder: Path) -> Settings:
    """Returns the settings in params.yaml.

    A missing or malformed value gets the default of the config.
    """
    params = read_params(folder / "params.yaml") or {}
    trainer = params.get("trainer")
    section = trainer if isinstance(trainer, dict) else {}
    defaults = TrainerConfig()

    metric = section.get("best_checkpoint_eval_metric")
    if not isinstance(metric, str):
        metric = defaults.best_checkpoint_eval_metric
    comparison = section.get("best_checkpoint_metric_comp")
    if comparison not in ("higher", "lower"):
        comparison = defaults.best_checkpoint_metric_comp
    best_folder = section.get("best_checkpoint_export_subdir")
    if not isinstance(best_folder, str):
        best_folder = defaults.best_checkpoint_export_subdir

    named_criteria: dict[str, Criterion] = {}
    named_sections = section.get("best_checkpoints")
    if isinstance(named_sections, dict):
        for name, fields in named_sections.items():
            # A FieldError is a ValueError.
            with contextlib.suppress(ValueError, TypeError):
                options = BestCheckpointConfig(**fields)
                named_criteria[str(name)] = Criterion(
                    options.metric, options.metric_comp, options.keep, options.min_delta
                )
    return Settings(
        metric=metric,
        comparison=comparison,
        best_folder=best_folder,
        named_criteria=named_criteria,
    )


def list_folders(folder: Path) -> list[Path]:
    """Returns the folders in a folder, without hidden ones. [] if it cannot be read."""
    folders = []
    # The folder may not exist, or not be readable.
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            is_hidden = path.name.startswith(".")
            if path.is_dir() and not is_hidden:
                folders.append(path)
    return sorted(folders)
