"""Leaves of nested dicts, beside Model Garden's."""

from __future__ import annotations

from typing import Any

import pytest
from official.core import train_utils

from trainer_kit.compat.model_garden.training.nested_logs import cast_leaf_nested_dict, get_leaf_nested_dict

LOGS: dict[str, Any] = {"val": {"acc": {"top_1": 5}}, "loss": 0.5, "empty": {}}


@pytest.mark.parametrize("keys", [["val", "acc", "top_1"], ["loss"], ("loss",)])
def test_a_leaf_is_found_by_its_path_as_theirs(keys: list[str]) -> None:
    assert get_leaf_nested_dict(LOGS, keys) == train_utils.get_leaf_nested_dict(LOGS, keys)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["val", "acc", "top1"], "there is no 'top1' in val|acc; did you mean top_1?"),
        (["valid"], "there is no 'valid' in the dict; did you mean val?"),
        (["loss", "mean"], "loss is 0.5, which has no entry 'mean'"),
        (["val", "acc"], "val|acc leads to a dict, not to a value; it has: top_1"),
        (["empty"], "it is empty"),
        ([], "the path leads to a dict"),
    ],
)
def test_where_theirs_is_a_key_error_ours_is_one_that_says_what_there_is(keys: list[str], told: str) -> None:
    with pytest.raises(KeyError):
        train_utils.get_leaf_nested_dict(LOGS, keys)
    with pytest.raises(KeyError) as caught:
        get_leaf_nested_dict(LOGS, keys)
    assert told in caught.value.args[0]


def test_leaves_are_cast_in_place_as_theirs() -> None:
    ours, theirs = ({"a": {"x": "1", "y": {}}, "b": 2.7} for _ in range(2))
    assert cast_leaf_nested_dict(ours, int) is ours
    assert ours == train_utils.cast_leaf_nested_dict(theirs, int) == {"a": {"x": 1, "y": {}}, "b": 2}
