"""The private table of gin: it exists, means what it meant, and may be missing."""

from __future__ import annotations

from typing import Any

import gin
import pytest

from trainer_kit.config.sources import gin_internals as internals
from trainer_kit.errors import UsageError

ONE = "gin_internals.first"
OTHER = "gin_internals.second"


@gin.configurable("first", module="gin_internals")
def _one(value: int = 0) -> int:
    return value


@gin.configurable("second", module="gin_internals")
def _other(value: int = 0) -> int:
    return value


def test_names_are_found_by_their_ends() -> None:
    assert (
        internals.find_matching_names(gin, "gin_internals.first")
        == internals.find_matching_names(gin, ONE)
        == [ONE]
    )
    assert internals.find_matching_names(gin, "gin_internals.nothing") == []
    assert {ONE, OTHER} <= set(internals.list_registered_names(gin))


class _NoTables:
    """A gin that keeps its table elsewhere."""

    config: Any = object()


def test_without_the_table_the_error_says_what_to_do() -> None:
    with pytest.raises(
        UsageError, match=r"install the gin-config of requirements\.lock, or use --config_file"
    ):
        internals.list_registered_names(_NoTables)
