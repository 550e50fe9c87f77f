"""Rules of the sections of schedules. Names and defaults are compared in test_experiment.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import wrong_fields
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.schedules import (
    CosineRestartsLrConfig,
    LrConfig,
    OneCycleLrConfig,
    PolynomialLrConfig,
    StepCosineLrConfig,
    StepwiseLrConfig,
)


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


@pytest.mark.parametrize(
    ("config_class", "values", "fields"),
    [
        (StepwiseLrConfig, {"boundaries": (5, 5), "values": (1.0, 2.0, 3.0)}, ["boundaries"]),
        (StepwiseLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0)}, ["values"]),
        (StepwiseLrConfig, {"boundaries": (5,), "values": (0.1, -0.1)}, ["values"]),
        (StepCosineLrConfig, {"boundaries": (5, 6), "values": (1.0, 2.0, 3.0)}, ["values"]),
        (StepCosineLrConfig, {"boundaries": (6, 5), "values": (1.0,)}, ["boundaries", "values"]),
        (
            PolynomialLrConfig,
            {"initial_learning_rate": 0.1, "decay_steps": 5, "power": -1.0},
            ["power"],
        ),
        (
            CosineRestartsLrConfig,
            {"initial_learning_rate": 0.1, "first_decay_steps": 5, "t_mul": 0.5},
            ["t_mul"],
        ),
        (OneCycleLrConfig, {"max_learning_rate": 0.1, "total_steps": 5, "rise": "step"}, ["rise"]),
    ],
)
def test_values_that_give_no_rate_are_refused(
    config_class: type[Config], values: dict[str, Any], fields: list[str]
) -> None:
    assert wrong_fields(config_class, values) == fields


def test_a_stepwise_rate_has_a_value_more_than_boundaries() -> None:
    assert StepwiseLrConfig(boundaries=(5,), values=(1.0, 2.0)).values == (1.0, 2.0)
