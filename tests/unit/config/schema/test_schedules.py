"""Rules of the sections of schedules. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.schedules import (
    CosineRestartsLrConfig,
    LrConfig,
    OneCycleLrConfig,
    StepCosineLrConfig,
    StepwiseLrConfig,
)
from trainer_kit.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("stepwise", {"boundaries", "values"}),
        ("step_cosine_with_offset", {"boundaries", "values"}),
        ("exponential", {"initial_learning_rate", "decay_steps", "decay_rate"}),
        ("polynomial", {"initial_learning_rate", "decay_steps"}),
        ("cosine", {"initial_learning_rate", "decay_steps"}),
        ("power", {"initial_learning_rate"}),
        ("power_linear", {"initial_learning_rate", "total_decay_steps"}),
        ("power_with_offset", {"initial_learning_rate"}),
        ("cosine_restarts", {"initial_learning_rate", "first_decay_steps"}),
        ("one_cycle", {"max_learning_rate", "total_steps"}),
        ("inverse_time", {"initial_learning_rate", "decay_steps", "decay_rate"}),
    ],
)
def test_a_schedule_names_all_the_numbers_that_it_lacks(name: str, missing: set[str]) -> None:
    assert set(wrong_fields(LrConfig, {"type": name})) == {f"{name}.{field}" for field in missing}


def test_boundaries_increase_and_fit_their_values() -> None:
    assert wrong_fields(StepwiseLrConfig, {"boundaries": (5, 5), "values": (1.0, 2.0, 3.0)}) == ["boundaries"]
    assert wrong_fields(StepwiseLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0)}) == ["values"]
    assert wrong_fields(StepCosineLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0, 3.0)}) == ["values"]
    assert wrong_fields(StepCosineLrConfig, {"boundaries": (6, 5), "values": (1.0,)}) == ["boundaries", "values"]
    assert StepwiseLrConfig(boundaries=(5,), values=(1.0, 2.0)).values == (1.0, 2.0)


def test_values_that_give_no_rate_are_refused() -> None:
    with pytest.raises(ConfigError, match="t_mul"):
        CosineRestartsLrConfig(t_mul=0.5)  # its formula has no value after a number of half cosines
    with pytest.raises(ConfigError, match="rise"):
        OneCycleLrConfig(rise="step")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("constant", {"learning_rate": -0.1}, r"constant\.learning_rate: -0\.1 is not a number of at least 0"),
        ("stepwise", {"values": (0.1, -0.1)}, r"stepwise\.values: \(0\.1, -0\.1\) is not a list .*at least 0"),
        ("polynomial", {"power": -1.0}, r"polynomial\.power: -1\.0 is not a number of at least 0"),
    ],
)
def test_rates_that_become_negative_or_infinite_are_refused(name: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LrConfig(type="constant").replace(type=name, **{name: values})
