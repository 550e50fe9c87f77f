"""Explains Model Garden's errors by the config: which value is missing or wrong, and its path.

Model Garden's errors seldom mention the config ("object of type 'NoneType' has no len()"). An error that the config
explains is reported with the path of the value. An error that Model Garden raised on purpose is passed on with the
path of the section. Any other error is a bug and stays as it is.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig

from trainer_kit.compat.model_garden.config.error_values import is_of_a_user, one_line, unknown_value
from trainer_kit.compat.model_garden.config.missing_files import missing_files
from trainer_kit.compat.model_garden.config.required_values import unset_choices, unset_optimization, unset_values
from trainer_kit.config.sources.layer import is_inside
from trainer_kit.errors import ConfigError, DataError, Mistake, TrainerKitError, UsageError

_LIBRARIES = {  # by a folder in the path of a frame: the name, and what to do without a network
    "/tensorflow_datasets/": (
        "TensorFlow Datasets",
        "prepare it with `tfds build` on a machine with a network, and set tfds_data_dir to its folder",
    ),
    "/tensorflow_hub/": ("TensorFlow Hub", "download it on a machine with a network, and give the path of its folder"),
}


@contextlib.contextmanager
def told(part: str, task_config: Any, optimization: Any = None) -> Iterator[None]:
    """A context in which Model Garden's errors are explained by the config.

    Args:
      part: The dotted path of the section in use: "task", "task.model", "task.train_data", ...
      task_config: The task's Model Garden section, or TaskSections for several tasks; other objects explain nothing.
      optimization: The optimizer's section, Model Garden's or trainer_kit's, while the optimizer is created.

    Raises:
      ConfigError: when a required value is not set.
      DataError: when a file is missing, or TensorFlow Datasets or TensorFlow Hub cannot provide it.
      UsageError: when a package is missing, or Model Garden refuses a value.
    """
    try:
        yield
    except TrainerKitError:
        raise
    except Exception as error:
        explained = _explained_by_any(error, part, task_config, optimization)
        if explained is None:
            raise
        raise explained from error


def part_of(task_config: Any, data: Any) -> str:
    """Returns the dotted path of a data section inside the task's section; "task" if it is not found there.

    Args:
      task_config: The task's section or sections, as in `told`.
      data: The data section.
    """
    for path, section in _by_path(task_config).items():
        if found := _part_of_one(section, data):
            return f"{path}.{found}"
    return "task"


class TaskSections(dict[str, Any]):
    """The sections of several Model Garden tasks, by their dotted paths in the experiment's config."""


def sections_of(tasks: Iterable[Any], path: str = "task.task_routines") -> TaskSections:
    """Returns the sections of several Model Garden tasks, given in the order of the routines at `path`."""
    return TaskSections({f"{path}.{number}.task_config": one.task_config for number, one in enumerate(tasks)})


def _by_path(task_config: Any) -> dict[str, TheirConfig]:
    """Returns a dict from dotted path to section, which has no fields for an object of another class."""
    found = task_config if isinstance(task_config, TaskSections) else {"task": task_config}
    return {path: one if isinstance(one, TheirConfig) else TheirConfig() for path, one in found.items()}


def _part_of_one(task_config: Any, data: Any) -> str:
    for name, section in vars(task_config).items() if data is not None else ():
        if section is data:
            return str(name)
        inner = section if isinstance(section, Mapping) else {}
        if found := next((key for key, one in inner.items() if one is data), None):
            return f"{name}.{found}"
    return ""


def _explained_by_any(error: Exception, part: str, task_config: Any, optimization: Any) -> TrainerKitError | None:
    """Returns the explanation by the section that holds `part`.

    Among several sections, one with a value that the error quotes comes first, then one with a wrong value.
    """
    sections = _by_path(task_config)
    around = [path for path in sections if is_inside(part, path)]
    found = []
    for path in around or sections:
        name = part.removeprefix(path if around else "task").removeprefix(".")
        found.append(_explained(error, part, path, name, sections[path], optimization))

    def weight(explained: TrainerKitError) -> tuple[bool, bool]:
        quoted = any(value in str(error) for value in re.findall(r"'([^']+)'", str(explained)))
        return quoted, isinstance(explained, (ConfigError, DataError))

    return max(filter(None, found), key=weight, default=None)


def _explained(
    error: Exception, part: str, path: str, name: str, section: TheirConfig, optimization: Any
) -> TrainerKitError | None:
    """Returns the explanation of an error by one task's section.

    Args:
      error: Model Garden's error.
      part: The dotted path of the section in use.
      path: The dotted path of the task's section.
      name: The name of the used part inside the task's section: "", "model", "train_data", ...
      section: The task's section.
      optimization: The optimizer's section, while the optimizer is created.
    """
    if isinstance(error, ImportError):
        return UsageError(f"{part}: a package is missing: {one_line(error)}; install it, and try again")
    unset = unset_optimization(optimization) if optimization is not None else unset_values(section, name, path)
    if unset and not is_of_a_user(error):
        return ConfigError(unset)
    if library := _library_of(error):
        return DataError(f"{part}: {library[0]} cannot provide it: {one_line(error)}; {library[1]}")
    absent = missing_files(section, path, one_line(error))
    if absent and _is_about_files(error, absent):
        return DataError(str(ConfigError(absent)))
    if one_line(error).startswith("registration key None ") and (found := unset_choices(section, path)):
        return ConfigError(found)
    if unknown := unknown_value(error, section, path):
        return ConfigError([unknown])
    if _is_refusal(error):
        text = one_line(error)
        text = f"{type(error).__name__}: {text}" if isinstance(error, AssertionError) else text
        return UsageError(f"{part}: Model Garden refuses its values: {text}")
    return None


def _library_of(error: Exception) -> tuple[str, str] | None:
    """Returns the name of the downloading library that raised the error, and the advice for it; None for others."""
    places = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((told for folder, told in _LIBRARIES.items() if any(folder in place for place in places)), None)


def _is_about_files(error: Exception, absent: list[Mistake]) -> bool:
    text = str(error)
    return isinstance(error, FileNotFoundError) or any(mistake.problem.split("'")[1] in text for mistake in absent)


def _is_refusal(error: Exception) -> bool:
    """Whether Model Garden raised the error on purpose, or Keras did and was called by installed packages only."""
    frames = traceback.extract_tb(error.__traceback__)
    if not (frames[-1].line or "").startswith(("raise ", "assert ")):
        return False
    inside = [frame.filename for frame in frames]
    after_us = inside[max((i for i, file in enumerate(inside) if "/trainer_kit/" in file), default=-1) + 1 :]
    only_packages = all("/site-packages/" in file for file in after_us)
    return "/official/" in inside[-1] or (only_packages and isinstance(error, ValueError))
