"""The one private name of gin that trainer_kit needs.

No other module may use a private name of gin. gin has no public function that lists the registered
names: `gin.get_configurable` fails both for no match and for several.
tests/unit/config/sources/test_gin_internals.py fails with a release that has no such table. The gin
module is passed in.
"""

from __future__ import annotations

from importlib import metadata
from types import ModuleType

from trainer_kit.errors import UsageError


def list_registered_names(gin: ModuleType) -> list[str]:
    """Returns the complete selectors of everything that is registered in gin.

    Raises:
      UsageError: When this gin does not list its names, so that no binding can be checked.
    """
    try:
        return [selector for selector, _ in gin.config._REGISTRY.items()]
    except AttributeError as error:
        version = metadata.version("gin-config")
        raise UsageError(
            f"gin {version} does not list its registered names ({error}); install the gin-config of"
            " requirements.lock, or use --config_file and --params_override instead of gin"
        ) from error


def find_matching_names(gin: ModuleType, selector: str) -> list[str]:
    """Returns the complete selectors of all that is registered under a name or the end of it."""
    # The end of a selector begins after a dot, as in gin.
    end = f".{selector}"
    names = list_registered_names(gin)
    return [name for name in names if name == selector or name.endswith(end)]
