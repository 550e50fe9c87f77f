"""Validation sets: the steps and the interval of each, and how many batches an evaluation has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.inputs.dataset_iterator import ValidationData
from trainer_kit.training.task_inputs import ValidationSet, ValidationSets, create_validation_sets


def _create_sets(
    own: dict[str, ValidationSetConfig] | None = None, **elements: int
) -> ValidationSets:
    """Returns sets of so many elements each; "single" is the set without a name."""
    names = {name.removeprefix("single"): count for name, count in elements.items()}
    feeds = {name: _create_feed(name, count) for name, count in names.items()}
    return create_validation_sets(feeds, SimpleNamespace(validation_sets=own or {}))


class _Inputs:
    """Inputs whose dataset is the given one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def distribute(self, pipeline: Any) -> Any:
        return self._dataset


def _create_feed(name: str, count: int) -> ValidationData:
    inputs = _Inputs(tf.data.Dataset.range(count))
    feed = ValidationData(f"validation_data.{name}".rstrip("."), inputs, None)
    assert feed.dataset is not None
    return feed


def test_a_set_has_steps_and_interval_of_its_own_or_those_of_all() -> None:
    sets = _create_sets(
        {"dev": ValidationSetConfig(steps=-1), "test": ValidationSetConfig(interval=9)},
        dev=3,
        test=3,
    )

    assert [
        (validation_set.has_own_steps, validation_set.steps(5), validation_set.interval(7))
        for validation_set in sets
    ] == [
        (True, -1, 7),
        (False, 5, 9),
    ]
    assert sets.select("dev").interval(None) is None


@pytest.mark.parametrize(
    ("steps", "replicas", "batches"), [(-1, 1, 7), (-1, 2, 4), (3, 2, 3), (5, 2, 4), (7, 1, 7)]
)
def test_an_evaluation_ends_with_its_steps_or_its_data(
    steps: int, replicas: int, batches: int
) -> None:
    assert _create_sets(single=7).batches(steps, replicas) == batches


def test_without_a_known_length_only_a_number_of_steps_tells() -> None:
    sets = ValidationSets([ValidationSet("", ValidationData("validation_data", _Inputs([]), None))])
    assert sets.batches(-1, 1) is None
    assert sets.batches(4, 1) == 4


def test_the_batches_of_the_evaluated_sets_are_added() -> None:
    sets = _create_sets({"test": ValidationSetConfig(steps=2)}, dev=7, test=5)

    assert sets.batches(-1, 1) == 9

    sets.evaluated_names = ("test",)
    assert sets.batches(-1, 1) == 2

    sets.select("dev").data.reset()

    assert sets.batches(-1, 1) == 2  # the set without a known length is not evaluated

    sets.evaluated_names = sets.names
    assert sets.batches(-1, 1) is None
