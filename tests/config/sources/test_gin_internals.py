"""The private tables of gin: that they are there and mean what they meant, and what happens without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gin
import pytest

from trainer_kit.config.sources import gin_internals as internals
from trainer_kit.errors import UsageError

ONE, OTHER = "gin_internals.first", "gin_internals.second"


@gin.configurable("first", module="gin_internals")
def _one(value: int = 0) -> int:
    return value


@gin.configurable("second", module="gin_internals")
def _other(value: int = 0) -> int:
    return value


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    with gin.unlock_config():
        gin.bind_parameter(("", ONE, "value"), 1)
        gin.bind_parameter(("", OTHER, "value"), 2)
    yield
    internals.unbind(gin, [(("", ONE), "value"), (("", OTHER), "value")])
    internals.forget_use(gin, [ONE, OTHER])


def test_one_binding_is_taken_back_and_the_others_stay() -> None:
    assert (_one(), _other()) == (1, 2)
    internals.unbind(gin, [(("", ONE), "value"), (("", "gin_internals.nothing"), "value")])
    assert (_one(), _other()) == (0, 2)
    assert "first.value" not in gin.config_str() and "second.value = 2" in gin.config_str()


def test_what_was_used_is_forgotten_by_its_name() -> None:
    _one(), _other()
    internals.forget_use(gin, [ONE])
    assert "first.value" not in gin.operative_config_str() and "second.value = 2" in gin.operative_config_str()


def test_names_are_found_by_their_ends() -> None:
    assert internals.matching(gin, "gin_internals.first") == internals.matching(gin, ONE) == [ONE]
    assert internals.matching(gin, "gin_internals.nothing") == []
    assert {ONE, OTHER} <= set(internals.all_registered(gin))


class _NoTables:
    """A gin that keeps its tables elsewhere."""

    config: Any = object()


def test_without_the_tables_a_run_cannot_begin_after_another_in_the_same_process() -> None:
    internals.unbind(_NoTables, [])
    with pytest.raises(UsageError, match="start each run in a process of its own"):
        internals.unbind(_NoTables, [(("", ONE), "value")])


def test_without_the_tables_no_binding_is_checked_and_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"use the gin-config of requirements\.lock, or --config_file"):
        internals.matching(_NoTables, "one")


def test_without_the_tables_use_is_not_forgotten_and_no_names_are_near() -> None:
    internals.forget_use(_NoTables, [ONE])
    assert internals.all_registered(_NoTables) == []
