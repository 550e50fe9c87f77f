"""TaskSampler: which task a step trains, and how often each was trained before it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer_kit.config.schema.multitask import TaskSamplingConfig
from trainer_kit.inputs.task_sampler import TaskSampler


def _create_sampler(weights: tuple[float, ...], seed: int = 1, **config: Any) -> TaskSampler:
    return TaskSampler(TaskSamplingConfig(**config), weights, seed)


def _draw_numbers(sampler: TaskSampler, count: int, position: int = 0) -> Any:
    # In one element: each costs 0.1 ms.
    return next(sampler.draw_tasks(position).batch(count).as_numpy_iterator())


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        ({"type": "uniform"}, [1 / 3, 1 / 3, 1 / 3]),
        ({}, [0, 0.25, 0.75]),
        ({"type": "proportional", "proportional": {"alpha": 2.0}}, [0, 0.1, 0.9]),
    ],
)
def test_tasks_are_drawn_in_their_shares(config: dict[str, Any], shares: list[float]) -> None:
    drawn = _draw_numbers(_create_sampler((0.0, 1.0, 3.0), **config), 8000)
    np.testing.assert_allclose(np.bincount(drawn, minlength=3) / 8000, shares, atol=0.02)


def test_annealing_goes_from_the_weights_towards_equal_shares() -> None:
    annealing = {"steps_per_epoch": 4000, "total_steps": 8000}
    drawn = _draw_numbers(
        _create_sampler((1.0, 16.0), type="annealing", annealing=annealing), 12000
    )
    shares = [np.mean(drawn[begin : begin + 4000] == 1) for begin in (0, 4000, 8000)]
    last = 16**0.2 / (1 + 16**0.2)  # and it stays

    np.testing.assert_allclose(shares, [16 / 17, last, last], atol=0.03)


def test_any_position_continues_the_same_draws() -> None:
    sampler = _create_sampler((1.0, 2.0))
    whole = _draw_numbers(sampler, 3000)

    for position in (0, 1, 1023, 1024, 2500):
        drawn = _draw_numbers(sampler, 50, position)
        counts = np.bincount(whole[:position], minlength=2).tolist()
        assert drawn.tolist() == whole[position : position + 50].tolist()
        assert sampler.count_steps_per_task(position) == counts


def test_another_seed_draws_other_tasks() -> None:
    first = _draw_numbers(_create_sampler((1.0, 1.0), seed=1), 100)
    second = _draw_numbers(_create_sampler((1.0, 1.0), seed=2), 100)

    assert (first != second).any()
