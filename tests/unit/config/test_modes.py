"""The table of modes, and misspelt ones."""

from __future__ import annotations

import pytest

from trainer_kit.config.modes import MODES, lookup_mode
from trainer_kit.errors import UsageError


def test_what_each_mode_needs() -> None:
    assert {name: (mode.trains, mode.evaluates) for name, mode in MODES.items()} == {
        "train": (True, False),
        "eval": (False, True),
        "train_and_eval": (True, True),
        "continuous_eval": (False, True),
        "train_and_post_eval": (True, True),
        "continuous_train_and_eval": (True, True),
    }
    assert [name for name, mode in MODES.items() if not mode.is_single_run] == [
        "continuous_train_and_eval"
    ]


@pytest.mark.parametrize("name", ["", "Train", "train_eval", "train_and_eval "])
def test_another_mode_is_refused_with_all_that_there_are(name: str) -> None:
    with pytest.raises(UsageError) as error:
        lookup_mode(name)

    assert f"no mode is called {name!r}; " in str(error.value)
    assert all(mode in str(error.value) for mode in MODES)
    if "did you mean" in str(error.value):
        assert f"(all: {', '.join(MODES)})" in str(error.value)


def test_a_misspelt_mode_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean continuous_eval"):
        lookup_mode("continous_eval")
