"""Finds a checkpoint of a run by its name or step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.run_files import BEST_CHECKPOINTS
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.errors import UsageError, find_similar_names, suggest_names
from trainer_kit.evals.best.info_json import INFO, read_info
from trainer_kit.evals.checkpoint_selection import find_folder_checkpoint, find_newest_checkpoint
from trainer_kit.process.run_directory import RunDirectory

_BEST_PREFIX = "best:"


def resolve_run_checkpoint(
    run_dir: Path, which: Any, trainer_config: TrainerConfig, resolve_path: Callable[[str], str]
) -> str:
    """Returns the prefix of a run's checkpoint.

    Args:
      run_dir: The run's folder.
      which: "best", "best:NAME", "latest", a step, as a number or as "ckpt-<step>", or a path.
      trainer_config: The run's trainer config.
      resolve_path: Returns the prefix for a path.

    Raises:
      UsageError: when there is no such checkpoint; the message lists the existing ones.
      StorageError: when all checkpoints are damaged.
    """
    which = which.removeprefix("ckpt-") if isinstance(which, str) else which
    there = complete_checkpoints(os.fspath(run_dir))
    listed = (
        f"there are {', '.join(map(str, there))}" if there else f"{run_dir} holds no checkpoint"
    )
    if isinstance(which, os.PathLike) or (isinstance(which, str) and os.sep in which):
        return resolve_path(os.fspath(which))
    if which == "latest":
        if (newest := find_newest_checkpoint(os.fspath(run_dir))) is None:
            raise UsageError(
                f"there is no latest checkpoint: {run_dir} holds none{_describe_best_weights(run_dir)}"
            )
        return newest
    if which == "best" or str(which).startswith(_BEST_PREFIX):
        return _resolve_best(run_dir, str(which), trainer_config)
    if isinstance(which, bool) or not (isinstance(which, int) or str(which).isdigit()):
        names = [
            "best",
            "latest",
            *(f"{_BEST_PREFIX}{name}" for name in trainer_config.best_checkpoints),
        ]
        meanings = {**{name: name for name in names}, "newest": "latest"}
        near = dict.fromkeys(meanings[word] for word in find_similar_names(str(which), meanings))
        did_you_mean = f"did you mean {' or '.join(near)}? " if near else ""
        raise UsageError(
            f"which: {which!r} is not a checkpoint; {did_you_mean}give {', '.join(names)}, a step"
            f" or a path; {listed}"
        )
    if int(which) not in there:
        raise UsageError(
            f"there is no checkpoint of step {which}; {listed}{_describe_best_weights(run_dir)}"
        )
    return there[int(which)]


def _resolve_best(run_dir: Path, which: str, trainer_config: TrainerConfig) -> str:
    directory = RunDirectory(os.fspath(run_dir), trainer_config)
    name = which.removeprefix("best").removeprefix(":")
    if name and name not in trainer_config.best_checkpoints:
        known = suggest_names(name, list(trainer_config.best_checkpoints))
        raise UsageError(f"the run keeps no best checkpoint named {name!r}; {known}")
    place = os.path.join(directory.output_named_bests_dir, name) if name else directory.best_dir
    found = find_folder_checkpoint(place)
    if found is None:
        raise UsageError(
            f'there is no best checkpoint: {place} holds none{_describe_best_weights(run_dir)}; "latest" is another'
            " choice"
        )
    return found


def _describe_best_weights(run_dir: Path) -> str:
    """Lists the best weights that a run and its sidecars keep, for a message."""
    patterns = ("*", f"{BEST_CHECKPOINTS}/*", "evals/*/*", f"evals/*/{BEST_CHECKPOINTS}/*")
    files = [path for pattern in patterns for path in run_dir.glob(f"{pattern}/{INFO}")]
    places = [path.parent for path in files if read_info(str(path.parent), quiet=True)]
    found = []
    for place in sorted(places):
        named = place.parent == run_dir / BEST_CHECKPOINTS
        own = place.parent == run_dir
        found.append(f'"best:{place.name}"' if named else '"best"' if own else str(place))
    return f"; best weights: {', '.join(found)}" if found else ""
