"""The config of initial weights."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.merge import apply
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import ConfigError


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "is needed"),
        ({"path": ""}, "path.*: is empty"),
        ({"path": "a", "variables": ["("]}, r"0.variables.*: '\(' is not a regular expression"),
        ({"path": "a", "rename": {"b": r"\1"}}, r"0.rename.*: '\\\\1' is no replacement for 'b'"),
        ({"path": "a", "renames": {}}, "task.init_checkpoint.0.renames: there is no such key; did you mean .*rename"),
        ({"path": "a", "other_shapes": "crop"}, "other_shapes: 'crop' is not one of error, skip, slice"),
    ],
)
def test_mistakes_in_an_entry_name_its_place(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        ExperimentConfig().replace(task={"init_checkpoint": [entry]})
    assert "mistakes" not in str(error.value)
    with pytest.raises(ConfigError, match=message):
        apply(ExperimentConfig(), [Layer({"task": {"init_checkpoint": [entry]}})])


def test_a_path_and_a_list_of_sections_are_both_allowed() -> None:
    def merged(*given: Any) -> Any:
        layers = [Layer({"task": {"init_checkpoint": one}}) for one in given]
        return apply(ExperimentConfig(), layers).config.task.init_checkpoint

    entry = {"path": "a", "exclude": ["head"]}
    assert merged("a") == merged([entry], "a") == "a"
    assert merged("a", [entry]) == (InitCheckpointConfig(path="a", exclude=("head",)),)
    assert TaskConfig(init_checkpoint=[entry]).init_checkpoint == merged([entry])  # type: ignore[list-item, arg-type]
    with pytest.raises(ConfigError, match=r"task.init_checkpoint: .* is not text or a list"):
        merged(entry)
