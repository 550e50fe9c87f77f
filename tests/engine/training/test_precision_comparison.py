"""Two precisions compared: the same start, the same batches, and what differs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.distribution.precision import precision, set_precision
from trainer_kit.errors import DataError
from trainer_kit.training.precision_comparison import _largest_first, compare
from trainer_kit.training.trainer import Trainer


@pytest.fixture(autouse=True)
def policy() -> Iterator[None]:
    """Puts the policies of Keras back."""
    with precision(RuntimeConfig(mixed_precision_dtype="float32")):
        yield


def _create(dtype: str, task_type: type[LinearTask] = LinearTask) -> Any:
    config = linear_experiment().replace(runtime={"mixed_precision_dtype": dtype})
    set_precision(config.runtime)
    return Trainer.create(config, task_type(config.task), True, False)


def test_the_same_precision_twice_gives_the_same_bits() -> None:
    found = compare(_create, ("float32", "float32"), 25)
    assert [step for step, _, _ in found.losses] == [1, *range(2, 25, 2), 25]
    assert all(first == second for _, first, second in found.losses)
    assert set(found.differences.values()) == {0.0} and len(found.differences) == 2
    assert min(found.rates) > 0


def test_another_precision_differs_a_little_the_largest_first() -> None:
    found = compare(_create, ("float32", "bfloat16"), 20)
    _, first, second = found.losses[0]
    assert first != second and first == pytest.approx(second, rel=0.02)
    differences = list(found.differences.values())
    assert differences == sorted(differences, reverse=True) and 0 < differences[0] < 1


def test_differences_that_are_not_finite_come_first() -> None:
    found = _largest_first({"a": 0.1, "b": math.nan, "c": 0.3, "d": math.inf})
    assert list(found)[2:] == ["c", "a"]


class _Short(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        return super().build_inputs(params.replace(is_training=False), input_context)


def test_data_that_ends_is_an_error() -> None:
    with pytest.raises(DataError, match="ended before step 13"):
        compare(lambda dtype: _create(dtype, _Short), ("float32", "bfloat16"), 20)
