"""Reads the experiment and the config of a run from its folder.

Imports no TensorFlow, unless a user's module imports it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainer_kit import files
from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import experiments, get_experiment, register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.config.serialize import from_yaml, parse_params
from trainer_kit.config.sources import yaml_loader
from trainer_kit.errors import UsageError, suggest_paths

# The file of a run that has the config of its Keras model.
MODEL_FILE = "model.json"
_IMPORT_FLAG = "--import_module"


@configclass
class RecordedTaskConfig(TaskConfig):
    """The section `task` of a run that has no experiment, and whose model is in model.json."""

    validation_data: DataConfig | None = None  # type: ignore[assignment]


register_task(RecordedTaskConfig, "trainer_kit.serving.recorded_model:RecordedTask")


def resolve_run_dir(run_dir: str | os.PathLike[str]) -> Path:
    """Returns the folder of a recorded run.

    Raises:
      UsageError: when the folder is not that of a run. The message lists the runs in it.
    """
    folder = Path(run_dir)
    if (folder / "params.yaml").is_file():
        return folder

    for parent in folder.parents:
        if (parent / "params.yaml").is_file():
            raise UsageError(f"{folder} is in the run {parent}; give the run, and this checkpoint")
    if not folder.is_dir():
        sibling_paths = folder.parent.glob("[!.]*")
        siblings = [path.name for path in sibling_paths if path.is_dir()]
        advice = suggest_paths(folder, siblings, "folders")
        raise UsageError(f"there is no folder {folder}; {advice}")

    runs = sorted(str(path.parent) for path in folder.glob("*/params.yaml"))
    names = runs or os.listdir(folder)
    first_names = ", ".join(names[:12])
    raise UsageError(
        f"{folder} is not the folder of a run: it has no params.yaml; it holds: {first_names}"
    )


def read_run_config(
    run_dir: Path, import_modules: str | Sequence[str] | Literal[False] = ()
) -> ExperimentConfig:
    """Returns the config of a run, changed to one device.

    The weights do not depend on the devices. Prints what is imported because the run names it.

    Args:
      run_dir: The run's folder.
      import_modules: The modules to import before the experiment is looked up, or one. Empty:
        those of the run's command. False or "none": nothing that the run names is imported.

    Raises:
      UsageError: when the experiment is not recorded or not known, a module cannot be imported, or
        the run needs one that may not be imported.
    """
    manifest = files.read_json(run_dir / "manifest.json") or {}
    name = str(manifest.get("experiment") or "")
    text = (run_dir / "params.yaml").read_text(encoding="utf-8")
    sections = parse_params(text).values
    modules = import_modules or []
    if isinstance(modules, str):
        modules = [modules]
    if "none" in modules:
        import_modules = False
        modules = []

    # What the run names is the code of whoever wrote the folder.
    recorded_modules: list[str] = []
    required_code: list[str] = []
    if name and name not in experiments and not modules:
        # The flag and its value are one argument or two.
        words = "\0".join(map(str, manifest.get("command") or []))
        recorded_modules = re.findall(rf"\0{_IMPORT_FLAG}[=\0]([^\0]+)", words)
        required_code += recorded_modules or [f"the module of the experiment {name!r}"]
    trainer = sections.get("trainer")
    trainer_class = trainer.get("trainer_class") if isinstance(trainer, dict) else ""
    if trainer_class:
        required_code.append(str(trainer_class))
    code = " and ".join(required_code)
    if code and import_modules is False:
        raise UsageError(
            f"import_modules=False: {run_dir} needs {code}; name what you trust in import_modules"
        )
    if code:
        print(f"imports {code}, which {run_dir} names")

    advice = " (give it, or go to the folder where the run was started)" if recorded_modules else ""
    for module in modules or recorded_modules:
        discovery.import_user_module(module, f"import_modules{advice}")
    if name and not modules:
        _check_origin(run_dir, name, manifest)
    if name and name not in experiments:
        discovery.import_experiment(name, (), "import_modules")

    if name:
        config = from_yaml(text, get_experiment(name))
    elif (run_dir / MODEL_FILE).is_file():
        shown_sections = {key: sections.get(key, {}) for key in ("trainer", "runtime")}
        text = yaml_loader.dump(shown_sections)
        config = from_yaml(text, ExperimentConfig(task=RecordedTaskConfig()))
    else:
        raise UsageError(
            f"{run_dir / 'manifest.json'} names no experiment, since the run was started from"
            f" Python without one, and it has no {MODEL_FILE}, which a Keras 3 model has unless it"
            " has its own call or an adapted vocabulary, or cannot be serialized; build its model"
            f" yourself and call trainer_kit.load_weights(model, {str(run_dir)!r}), or, after a fit"
            f" of trainer_kit.compat.keras, compat.keras.load(model, {str(run_dir)!r})"
        )

    # All but a few fields of the section runtime get their values for one device.
    one_device = RuntimeConfig(distribution_strategy="off").as_dict()
    for field in ("mixed_precision_dtype", "loss_scale", "random_seed"):
        del one_device[field]
    return config.replace(runtime=one_device)


def _check_origin(run_dir: Path, name: str, manifest: Mapping[str, Any]) -> None:
    """Checks that a run of the user's experiment does not get the shipped one of the same name.

    Raises:
      UsageError: when the user's experiment is not found here, and a shipped one is.
    """
    if name in experiments:
        is_shipped = experiments.lookup(name).__module__.startswith("trainer_kit.experiments.")
    else:
        is_local = name.split("/")[0] in discovery.list_local_experiments()
        is_shipped = not is_local and name in discovery.list_shipped_experiments()

    recorded_files = list(manifest.get("modules") or ())
    module = f"trainer_kit/experiments/{name}"
    shipped_files = {f"{module}.py", f"{module}/__init__.py"}
    if is_shipped and recorded_files and shipped_files.isdisjoint(recorded_files):
        files_text = ", ".join(recorded_files[:3])
        raise UsageError(
            f"{run_dir} was trained with {files_text}, and not with the experiment {name} that"
            " comes with trainer_kit; go to the folder where the run was started, or name its"
            " module with --import_module (import_modules)"
        )
