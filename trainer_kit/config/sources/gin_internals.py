"""The names of gin that are not public and that trainer_kit still needs. No other module may use one.

gin can neither unbind one name nor tell which names are registered. Each of its tables is used in one function or two,
whose docstring says what happens in a release without it; tests/config/sources/test_gin_internals.py fails then. The
gin module is handed in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from trainer_kit.errors import UsageError


def unbind(gin: Any, bound: Iterable[tuple[tuple[str, str], str]]) -> None:
    """Takes bindings back; those of other code stay, which `gin.clear_config` would take too.

    Args:
      gin: the module.
      bound: ((scope, complete selector), argument) of each.

    Raises:
      UsageError: when there are any and this gin does not let them go: the next run would have them.
    """
    for key, argument in bound:
        try:
            bindings = gin.config._CONFIG
        except AttributeError as error:
            raise UsageError(
                f"gin {_version()} does not let go of the bindings of the run before ({error}); start each run in a "
                "process of its own"
            ) from error
        bindings.get(key, {}).pop(argument, None)
        if not bindings.get(key):
            bindings.pop(key, None)


def forget_use(gin: Any, selectors: Iterable[str]) -> None:
    """Takes configurables out of gin's account of what was used.

    Without the name nothing is taken out: the operative config of a second run in a process holds the first one's too.
    """
    forgotten = set(selectors)
    with contextlib.suppress(AttributeError):
        used = gin.config._OPERATIVE_CONFIG
        for key in [key for key in used if key[1] in forgotten]:
            del used[key]


def matching(gin: Any, selector: str) -> list[str]:
    """Returns the complete selectors of all that is registered under a name or the end of it.

    `gin.get_configurable` fails both for no match and for several.

    Raises:
      UsageError: when this gin does not tell: no binding could be checked.
    """
    try:
        return list(gin.config._REGISTRY.matching_selectors(selector))
    except AttributeError as error:
        raise UsageError(
            f"gin {_version()} does not tell what is registered ({error}); use the gin-config of requirements.lock, or "
            "--config_file and --params_override in place of gin"
        ) from error


def all_registered(gin: Any) -> list[str]:
    """Returns the complete selectors of all that is registered; none without the name: messages name no near ones."""
    with contextlib.suppress(AttributeError):
        return [selector for selector, _ in gin.config._REGISTRY.items()]
    return []


def _version() -> str:
    return metadata.version("gin-config")
