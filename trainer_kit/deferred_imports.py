"""Modules that TensorFlow and Keras import for the few programs that use them are imported when they are first used.

Keras imports keras.wrappers, which imports scikit-learn where it is installed, and keras.visualization, which imports
matplotlib; TensorFlow imports Google's API client for the clusters of its cloud. That is a quarter of the time that the
two take. The standard library's LazyLoader does not do here: AutoGraph asks every module for its `__file__`, and that
alone would have it load them all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_KERAS = ("keras", "keras.src", "keras._tf_keras.keras")
_DEFERRED = {f"{home}.{part}" for home in _KERAS for part in ("visualization", "wrappers")} | {
    "googleapiclient.discovery"
}


class _DeferringLoader(Loader):
    """Runs a module's code when the first of its names is asked for (PEP 562), in whichever thread that happens."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._lock = loader, threading.RLock()
        self._running, self._loaded = False, False

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns what the real loader makes."""
        return self._loader.create_module(spec)

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


class DeferringFinder(MetaPathFinder):
    """Finds the modules that are to be deferred where they are."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a deferred module, None for any other."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self._names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


def defer_imports() -> None:
    """For commands, before anything imports Keras; a library does not change how others import."""
    if not any(isinstance(finder, DeferringFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, DeferringFinder(_DEFERRED))
