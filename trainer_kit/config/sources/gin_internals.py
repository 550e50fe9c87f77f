"""The name of gin that is not public and that trainer_kit still needs. No other module may use one.

gin has no public function that lists the registered names. Its table of them is used in two functions, whose
docstrings say what happens in a release without it; tests/unit/config/sources/test_gin_internals.py fails then. The gin
module is passed in.
"""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import Any

from trainer_kit.errors import UsageError


def matching(gin: Any, selector: str) -> list[str]:
    """Returns the complete selectors of all that is registered under a name or the end of it.

    `gin.get_configurable` fails both for no match and for several.

    Raises:
      UsageError: when this gin does not list its names: no binding could be checked.
    """
    try:
        return list(gin.config._REGISTRY.matching_selectors(selector))
    except AttributeError as error:
        raise UsageError(
            f"gin {_version()} does not list its registered names ({error}); install the gin-config of "
            "requirements.lock, or use --config_file and --params_override instead of gin"
        ) from error


def all_registered(gin: Any) -> list[str]:
    """Returns the complete selectors of all registered names; [] without the name: messages have no near names."""
    with contextlib.suppress(AttributeError):
        return [selector for selector, _ in gin.config._REGISTRY.items()]
    return []


def _version() -> str:
    return metadata.version("gin-config")
