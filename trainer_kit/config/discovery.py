"""Finds experiments: of the working directory, named modules, entry points and trainer_kit itself.

The modules are named on the command line. TensorFlow is imported only if a user's module imports
it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

from trainer_kit.config.experiment_registry import experiments
from trainer_kit.errors import UsageError, find_similar_names, suggest_names, suggest_paths
from trainer_kit.files import expand_home

EXPERIMENT_ENTRY_POINT_GROUP = "trainer_kit.experiments"
SHIPPED_FOLDER = Path(__file__).parents[1] / "experiments"
FRAMEWORK_ENTRY_POINT_GROUP = "trainer_kit.doors"


def import_user_module(name: str, option: str = "--import_module") -> None:
    """Imports a module by its dotted name or by the path of its file.

    The working directory is searched first.

    Args:
      name: The module.
      option: The flag or the argument that named it, for messages.

    Raises:
      UsageError: When there is no such module or file, or it cannot be imported because its syntax
        is wrong or an import in it fails. Other errors inside the module are raised unchanged.
    """
    name = expand_home(name)
    _add_working_directory_to_path()
    with _explain_import_errors(option, name):
        if name.endswith(".py") or os.sep in name:
            _import_file(Path(name), option)
            return

        missing_error = UsageError(
            f"{option}: no module is called {name!r}; give a dotted name or the path of a .py file"
        )
        if not name:
            raise missing_error

        # importlib.import_module raises a TypeError for a name like .mine.
        try:
            __import__(name)
        except ModuleNotFoundError as error:
            # The module exists, and imports one that does not.
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            raise missing_error from None


def import_experiment(
    name: str, modules: Iterable[str] = (), option: str = "--import_module"
) -> None:
    """Makes sure that the experiment `name` is registered.

    The places are searched in this order, until one registers the name:

    1. `modules`, all of which are imported.
    2. The module `experiments.<first part of the name>` in the working directory.
    3. The entry points of the group `trainer_kit.experiments`.
    4. The experiments that come with trainer_kit.
    5. The entry points of the group `trainer_kit.doors`. A door is a function that registers
       experiments of another framework: the one whose name it is given, or without a name all that
       it knows.

    Args:
      name: The name of the experiment.
      modules: Dotted names of modules, or paths of files.
      option: The flag or the argument that names `modules`, for messages.

    Raises:
      UsageError: When none of these registers the name, with near names, and when a module cannot
        be imported, as for `import_user_module`.
    """
    first_part = name.split("/")[0]
    for module in modules:
        import_user_module(module, option)

    if name not in experiments and first_part in list_local_experiments():
        _import_local(first_part)

    if name not in experiments:
        for point in _get_experiment_entry_points():
            if point.name in (name, first_part):
                _load_entry_point(point)

    if name not in experiments and name in list_shipped_experiments():
        importlib.import_module(f"trainer_kit.experiments.{name}")

    # The user's own names are collected before the door adds those of another framework.
    if name not in experiments:
        own_names = {
            *experiments.names(),
            *list_local_experiments(),
            *(point.name for point in _get_experiment_entry_points()),
            *list_shipped_experiments(),
        }
        register_framework_experiments(name)

    if name not in experiments:
        register_framework_experiments()
        all_names = sorted({*own_names, *experiments.names()})
        has_similar_name = bool(find_similar_names(name, all_names))
        # Of the experiments of another framework, only near names are listed.
        advice = suggest_names(name, all_names if has_similar_name else sorted(own_names))

        flag = "--experiment: " if option.startswith("--") else ""
        advice += " If not, name" if advice.endswith("?") else "; name"
        raise UsageError(
            f"{flag}no experiment is called {name!r}; {advice} the module that registers it with"
            f" {option}"
        )


def import_all_experiments(modules: Iterable[str] = ()) -> tuple[list[str], list[UsageError]]:
    """Imports every place that experiments of the user come from.

    Returns:
      The sorted names of the experiments, and an error for each other package, module or entry
      point that cannot be imported, as for `import_user_module`.

    Raises:
      UsageError: When one of `modules` cannot be imported.
    """
    for module in modules:
        import_user_module(module)

    loads = [partial(_import_local, name) for name in list_local_experiments()]
    loads += [partial(_load_entry_point, point) for point in _get_experiment_entry_points()]
    errors = []
    for load in loads:
        try:
            load()
        except UsageError as error:
            errors.append(error)
    return experiments.names(), errors


def register_framework_experiments(name: str = "") -> None:
    """Registers the experiment `name` of another framework, if one has it.

    Without a name, all experiments of other frameworks are registered.

    Raises:
      UsageError: When the module of an entry point cannot be imported.
    """
    for point in metadata.entry_points(group=FRAMEWORK_ENTRY_POINT_GROUP):
        with _explain_import_errors("--experiment", f"{point.value} (entry point {point.name})"):
            point.load()(name)


def list_local_experiments() -> list[str]:
    """Returns the names of the packages and modules in `experiments/` of the working directory."""
    return _list_modules(Path("experiments"))


def list_shipped_experiments() -> list[str]:
    """Returns the names of the experiments that come with trainer_kit."""
    return _list_modules(SHIPPED_FOLDER)


def _list_modules(folder: Path) -> list[str]:
    names = {path.parent.name for path in folder.glob("*/__init__.py")}
    for path in folder.glob("*.py"):
        if path.stem != "__init__":
            names.add(path.stem)
    return sorted(names)


@contextmanager
def _explain_import_errors(option: str, module: str) -> Iterator[None]:
    """Turns a failed import of a user's module into a UsageError with the reason and the place."""
    try:
        yield
    except SyntaxError as error:
        location = f"{error.filename}:{error.lineno}"
        reason = f"{location}: {type(error).__name__}: {error.msg}"
        raise UsageError(f"{option}: {module} cannot be imported: {reason}") from error
    except ImportError as error:
        reason = f"{_format_error_location(error)}: {error}; correct or install it"
        raise UsageError(f"{option}: {module} cannot be imported: {reason}") from error
    except SystemExit as error:
        # A SystemExit without an argument has an empty text.
        location = _format_error_location(error, "<module>")
        reason = f"{location}: SystemExit: {error}".removesuffix(": ")
        advice = 'guard that call by `if __name__ == "__main__":`'
        raise UsageError(
            f"{option}: {module} ends the program when it is imported: {reason}; {advice}"
        ) from error


