"""What a gin file binds by Model Garden's names reaches the namesakes of this package; real gin."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import gin
import pytest

from trainer_kit.compat.model_garden.gin_bindings import accept_gin_bindings

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


def _make_pair() -> tuple[str, Callable[..., Any], Callable[..., Any]]:
    """Returns a name that is new to gin, our function of that name, and Model Garden's."""
    name = f"get_things_{next(_NUMBERS)}"
    ours = accept_gin_bindings(f"official.core.things.{name}")(_make(name))
    return name, ours, gin.configurable(module="official.core.things")(_make(name))


@pytest.mark.parametrize("binding", ["official.core.things.{}", "things.{}", "{}"])
def test_a_binding_by_model_gardens_name_counts_here(binding: str) -> None:
    name, ours, theirs = _make_pair()

    gin.parse_config(f"{binding.format(name)}.factor = 4")

    assert ours("p") == theirs("p") == ("p", 4)


def test_an_argument_that_is_passed_wins_over_every_binding() -> None:
    name, ours, _ = _make_pair()

    gin.parse_config(f"{name}.factor = 3")

    assert ours("p", 5) == ours("p", factor=5) == ("p", 5)


def test_the_function_keeps_its_signature() -> None:
    _, ours, _ = _make_pair()

    assert list(inspect.signature(ours).parameters) == ["params", "factor"]
    assert ours.__module__ == __name__
