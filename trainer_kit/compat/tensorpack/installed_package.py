"""The installed package `tensorpack`, whose modules the door runs on its own graph.

Layers, towers, summaries, gradient processors, callbacks and dataflow need no session of TensorFlow
1. The door loads them from the installed package, unchanged and under its own names, such as
`trainer_kit.compat.tensorpack.models.conv2d`. Their relative imports then find the door's modules
in place of those that need a session. So each name of Tensorpack has one object, under the path
that Tensorpack has for it, and what a program replaces there takes effect.

The package itself is not imported. A program may import it, too.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from trainer_kit.errors import UsageError, get_install_command

DOOR = "trainer_kit.compat.tensorpack"
_ORIGINAL = "tensorpack"

# Names of NumPy 1 that the package uses, by module.
_OLD_NUMPY = {
    "sctypes": {"int": [np.int32, np.int64], "float": [np.float32, np.float64]},
    "object": object,
    # It is used in np.issubdtype only, which meant all floats by it.
    "float": np.floating,
    "bool": bool,
    "int": int,
    "fromstring": np.frombuffer,
}
_USES_OLD_NUMPY = (
    "dataflow.common",
    "dataflow.format",
    "dataflow.image",
    "dataflow.serialize",
)

# Modules that take names of TensorFlow 1 from `import tensorflow as tf`.
_USES_OLD_TENSORFLOW = (
    "callbacks.hooks",
    "callbacks.prof",
    "predict.base",
    "predict.multigpu",
    "tfutils.gradproc",
    "tfutils.optimizer",
    "tfutils.symbolic_functions",
)


@functools.cache
def find_original_folder() -> str:
    """Returns the folder of the installed package.

    Raises:
      UsageError: When it is not installed.
    """
    spec = importlib.util.find_spec(_ORIGINAL)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(
            "trainer_kit.compat.tensorpack runs the layers and dataflows of the package"
            f" tensorpack, which is not installed; {get_install_command('tensorpack')}"
        )
    return next(iter(spec.submodule_search_locations))


def extend_path(path: Sequence[str], package: str = "") -> list[str]:
    """Returns the path of a package of the door, with the folder of the original behind it.

    Args:
      path: The `__path__` of the package.
      package: The name of the package in Tensorpack. "" for Tensorpack itself.
    """
    folder = find_original_folder()
    if package:
        folder = os.path.join(folder, *package.split("."))
    return [*path, folder]


def export_names(namespace: dict[str, Any], modules: Iterable[str]) -> list[str]:
    """Adds the public names of modules to a namespace, and returns them.

    Args:
      namespace: The globals of a package of the door.
      modules: The names of modules of the package.
    """
    names: list[str] = []
    for module_name in modules:
        module = importlib.import_module(f"{namespace['__name__']}.{module_name}")
        for name in module.__all__:
            # As `import *` does: a name may be that of a submodule.
            if not hasattr(module, name):
                importlib.import_module(f"{module.__name__}.{name}")
            namespace[name] = getattr(module, name)
            names.append(name)
    return names


@contextlib.contextmanager
def original_name(door: types.ModuleType) -> Iterator[None]:
    """Lets the modules that are loaded in this context find the door under the original's name.

    Three of them import `tensorpack` by its full name.
    """
    name = _ORIGINAL
    others = {}
    for key in list(sys.modules):
        if key == name or key.startswith(f"{name}."):
            others[key] = sys.modules.pop(key)
    sys.modules[name] = door
    sys.modules[f"{name}.compat"] = importlib.import_module(f"{DOOR}.compat")
    try:
        yield
    finally:
        for key in list(sys.modules):
            if key == name or key.startswith(f"{name}."):
                del sys.modules[key]
        sys.modules.update(others)


@contextlib.contextmanager
def collect_no_garbage() -> Iterator[None]:
    """Lets imports in this context make half a million objects that stay.

    To collect garbage among them takes as long as a fifth of the imports, and once more when a
    graph is built.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        # The last collection writes out the files of users.
        atexit.register(gc.unfreeze)
        if is_enabled:
            gc.enable()


@contextlib.contextmanager
def hide_packages(*names: str) -> Iterator[None]:
    """Lets imports in this context take packages for missing that nothing has imported yet."""
    hidden: dict[str, Any] = {}
    for name in names:
        if name not in sys.modules:
            hidden[name] = None
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def restore_old_names() -> None:
    """Gives the modules that need them the names that NumPy 2 and TensorFlow 2 have removed."""
    old_numpy = types.ModuleType("numpy")
    vars(old_numpy).update({**vars(np), **_OLD_NUMPY})
    for name in _USES_OLD_NUMPY:
        module: Any = importlib.import_module(f"{DOOR}.{name}")
        module.np = old_numpy

    # It imports matplotlib, so it is loaded at its first use. What is set before remains.
    spec: Any = importlib.util.find_spec(f"{DOOR}.utils.viz")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    viz: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = viz
    spec.loader.exec_module(viz)
    viz.np = old_numpy
    utils: Any = importlib.import_module(f"{DOOR}.utils")
    utils.viz = viz

    for name in _USES_OLD_TENSORFLOW:
        module = importlib.import_module(f"{DOOR}.{name}")
        module.tf = importlib.import_module(f"{DOOR}.tfv1")


def keep_logger_folders() -> None:
    """Lets a program that is started again continue in its folder, without asking the user."""
    logger: Any = importlib.import_module(f"{DOOR}.utils.logger")
    logger.set_logger_dir.__defaults__ = ("k",)
    logger.auto_set_dir.__defaults__ = ("k", None)

    def skip_if_fixed(choose_folder: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(choose_folder)
        def choose(*arguments: Any, **options: Any) -> None:
            if not logger.is_folder_fixed:
                choose_folder(*arguments, **options)

        return choose

    # Whether the folder is that of an experiment, which the program does not choose.
    logger.is_folder_fixed = False
    logger.set_logger_dir = skip_if_fixed(logger.set_logger_dir)
    logger.auto_set_dir = skip_if_fixed(logger.auto_set_dir)