def _format_error_location(error: BaseException, function: str = "") -> str:
    """Returns "file:line" of the deepest frame of an error.

    If `function` has frames, it is the deepest of these.
    """
    # The frames of Python's import system have such a file name.
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not frame.filename.startswith("<frozen ")]
    function_frames = [frame for frame in frames if frame.name == function]
    deepest_frame = (function_frames or frames)[-1]
    return f"{deepest_frame.filename}:{deepest_frame.lineno}"


def _import_local(name: str) -> None:
    _add_working_directory_to_path()
    with _explain_import_errors("--experiment", f"experiments.{name}"):
        importlib.import_module(f"experiments.{name}")


def _load_entry_point(point: metadata.EntryPoint) -> None:
    with _explain_import_errors("--experiment", f"{point.value} (entry point {point.name})"):
        point.load()


def _get_experiment_entry_points() -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=EXPERIMENT_ENTRY_POINT_GROUP))


def _import_file(path: Path, option: str) -> None:
    if not path.is_file():
        # AutoGraph leaves files that begin with _.
        file_names = [file.name for file in path.parent.glob("[!_]*.py")]
        advice = suggest_paths(path, file_names, "Python files")
        raise UsageError(f"{option}: there is no file {path}; {advice}")

    name = path.stem
    if name in sys.modules:
        imported_file = getattr(sys.modules[name], "__file__", None)
        # The file may have been imported by another path.
        if imported_file and Path(imported_file).resolve() == path.resolve():
            return
        raise UsageError(
            f"{option}: {path} cannot be imported as {name!r}: another module has this name; rename"
            " the file"
        )

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module

    # As `import` does, a failed module is removed: an incomplete one would pass for the whole one.
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _add_working_directory_to_path() -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
