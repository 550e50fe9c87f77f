"""Modules that libraries import for the few programs that use them are imported when they are first used.

Keras imports keras.wrappers, which imports scikit-learn where it is installed, and keras.visualization, which imports
matplotlib, and pandas for what `fit` is given; Orbit imports Keras 2, of which it uses nothing. Of the 4.4 s and 940 MB
that a short run of char_lm takes with them, 0.7 s and 170 MB are theirs (2 cores).

The standard library's LazyLoader does not do here: AutoGraph asks every module for its `__file__`, and that alone
would have it load them all.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]
Run = Callable[[Act, ModuleType], None]  # is given what runs a module's code, and the module
_WAITING: dict[str, dict[str, Act]] = {}


class DeferringFinder(MetaPathFinder):
    """Finds modules where they are, and has their code run in another way.

    Args:
      runs: name of a module -> how its code is run.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = runs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of such a module, None for any other."""
        run = self._runs.get(fullname) or (tell_waiting if fullname in _WAITING else None)
        spec = PathFinder.find_spec(fullname, path, target) if run is not None else None
        if spec is not None and spec.loader is not None and run is not None:
            # The loader is of this module alone, and stays what those see who ask it for sources and resources.
            spec.loader.exec_module = functools.partial(run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def defer_imports() -> None:
    """For commands, before anything imports Keras; a library does not change how others import."""
    if any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        return
    homes = ("keras", "keras.src", "keras._tf_keras.keras")
    runs: dict[str, Run] = {f"{home}.{part}": when_asked for home in homes for part in ("visualization", "wrappers")}
    runs["keras.src.trainers.data_adapters.array_slicing"] = when_asked
    if not os.environ.get("TF_USE_LEGACY_KERAS"):
        runs["orbit"] = without_keras_2
    sys.meta_path.insert(0, DeferringFinder(runs))


def when_imported(name: str, key: str, act: Act) -> None:
    """Calls `act` with a module: now if it is imported, else as soon as a command has imported it.

    Args:
      name: of the module.
      key: what `act` does; it takes the place of what was to do that before.
      act: is given the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        _WAITING.setdefault(name, {})[key] = act


def when_asked(run: Act, module: ModuleType) -> None:
    """Leaves a module without names, until the first is asked for (PEP 562); in whichever thread that happens.

    After an error, which is raised, the next one who asks tries again.
    """
    lock, begun = threading.RLock(), False

    def get(name: str) -> Any:
        nonlocal begun
        if not name.startswith("__") or name == "__all__":  # the others are asked of every module, as by AutoGraph
            with lock:  # another thread waits here until the code has run; this one may come again meanwhile
                if not begun:
                    begun = True
                    try:
                        run(module)
                    except BaseException:
                        begun = False
                        raise
            if name in vars(module):
                return vars(module)[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = get


def without_keras_2(run: Act, module: ModuleType) -> None:
    """Runs the code of a module that imports Keras 2 and does not use it; for commands, which import in one thread."""
    name = "tf_keras"
    if name in sys.modules:
        run(module)
        return
    sys.modules[name] = ModuleType(name)
    try:
        run(module)
    finally:
        del sys.modules[name]


def tell_waiting(run: Act, module: ModuleType) -> None:
    """Runs the code of a module, and tells those who wait for it."""
    run(module)
    for act in _WAITING.pop(module.__name__, {}).values():
        act(module)
