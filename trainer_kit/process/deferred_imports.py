"""Modules that libraries import for the few programs that use them are imported when they are first used.

Keras imports keras.wrappers, which imports scikit-learn where it is installed, and keras.visualization, which imports
matplotlib; Orbit imports Keras 2, of which it uses nothing; TensorFlow imports Google's clients for the clusters of its
cloud. That is a third of the time that they take together. There are two ways, for two kinds of such imports:

A module that others import whole, and whose names they do not ask for meanwhile, is itself deferred: it is there, and
runs its code when it is first asked for a name. The standard library's LazyLoader does not do here: AutoGraph asks
every module for its `__file__`, and that alone would have it load them all.

A module that uses another one only in functions which hardly anyone calls gets a stand-in for it while it is imported.
To everyone else the other one is not imported at all.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_KERAS = ("keras", "keras.src", "keras._tf_keras.keras")
_DEFERRED = {f"{home}.{part}" for home in _KERAS for part in ("visualization", "wrappers")} | {
    "googleapiclient.discovery",
    "keras.src.trainers.data_adapters.array_slicing",  # of what `fit` is given; imports pandas
}
_UNUSED = {"orbit": {"tf_keras"}}

Act = Callable[[ModuleType], None]
_WAITING: dict[str, dict[str, Act]] = {}


class DeferringFinder(MetaPathFinder):
    """Finds modules where they are, and has them imported later or with stand-ins.

    Args:
      deferred: names of modules whose code runs when they are first asked for a name.
      unused: name of a module -> names of those that it gets stand-ins for.
    """

    def __init__(self, deferred: Collection[str], unused: Mapping[str, Collection[str]] | None = None) -> None:
        self._deferred, self._unused = deferred, unused or {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of such a module, None for any other."""
        make = self._loader_of(fullname)
        spec = PathFinder.find_spec(fullname, path, target) if make is not None else None
        if spec is not None and spec.loader is not None and make is not None:
            spec.loader = make(spec.loader)
        return spec

    def _loader_of(self, name: str) -> Callable[[Loader], Loader] | None:
        if name in self._deferred:
            return _DeferringLoader
        if name in self._unused:
            return lambda loader: _StandInLoader(loader, self._unused[name])
        return _TellingLoader if name in _WAITING else None


def defer_imports() -> None:
    """For commands, before anything imports Keras; a library does not change how others import."""
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        unused = {} if os.environ.get("TF_USE_LEGACY_KERAS") else _UNUSED
        sys.meta_path.insert(0, DeferringFinder(_DEFERRED, unused))


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


class _OtherLoader(Loader):
    """Does something beside what the real loader does."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the real loader makes."""
        return self._loader.create_module(spec)

    def _restore(self, module: ModuleType) -> None:
        """Makes the real loader that of the module again, for those who ask it for resources and sources."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader


class _DeferringLoader(_OtherLoader):
    """Runs a module's code when the first of its names is asked for (PEP 562), in whichever thread that happens."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self._lock = threading.RLock()
        self._running, self._loaded = False, False

    def exec_module(self, module: ModuleType) -> None:
        """Leaves the module as it is, with two functions that run its code; a reload runs it at once."""
        if any(not name.startswith("__") for name in module.__dict__):
            self._loader.exec_module(module)
            return

        def get(name: str) -> Any:
            if name.startswith("__") and name != "__all__":  # what is asked of every module, as by AutoGraph
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            self._load(module, own)
            if name not in module.__dict__:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return module.__dict__[name]

        def names() -> list[str]:
            self._load(module, own)
            return sorted(module.__dict__)

        own = {"__getattr__": get, "__dir__": names}
        module.__dict__.update(own)

    def _load(self, module: ModuleType, own: dict[str, Any]) -> None:
        """Runs the code once; after an error, which is raised, the next one who asks tries again."""
        with self._lock:  # another thread waits here until the code has run; this one may come again meanwhile
            if self._running or self._loaded:
                return
            self._running = True
            try:
                self._loader.exec_module(module)
            finally:
                self._running = False
            self._loaded = True
            for name, function in own.items():
                if module.__dict__.get(name) is function:
                    del module.__dict__[name]


class _StandInLoader(_OtherLoader):
    """Runs a module's code with stand-ins for modules that are installed, and that nothing has imported yet."""

    def __init__(self, loader: Loader, names: Collection[str]) -> None:
        super().__init__(loader)
        self._names = names

    def exec_module(self, module: ModuleType) -> None:
        """Runs it; in commands, which import in one thread."""
        self._restore(module)
        stand_ins = [_StandIn(name) for name in self._names if name not in sys.modules and _is_installed(name)]
        sys.modules.update({stand_in.__name__: stand_in for stand_in in stand_ins})
        try:
            self._loader.exec_module(module)
        finally:
            for stand_in in stand_ins:
                stand_in.retire()


class _TellingLoader(_OtherLoader):
    """Tells those who wait for a module that its code has run."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs it."""
        self._restore(module)
        self._loader.exec_module(module)
        for act in _WAITING.pop(module.__name__, {}).values():
            act(module)


class _StandIn(ModuleType):
    """What a module gets for one that it does not use yet; it imports the real one when it is asked for a name.

    As long as it is in sys.modules, that is while the module is imported, its names are stand-ins too.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":  # what is asked of every module, as by AutoGraph
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if sys.modules.get(self.__name__) is self:
            return _StandInName(self, name)
        return getattr(importlib.import_module(self.__name__), name)

    def retire(self) -> None:
        """Leaves sys.modules, if it is still there."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]


class _StandInName:
    """What a module gets for a function or class of such a module: the real one, when it is called or asked for."""

    def __init__(self, module: _StandIn, name: str) -> None:
        self._module, self._name = module, name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._real()(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def _real(self) -> Any:
        self._module.retire()
        return getattr(self._module, self._name)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # nor is the package that it is in
        return False
