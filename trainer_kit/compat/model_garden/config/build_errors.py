"""What a user reads when Model Garden cannot build what a config describes: what is missing, and where it is named.

Their errors tell little of the config ("object of type 'NoneType' has no len()"). Those that the config explains are
told by its paths, what their code refuses in words is handed on, and any other error stays as it is: a bug.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from official.modeling.hyperparams.base_config import Config as TheirConfig

from trainer_kit.compat.model_garden.config.error_values import is_of_a_user, one_line, value_in
from trainer_kit.compat.model_garden.config.missing_files import missing_files
from trainer_kit.compat.model_garden.config.required_values import unset_choices, unset_optimization, unset_values
from trainer_kit.config.sources.layer import is_inside
from trainer_kit.errors import ConfigError, DataError, Mistake, TrainerKitError, UsageError

_OPTIMIZER = "trainer.optimizer_config"
_LIBRARIES = {  # by a folder in the path of a frame: what it gets, and which values of a config name that
    "tensorflow_datasets": ("TensorFlow Datasets", ("tfds_name",)),
    "tensorflow_hub": ("TensorFlow Hub", ("hub_module_url", "preprocessing_hub_module_url")),
}
_PREPARE = {
    "TensorFlow Datasets": "prepare it where there is a network, by `tfds build`, and set tfds_data_dir to its folder",
    "TensorFlow Hub": "load it where there is a network, and give the path of its folder",
}


@contextlib.contextmanager
def told(part: str, task_config: Any, optimization: Any = None) -> Iterator[None]:
    """Has errors of theirs, in what is done inside, told by what the config says.

    Args:
      part: dotted path of the section that is made use of: "task", "task.model", "task.train_data", ...
      task_config: the task's section, theirs; of several tasks their TaskSections; anything else explains nothing.
      optimization: the section of the optimizer, theirs or ours, where that is made.

    Raises:
      ConfigError: when something that is needed has no value.
      DataError: when a file or a dataset is not there.
      UsageError: when a package is missing, or their code refuses a value.
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
    """Returns the dotted path of a section of data in the task's section; that of the task, if it is in none.

    Args:
      task_config: as for `told`.
      data: the section of data.
    """
    for path, section in _by_path(task_config).items():
        if found := _part_of_one(section, data):
            return f"{path}.{found}"
    return "task"


class TaskSections(dict[str, Any]):
    """The sections of several tasks, theirs, by their dotted paths in the experiment's config."""


def sections_of(tasks: Iterable[Any], path: str = "task.task_routines") -> TaskSections:
    """Returns the sections of several tasks, theirs, that come from the routines at `path`, in this order."""
    return TaskSections({f"{path}.{number}.task_config": one.task_config for number, one in enumerate(tasks)})


def _by_path(task_config: Any) -> dict[str, TheirConfig]:
    """The sections by path; for what is none of theirs, such as a test's, one that says nothing."""
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
    """The explanation by the section that `part` is in, or by the one of several that says most."""
    sections = _by_path(task_config)
    within = next((path for path in sections if is_inside(part, path)), None)
    if within is not None:
        found = _explained(error, f"task{part.removeprefix(within)}", sections[within], optimization)
        return None if found is None else _under(within, found)
    explained = {path: _explained(error, part, section, optimization) for path, section in sections.items()}
    for path, one in explained.items():
        if isinstance(one, (ConfigError, DataError)):  # by a value of this section
            return _under(path, one)
    return next(iter(explained.values()), None)


def _under(path: str, error: TrainerKitError) -> TrainerKitError:
    """Returns what was told of "task" as told of the section at `path`, where that is another one."""
    if path == "task":
        return error
    if isinstance(error, ConfigError):
        moved = (re.sub(r"\btask(?=\.|$)", path, one.path) for one in error.mistakes)
        return ConfigError(dataclasses.replace(one, path=new) for one, new in zip(error.mistakes, moved, strict=True))
    return type(error)(re.sub(r"(?m)^(\W*)task(?=[.:])", rf"\1{path}", str(error)))


def _explained(error: Exception, part: str, task_config: Any, optimization: Any) -> TrainerKitError | None:
    if isinstance(error, ImportError):
        return UsageError(f"{part}: a package is missing: {one_line(error)}; install it, and try again")
    unset = unset_optimization(optimization) if optimization is not None else unset_values(task_config, part)
    if unset and not is_of_a_user(error):
        return ConfigError(unset)
    if library := _library_in(error):
        return _not_got(library, error, part, task_config)
    absent = missing_files(task_config, one_line(error))
    if absent and _is_about_files(error, absent):
        return DataError(str(ConfigError(absent)))
    if one_line(error).startswith("registration key None ") and (found := unset_choices(task_config)):
        return ConfigError(found)
    if named := value_in(error, task_config):
        return ConfigError([named])
    if _is_refusal(error):
        return UsageError(f"{part}: Model Garden cannot use it: {_named(error)}")
    return None


def _library_in(error: BaseException) -> str:
    """The library that gets things from the network, if the error comes out of one."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return next((name for name in _LIBRARIES if any(f"/{name}/" in file for file in files)), "")


def _not_got(library: str, error: Exception, part: str, task_config: Any) -> TrainerKitError:
    name, keys = _LIBRARIES[library]
    outer, section = part, task_config
    for step in part.split(".")[1:]:
        section = getattr(section, step, None)
    given = [(f"{outer}.{key}", getattr(section, key, None)) for key in keys]
    given += [(f"task.{key}", getattr(task_config, key, None)) for key in keys]
    path, value = next(((path, value) for path, value in given if value), (part, ""))
    return DataError(f"{path}: {name} cannot give {value!r}: {_named(error)}; {_PREPARE[name]}")


def _is_about_files(error: Exception, absent: list[Mistake]) -> bool:
    text = str(error)
    return isinstance(error, FileNotFoundError) or any(mistake.problem.split("'")[1] in text for mistake in absent)


def _is_refusal(error: Exception) -> bool:
    """Whether code of theirs raised it on purpose, or Keras while it was called by nobody's code but theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    if not (frames[-1].line or "").startswith(("raise ", "assert ")):
        return False
    inside = [frame.filename for frame in frames]
    after_us = inside[max((i for i, file in enumerate(inside) if "/trainer_kit/" in file), default=-1) + 1 :]
    theirs_alone = all("/site-packages/" in file for file in after_us)
    return "/official/" in inside[-1] or (theirs_alone and isinstance(error, ValueError))


def _named(error: Exception) -> str:
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if isinstance(error, AssertionError) else text
