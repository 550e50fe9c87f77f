"""Names, clashes and misses."""

from __future__ import annotations

import pytest

from trainer_kit.config.registry import Registry
from trainer_kit.errors import ExitCode, UsageError


@pytest.fixture
def registry() -> Registry[object]:
    registry: Registry[object] = Registry("experiment")
    for name in ("digits", "vision/resnet/cifar", "vision/resnet/digits", "lm"):
        registry.register(name)(name)
    return registry


def test_what_was_registered_is_found(registry: Registry[object]) -> None:
    assert registry.lookup("vision/resnet/cifar") == "vision/resnet/cifar"
    assert registry.names() == ["digits", "lm", "vision/resnet/cifar", "vision/resnet/digits"]
    assert "lm" in registry
    assert "vision" not in registry
    assert 5 not in registry


def test_the_decorator_returns_what_it_decorates(registry: Registry[object]) -> None:
    @registry.register("function")
    def function() -> int:
        return 5

    assert function() == 5
    assert registry.lookup("function") is function


@pytest.mark.parametrize("name", ["", "/", "a//b", "/a", "a/"])
def test_a_name_is_made_of_words(registry: Registry[object], name: str) -> None:
    with pytest.raises(UsageError, match="single slashes"):
        registry.register(name)


def test_a_name_that_is_taken_is_refused_and_stays(registry: Registry[object]) -> None:
    def second() -> None: ...

    with pytest.raises(UsageError, match="'digits' is registered already") as caught:
        registry.register("digits")(second)

    assert "second" in str(caught.value)
    assert caught.value.exit_code == ExitCode.USAGE
    assert registry.lookup("digits") == "digits"


@pytest.mark.parametrize(("module", "is_replaced"), [("__main__", True), ("project", False)])
def test_a_cell_of_a_notebook_may_register_again(
    registry: Registry[object], module: str, is_replaced: bool
) -> None:
    def run_cell() -> type:
        return type("Mine", (), {"__module__": module})

    first = registry.register("mine")(run_cell())
    if is_replaced:
        second = registry.register("mine")(run_cell())
        assert registry.lookup("mine") is second is not first
    else:
        with pytest.raises(UsageError, match=r"by project\.Mine; project\.Mine needs another name"):
            registry.register("mine")(run_cell())
    with pytest.raises(UsageError, match="'mine' is registered already"):
        registry.register("mine")(type("Other", (), {"__module__": module}))


def test_a_name_may_begin_like_another(registry: Registry[object]) -> None:
    registry.register("vision/resnet")(object())
    assert "vision/resnet" in registry
    assert "vision/resnet/cifar" in registry


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "no experiment is called 'digit'; did you mean digits"),
        ("zzzzzz", "there are: digits, lm"),
        ("vision/resnet", "did you mean vision/resnet/cifar or vision/resnet/digits"),
    ],
)
def test_a_miss_names_the_nearest_or_what_there_is(
    registry: Registry[object], name: str, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        registry.lookup(name)


def test_a_registry_without_entries_says_so() -> None:
    with pytest.raises(UsageError, match="there are none"):
        Registry[object]("task").lookup("x")
