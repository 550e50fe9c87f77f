"""Reads the experiment and the config of a run from its folder. No TensorFlow, unless a user's module imports it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from trainer_kit import files
from trainer_kit.config import discovery
from trainer_kit.config.experiments import experiments, get_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.config.serialize import from_yaml
from trainer_kit.errors import UsageError, path_suggestion

_FLAG = "--import_module"


def run_folder(run_dir: str | os.PathLike[str]) -> Path:
    """Returns the folder of a recorded run.

    Raises:
      UsageError: when this is not a run's folder; the message lists the runs in it.
    """
    folder = Path(run_dir)
    if (folder / "params.yaml").is_file():
        return folder
    if not folder.is_dir():
        folders = [path.name for path in folder.parent.glob("[!.]*") if path.is_dir()]
        raise UsageError(
            f"there is no folder {folder}; {path_suggestion(folder, folders, 'folders')}"
        )
    runs = sorted(str(path.parent) for path in folder.glob("*/params.yaml"))
    inside = (
        f"runs in it: {', '.join(runs[:12])}"
        if runs
        else f"it holds: {', '.join(os.listdir(folder)[:12])}"
    )
    raise UsageError(f"{folder} is not the folder of a run: it has no params.yaml; {inside}")


def recorded_experiment(folder: Path) -> str:
    """Returns the name of the experiment in manifest.json; "" if there is none."""
    name = (files.read_json(folder / "manifest.json") or {}).get("experiment")
    return name if isinstance(name, str) else ""


def recorded_config(
    folder: Path, import_modules: str | Sequence[str] = (), option: str = _FLAG
) -> ExperimentConfig:
    """Returns the config of a run, changed to one device, since the weights do not depend on the devices.

    Args:
      folder: The run's folder.
      import_modules: The modules to import before the experiment is looked up, or one; empty: those
        of the run's command.
      option: The flag or the argument that names them, for messages.

    Raises:
      UsageError: when the experiment is not recorded or not known, or a module cannot be imported.
    """
    name = recorded_experiment(folder)
    if not name:
        raise UsageError(
            f"{folder / 'manifest.json'} names no experiment, since the run was started from Python"
            " without one; build its model yourself and call trainer_kit.load_weights(model,"
            f" {str(folder)!r}), or, after a fit of trainer_kit.compat.keras,"
            f" compat.keras.load(model, {str(folder)!r})"
        )
    if import_modules or name not in experiments:
        given = (
            [import_modules]
            if isinstance(import_modules, str) and import_modules
            else import_modules
        )
        recorded: list[str] = []
        if not given:  # the modules that the command of the run imports first
            command = (files.read_json(folder / "manifest.json") or {}).get("command")
            words = [str(word) for word in command] if isinstance(command, list) else []
            recorded = [word.partition("=")[2] for word in words if word.startswith(f"{_FLAG}=")]
            recorded += [
                following for word, following in itertools.pairwise(words) if word == _FLAG
            ]
        try:
            discovery.find_experiment(name, given or recorded, option)
        except UsageError as error:
            if not recorded:
                raise
            flags = " ".join(f"{_FLAG}={module}" for module in recorded)
            raise UsageError(
                f"{error}\n  The run was started with {flags}. Go to the folder where it was"
                f" started, or name its module by {option}."
            ) from error
    text = (folder / "params.yaml").read_text(encoding="utf-8")
    config = from_yaml(text, get_experiment(name))
    kept = ("mixed_precision_dtype", "loss_scale", "random_seed")
    plain, of_run = RuntimeConfig(distribution_strategy="off").as_dict(), config.runtime.as_dict()
    return config.replace(
        runtime={key: plain[key] for key in of_run if key in plain and key not in kept}
    )
