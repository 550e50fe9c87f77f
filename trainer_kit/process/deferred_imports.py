"""Defers imports that libraries make for few programs: such a module is imported when it is first used.

Keras imports keras.wrappers, which imports scikit-learn if it is installed, and keras.visualization, which imports
matplotlib, and pandas for the data of `fit`. Orbit imports Keras 2 and does not use it. They take 0.7 s and 170 MB of
the 4.4 s and 940 MB of a short run of char_lm (2 cores).

The standard library's LazyLoader does not help here: AutoGraph reads the `__file__` of every module, and that alone
would load all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Act = Callable[[ModuleType], None]
Run = Callable[[Act, ModuleType], None]  # takes the function that runs a module's code, and the module
_WAITING: dict[str, dict[str, Act]] = {}


class DeferringFinder(MetaPathFinder):
    """Finds the usual modules, but runs the code of some of them in another way.

    Args:
      runs: The function that runs the code of a module, by the module's name.
    """

    def __init__(self, runs: Mapping[str, Run]) -> None:
        self._runs = runs

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module in `runs` or one that is waited for; None for any other module."""
        run = self._runs.get(fullname) or (tell_waiting if fullname in _WAITING else None)
        spec = PathFinder.find_spec(fullname, path, target) if run is not None else None
        if spec is not None and spec.loader is not None and run is not None:
            # The loader belongs to this module alone, and code that asks it for sources and resources still sees it.
            spec.loader.exec_module = functools.partial(run, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def defer_imports() -> None:
    """Defers the imports from now on. Only commands call it, before Keras is imported: a library must not do so."""
    if any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        return
    homes = ("keras", "keras.src", "keras._tf_keras.keras")
    runs: dict[str, Run] = {f"{home}.{part}": when_asked for home in homes for part in ("visualization", "wrappers")}
    runs["keras.src.trainers.data_adapters.array_slicing"] = when_asked
    sys.meta_path.insert(0, DeferringFinder({**runs, **_orbit()}))


@contextlib.contextmanager
def orbit_without_keras_2() -> Iterator[None]:
    """A context in which Orbit is imported without Keras 2, which it does not use: 0.3 s less. For libraries, too."""
    finder = DeferringFinder(_orbit())
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _orbit() -> dict[str, Run]:
    return {} if os.environ.get("TF_USE_LEGACY_KERAS") else {"orbit": without_keras_2}


def when_imported(name: str, key: str, act: Act) -> None:
    """Calls `act` with a module: now if the module is imported, else as soon as a command has imported it.

    Args:
      name: The name of the module.
      key: The purpose of `act`; a new `act` replaces a waiting one of the same key.
      act: The function to call with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        _WAITING.setdefault(name, {})[key] = act


def when_asked(run: Act, module: ModuleType) -> None:
    """Leaves a module empty until a name of it is first used in any thread (PEP 562); then runs its code.

    An error of that code is raised, and the next use tries again.
    """
    lock, begun = threading.RLock(), False

    def get(name: str) -> Any:
        nonlocal begun
        if not name.startswith("__") or name == "__all__":  # tools such as AutoGraph read the others of every module
            with lock:  # another thread waits here until the code has run; this thread may enter again meanwhile
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
    """Runs the code of a module with an empty module as Keras 2, which that code does not use. For one thread only."""
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
    """Runs the code of a module, then calls the functions that wait for the module."""
    run(module)
    for act in _WAITING.pop(module.__name__, {}).values():
        act(module)
