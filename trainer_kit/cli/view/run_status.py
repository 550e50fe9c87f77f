"""Reads the state of a run from its files, from outside the run and without TensorFlow.

Files that are missing, half written or foreign are left out, so that a run that has just begun, or
was written by another version, can be read too. Nothing is written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer_kit import files
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import ConfigError, StorageError, UsageError, suggest_paths
from trainer_kit.evals.run_summary import is_run_folder, read_params

# The fields that decide which checkpoints are the best, and where they are.
_BEST_FIELDS = (
    "best_checkpoint_eval_metric",
    "best_checkpoint_metric_comp",
    "best_checkpoint_export_subdir",
    "best_checkpoints",
)
# The largest number of names in a message.
_MAX_LISTED_NAMES = 12


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


def read_best_options(folder: Path) -> TrainerConfig:
    """Returns a TrainerConfig with a run's settings of best checkpoints.

    A setting that is missing or wrong has its default.
    """
    params = read_params(folder / "params.yaml") or {}
    options = TrainerConfig()
    for name in _BEST_FIELDS:
        # A wrong value may be of any type, also that of the section.
        with contextlib.suppress(ConfigError, LookupError, TypeError, ValueError):
            value = params["trainer"][name]
            options = options.replace(**{name: value})
    return options


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
