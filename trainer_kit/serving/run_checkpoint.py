"""Finds a checkpoint of a run by its name or step."""

from __future__ import annotations

import os
from pathlib import Path

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.best.info_json import INFO, read_info
from trainer_kit.evals.checkpoint_selection import (
    find_folder_checkpoint,
    find_newest_checkpoint,
    resolve_weights_path,
)
from trainer_kit.process.run_directory import RunDirectory

_BEST_PREFIX = "best:"


def resolve_run_checkpoint(
    run_dir: Path, which: str | int | os.PathLike[str], trainer_config: TrainerConfig
) -> str:
    """Returns the prefix of a run's checkpoint.

    Args:
      run_dir: The run's folder.
      which: "best", "best:NAME", "latest", a step, as a number or as "ckpt-<step>", or a path.
      trainer_config: The run's trainer config.

    Raises:
      UsageError: when the checkpoint does not exist. The message lists the existing ones.
      StorageError: when all checkpoints are damaged.
    """
    if isinstance(which, os.PathLike) or os.sep in str(which):
        path = which if isinstance(which, os.PathLike) else str(which)
        return resolve_weights_path(os.fspath(path))
    if isinstance(which, str):
        which = which.removeprefix("ckpt-")

    checkpoints = complete_checkpoints(os.fspath(run_dir))
    listed = f"{run_dir} has no checkpoint"
    if checkpoints:
        steps = ", ".join(map(str, checkpoints))
        listed = f"there are {steps}"

    if which == "latest":
        newest = find_newest_checkpoint(os.fspath(run_dir))
        if newest is None:
            best_weights = _describe_best_weights(run_dir)
            raise UsageError(f"there is no latest checkpoint: {run_dir} has none{best_weights}")
        return newest

    if which == "best" or str(which).startswith(_BEST_PREFIX):
        return _resolve_best(run_dir, str(which), trainer_config)

    # A bool is an int in Python, but no step.
    is_step = isinstance(which, int) or str(which).isdigit()
    if isinstance(which, bool) or not is_step:
        named_bests = [f"{_BEST_PREFIX}{name}" for name in trainer_config.best_checkpoints]
        names = ["best", "latest", *named_bests]
        raise UsageError(
            f"which: {which!r} is not a checkpoint; give {', '.join(names)}, a step or a path;"
            f" {listed}"
        )

    step = int(which)
    if step not in checkpoints:
        best_weights = _describe_best_weights(run_dir)
        raise UsageError(f"there is no checkpoint of step {which}; {listed}{best_weights}")
    return checkpoints[step]


def _resolve_best(run_dir: Path, which: str, trainer_config: TrainerConfig) -> str:
    directory = RunDirectory(os.fspath(run_dir), trainer_config)
    name = which.removeprefix("best").removeprefix(":")
    if name and name not in trainer_config.best_checkpoints:
        best_names = list(trainer_config.best_checkpoints)
        advice = suggest_names(name, best_names)
        raise UsageError(f"the run keeps no best checkpoint named {name!r}; {advice}")

    folder = directory.best_dir
    if name:
        folder = os.path.join(directory.output_named_bests_dir, name)
    checkpoint = find_folder_checkpoint(folder)
    if checkpoint is None:
        best_weights = _describe_best_weights(run_dir)
        raise UsageError(
            f"there is no best checkpoint: {folder} has none{best_weights}; or take the latest one"
        )
    return checkpoint


def _describe_best_weights(run_dir: Path) -> str:
    """Lists the best weights that a run and its sidecars keep, for a message."""
    patterns = ("*", f"{BEST_CHECKPOINTS}/*", "evals/*/*", f"evals/*/{BEST_CHECKPOINTS}/*")
    folders = []
    for pattern in patterns:
        for path in sorted(run_dir.glob(f"{pattern}/{INFO}")):
            # A damaged info.json, or one of another program, names no weights.
            if read_info(str(path.parent), quiet=True):
                folders.append(str(path.parent.absolute()))
    return f"; best weights: {', '.join(folders)}" if folders else ""
