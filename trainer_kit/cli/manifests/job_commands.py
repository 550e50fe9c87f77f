"""Finds the commands of a job: of an experiment with its config, or as a run has recorded them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer_kit import files
from trainer_kit.cli.view.run_status import sidecar_names
from trainer_kit.config.resolve import Sources
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.run.flags import attempt_flags, parse_flags

_TRAIN = ("python", "-m", "trainer_kit.train")
_PLACED = ("--mode=", "--model_dir=", "--eval_name=", "--checkpoint=")  # flags that a job sets itself
_LOG = logging.getLogger(__name__)
_UNNAMED = (
    "the command %s does not name the folder of the run, %s: in a container the program would write to its own default "
    "folder, which is lost with the container; give the folder to the program as an argument, and render that run"
)
_OUTSIDE = (
    "%s: outside of %s, which becomes the folder of the job; what is read there has to be in the image or on the "
    "volume, and what is written there is lost with the container"
)
_GRACE = 25.0  # seconds, the default of trainer.preemption_grace_seconds


@dataclass(frozen=True)
class Commands:
    """The commands of a job.

    Attributes:
      train: The training command.
      run_dir: The folder of the run's records, where the job runs.
      sidecars: The commands of its continuous_eval sidecars, by name.
      evaluate: The command that evaluates its weights; None if the run is a program's.
      grace_seconds: trainer.preemption_grace_seconds.
    """

    train: tuple[str, ...]
    run_dir: str
    sidecars: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    evaluate: tuple[str, ...] | None = None
    grace_seconds: float = _GRACE


def of_experiment(
    experiment: str,
    sources: Sources,
    modules: Sequence[str],
    trainer: TrainerConfig,
    mode: str,
    model_dir: str,
    sidecars: Sequence[str],
) -> Commands:
    """Returns the commands of an experiment.

    Args:
      experiment: The name of the experiment.
      sources: The sources of its config, whose files have to exist under the same paths where the job runs.
      modules: The values of --import_module.
      trainer: The section `trainer` of its config.
      mode, model_dir: The flags of the training command.
      sidecars: The names of its sidecars.
    """
    flags = [f"--experiment={experiment}", *(f"--import_module={one}" for one in modules)]
    for name, values in (
        ("config_file", sources.config_files), ("gin_file", sources.gin_files),
        ("gin_params", sources.gin_params), ("params_override", sources.params_overrides),
    ):  # fmt: skip
        flags += [f"--{name}={value}" for value in values]
    best = bool(trainer.best_checkpoint_eval_metric) and "eval" in mode
    return _train_commands(flags, mode, model_dir, sidecars, best, trainer.preemption_grace_seconds)


def of_run(folder: Path, job_dir: str, model_dir: str, mode: str | None, sidecars: Sequence[str]) -> Commands:
    """Returns the commands of the run in `folder`, as its manifest.json has recorded them.

    Args:
      folder: The folder of the run on this machine.
      job_dir: The same folder, or its parent if that is the folder of a job.
      model_dir: The folder of the run where the job runs.
      mode: The mode of the training command; None: as it was.
      sidecars: The names of its sidecars; empty: those that the run has.

    Raises:
      UsageError: when no command is recorded, or this release does not know its flags.
    """
    manifest = files.read_json(folder / "manifest.json") or {}
    command = manifest.get("command")
    if not isinstance(command, list) or not command:
        raise UsageError(f"{folder} has no command in manifest.json; give the name of its experiment instead")
    if command[0] in ("", "-c", "-m"):
        raise UsageError(
            f"{folder} is the run of no command that can be given again; it was python {command[0]}".strip()
        )
    command, recorded = [str(one) for one in command], _recorded_trainer(folder)
    grace = recorded.get("preemption_grace_seconds")
    seconds = float(grace) if isinstance(grace, (int, float)) else _GRACE
    if not command[0].endswith(os.path.join("trainer_kit", "train.py")):
        if mode or sidecars:
            raise UsageError(
                f"{folder} is the run of {command[0]}, a program of its own; leave --mode and --sidecar out"
            )
        root = _root(command, os.path.abspath(folder), os.path.abspath(job_dir), os.path.abspath(model_dir))
        moved, run_dir = _moved(command, root, model_dir), _below(os.path.abspath(folder), root, model_dir)
        _warn_of_lost_paths(command, root)
        return Commands(("python", *moved), run_dir, grace_seconds=seconds)
    values = parse_flags(command)
    mode = mode or values.mode
    flags = [flag for flag in attempt_flags(values) if not flag.startswith(_PLACED)]
    names = sidecars or [name for name in sidecar_names(folder) if name != "eval"]
    best = bool(recorded.get("best_checkpoint_eval_metric")) and "eval" in mode
    placed = _below(os.path.abspath(folder), os.path.abspath(job_dir), model_dir)
    return _train_commands(flags, mode, placed, names, best, seconds)


def _train_commands(
    flags: Sequence[str], mode: str, model_dir: str, sidecars: Sequence[str], best: bool, grace_seconds: float
) -> Commands:
    first, *rest = flags
    placed = f"--model_dir={model_dir}"
    return Commands(
        (*_TRAIN, first, f"--mode={mode}", placed, *rest),
        model_dir,
        {name: (*_TRAIN, first, "--mode=continuous_eval", f"--eval_name={name}", placed, *rest) for name in sidecars},
        (*_TRAIN, first, "--mode=eval", f"--checkpoint={'best' if best else 'latest'}", placed, *rest),
        grace_seconds,
    )


def _recorded_trainer(folder: Path) -> Mapping[str, Any]:
    """Returns the section `trainer` of params.yaml, or nothing if it cannot be read."""
    try:
        text = (folder / "params.yaml").read_text(encoding="utf-8")
        values: Any = yaml_loader.parse(text, "params.yaml", own=True).values
    except (OSError, ValueError, ConfigError):
        return {}
    trainer = values.get("trainer") if isinstance(values, dict) else None
    return trainer if isinstance(trainer, dict) else {}


def _root(command: Sequence[str], run: str, job_dir: str, model_dir: str) -> str:
    """Returns the folder that becomes `model_dir`: the folder of a job, or of its run if nothing knows of a job.

    A program may be told the parent of the run's folder, such as the job_dir of `Training`.
    """
    if job_dir != run or model_dir == run:
        return job_dir
    given = {os.path.abspath(argument.rpartition("=")[2]) for argument in command[1:]}
    return os.path.dirname(run) if os.path.dirname(run) in given else run


def _below(path: str, root: str, model_dir: str) -> str:
    """Returns a path in `root` as the same path in `model_dir`."""
    return model_dir + path[len(root) :]


def _moved(command: Sequence[str], root: str, model_dir: str) -> list[str]:
    """Returns a program's command with all paths in `root` moved to `model_dir`."""
    program = os.path.abspath(command[0])
    moved = [os.path.relpath(program) if program.startswith(os.getcwd() + os.sep) else command[0]]
    for argument in command[1:]:
        flag, equals, value = argument.rpartition("=")
        path = os.path.abspath(value)
        moved.append(f"{flag}{equals}{_below(path, root, model_dir)}" if _is_in(root, argument) else argument)
    return moved


def _is_in(root: str, argument: str) -> bool:
    """Whether an argument, or its value after "=", is a path in `root`."""
    value = argument.rpartition("=")[2]
    path = os.path.abspath(value)
    return bool(value) and (path == root or path.startswith(root + os.sep))


def _warn_of_lost_paths(command: Sequence[str], root: str) -> None:
    """Warns of what a program's command leaves outside of `root`, the only folder that is moved."""
    if not any(_is_in(root, one) for one in command[1:]):
        _LOG.warning(_UNNAMED, " ".join(command), root)
    outside = [one for one in command[1:] if not _is_in(root, one) and os.path.exists(one.rpartition("=")[2])]
    if outside:
        _LOG.warning(_OUTSIDE, ", ".join(outside), root)
