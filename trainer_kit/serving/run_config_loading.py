"""Reads the experiment and the config of a run from its folder.

Imports no TensorFlow, unless a user's module imports it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from trainer_kit import files
from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import experiments, get_experiment
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.config.serialize import from_yaml
from trainer_kit.errors import UsageError, suggest_paths

_IMPORT_FLAG = "--import_module"


def resolve_run_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Returns the folder of a recorded run.

    Raises:
      UsageError: when the folder is not that of a run. The message lists the runs in it.
    """
    folder = Path(run_dir)
    if (folder / "params.yaml").is_file():
        return folder

    if not folder.is_dir():
        sibling_paths = folder.parent.glob("[!.]*")
        siblings = [path.name for path in sibling_paths if path.is_dir()]
        advice = suggest_paths(folder, siblings, "folders")
        raise UsageError(f"there is no folder {folder}; {advice}")

    runs = sorted(str(path.parent) for path in folder.glob("*/params.yaml"))
    title = "runs in it" if runs else "it holds"
    names = runs or os.listdir(folder)
    first_names = ", ".join(names[:12])
    raise UsageError(
        f"{folder} is not the folder of a run: it has no params.yaml; {title}: {first_names}"
    )


def read_experiment_name(run_dir: Path) -> str:
    """Returns the name of the experiment in manifest.json; "" if it has none."""
    manifest = files.read_json(run_dir / "manifest.json") or {}
    name = manifest.get("experiment")
    return name if isinstance(name, str) else ""


def read_run_config(
    run_dir: Path, import_modules: str | Sequence[str] = (), option_name: str = _IMPORT_FLAG
) -> ExperimentConfig:
    """Returns the config of a run, changed to one device.

    The weights do not depend on the devices.

    Args:
      run_dir: The run's folder.
      import_modules: The modules to import before the experiment is looked up, or one. Empty:
        those of the run's command.
      option_name: The flag or the argument that names the modules, for messages.

    Raises:
      UsageError: when the experiment is not recorded or not known, or a module cannot be imported.
    """
    name = read_experiment_name(run_dir)
    if not name:
        raise UsageError(
            f"{run_dir / 'manifest.json'} names no experiment,"
            " since the run was started from Python without one;"
            " build its model yourself and call trainer_kit.load_weights(model,"
            f" {str(run_dir)!r}), or, after a fit of trainer_kit.compat.keras,"
            f" compat.keras.load(model, {str(run_dir)!r})"
        )

    if import_modules or name not in experiments:
        if isinstance(import_modules, str) and import_modules:
            import_modules = [import_modules]

        # Without modules, those that the command of the run imports are imported first.
        recorded: list[str] = []
        if not import_modules:
            manifest = files.read_json(run_dir / "manifest.json") or {}
            command = manifest.get("command")
            words = [str(word) for word in command] if isinstance(command, list) else []
            # A flag has its module in the same word, or in the next one.
            flag_prefix = f"{_IMPORT_FLAG}="
            for word in words:
                if word.startswith(flag_prefix):
                    module = word.removeprefix(flag_prefix)
                    recorded.append(module)
            for word, next_word in itertools.pairwise(words):
                if word == _IMPORT_FLAG:
                    recorded.append(next_word)

        try:
            discovery.import_experiment(name, import_modules or recorded, option_name)
        except UsageError as error:
            if not recorded:
                raise
            flags = " ".join(f"{_IMPORT_FLAG}={module}" for module in recorded)
            raise UsageError(
                f"{error}\n  The run was started with {flags}. Go to the folder where it was"
                f" started, or name its module by {option_name}."
            ) from error

    params_path = run_dir / "params.yaml"
    text = params_path.read_text(encoding="utf-8")
    config = from_yaml(text, get_experiment(name))

    # All but a few fields of the section runtime get their values for one device.
    kept_fields = ("mixed_precision_dtype", "loss_scale", "random_seed")
    one_device = RuntimeConfig(distribution_strategy="off").as_dict()
    replacements = {}
    for field in config.runtime.as_dict():
        if field in one_device and field not in kept_fields:
            replacements[field] = one_device[field]
    return config.replace(runtime=replacements)
