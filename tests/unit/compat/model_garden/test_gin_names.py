"""What a gin file binds by Model Garden's names, with ours alone and with theirs beside it; real gin."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gin
import pytest

from trainer_kit.compat.model_garden.gin_names import configurable

_NUMBERS = itertools.count()


@pytest.fixture(autouse=True)
def clean_gin() -> Iterator[None]:
    yield
    gin.clear_config()  # which unlocks it


def _make(name: str) -> Callable[..., Any]:
    def function(params: Any, factor: int = 1) -> tuple[Any, int]:
        return params, factor

    function.__name__ = function.__qualname__ = name
    return function


def _pair(with_theirs: bool) -> tuple[str, Callable[..., Any], Callable[..., Any] | None]:
    """Returns a name that is new to gin, our function of that name, and theirs if there is to be one."""
    name = f"get_things_{next(_NUMBERS)}"
    ours = configurable(f"official.core.things.{name}")(_make(name))
    return name, ours, gin.configurable(module="official.core.things")(_make(name)) if with_theirs else None


@pytest.mark.parametrize("with_theirs", [False, True])
def test_a_short_name_is_ours_and_never_ambiguous(with_theirs: bool) -> None:
    name, ours, theirs = _pair(with_theirs)
    gin.parse_config(f"{name}.factor = 3")
    assert ours("p") == ("p", 3)
    assert theirs is None or theirs("p") == ("p", 1)
    assert f"{name}.factor = 3" in gin.operative_config_str()


def test_two_modules_of_one_name_are_ambiguous_to_gin_otherwise() -> None:
    name = f"get_things_{next(_NUMBERS)}"
    for module in ("official.core.things", "trainer_kit.things"):
        gin.configurable(module=module)(_make(name))
    with pytest.raises((KeyError, ValueError), match="Ambiguous selector"):
        gin.parse_config(f"{name}.factor = 3")


@pytest.mark.parametrize("binding", ["official.core.things.{}", "things.{}"])
def test_a_binding_by_model_gardens_whole_name_counts_here(binding: str) -> None:
    name, ours, theirs = _pair(with_theirs=True)
    gin.parse_config(f"{binding.format(name)}.factor = 4")
    assert theirs is not None
    assert ours("p") == theirs("p") == ("p", 4)


def test_an_argument_that_is_passed_wins_over_every_binding() -> None:
    name, ours, _ = _pair(with_theirs=True)
    gin.parse_config(f"{name}.factor = 3\nthings.{name}.factor = 4")
    assert ours("p", 5) == ours("p", factor=5) == ("p", 5)


def test_the_function_can_be_referred_to_and_keeps_its_signature() -> None:
    name, ours, _ = _pair(with_theirs=True)
    assert list(inspect.signature(ours).parameters) == ["params", "factor"]
    assert ours.__module__ == __name__
    user = gin.configurable(module="tests.user")(_make(f"user_{name}"))
    gin.parse_config(f"user_{name}.factor = @{name}\n{name}.factor = 6")
    assert user("p")[1]("q") == ("q", 6)


def test_the_door_may_be_imported_when_gin_is_finalized() -> None:
    gin.finalize()
    _, ours, _ = _pair(with_theirs=False)
    assert ours("p") == ("p", 1)
    assert gin.config_is_locked()
