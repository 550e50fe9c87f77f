"""The front door: `import trainer_kit` and the names it offers."""

from __future__ import annotations

import importlib.util

import pytest

import trainer_kit

NAMES = [name for name in trainer_kit.__all__ if name != "__version__"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_always_resolves_to_the_same_object(name: str) -> None:
    first = getattr(trainer_kit, name)
    second = getattr(trainer_kit, name)

    assert first is second
    assert first.__name__ == name
    assert first.__module__.startswith("trainer_kit.")


@pytest.mark.parametrize("name", NAMES)
def test_no_module_shadows_a_public_name(name: str) -> None:
    assert importlib.util.find_spec(f"trainer_kit.{name}") is None


def test_an_unknown_name_is_told_with_those_that_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Taskk'; it has: .*\bTask\b"):
        trainer_kit.Taskk  # noqa: B018


def test_dir_lists_the_public_names() -> None:
    assert set(NAMES) <= set(dir(trainer_kit))
