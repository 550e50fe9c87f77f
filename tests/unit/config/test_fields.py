"""What counts as a section, a list of sections, and a leaf."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import SerializeAsAny, ValidationError

from trainer_kit.config.fields import (
    create_field_adapter,
    find_dict_value_class,
    find_list_item_class,
    find_section_class,
    get_fields,
    list_sections,
    suggest_fields,
)
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.config.schema.optimizer_configs import AdamConfig, OptimizerConfig


@configclass
class Tree(Config):
    size: int = 1
    child: Tree | None = None


@pytest.mark.parametrize(
    ("annotation", "section", "listed", "named"),
    [
        (DataConfig, DataConfig, None, None),
        (DataConfig | None, DataConfig, None, None),
        (SerializeAsAny[DataConfig] | None, DataConfig, None, None),
        (Annotated[DataConfig, "note"], DataConfig, None, None),
        (DataConfig | dict[str, DataConfig], DataConfig, None, DataConfig),
        (dict[str, DataConfig], None, None, DataConfig),
        (tuple[DataConfig, ...], None, DataConfig, None),
        (list[DataConfig] | None, None, DataConfig, None),
        (str | tuple[DataConfig, ...], None, DataConfig, None),
        (tuple[DataConfig, AdamConfig], None, None, None),
        (DataConfig | AdamConfig, None, None, None),
        (DataConfig | str, None, None, None),
        (dict[str, str], None, None, None),
        (int, None, None, None),
    ],
)
def test_sections_are_known_by_their_annotations(
    annotation: object, section: object, listed: object, named: object
) -> None:
    assert find_section_class(annotation) is section
    assert find_list_item_class(annotation) is listed
    assert find_dict_value_class(annotation) is named


def test_sections_lists_present_and_possible_sections(default: ExperimentConfig) -> None:
    sections = {
        path: (config_class, is_there) for path, config_class, is_there in list_sections(default)
    }

    assert sections[""] == (ExperimentConfig, True)
    assert sections["trainer"] == (TrainerConfig, True)
    assert sections["task"] == (type(default.task), True)
    assert sections["trainer.optimizer_config.ema"] == (EMAConfig, False)
    assert sections["trainer.optimizer_config.optimizer.adam"] == (AdamConfig, True)
    assert sections["trainer.optimizer_config.optimizer.sgd"][1] is False
    assert sections["task.extra_data"] == (DataConfig, False)
    assert list(sections).index("trainer") < list(sections).index("trainer.optimizer_config")


def test_a_recursive_section_ends_where_it_is_none() -> None:
    assert [path for path, _, _ in list_sections(Tree(child=Tree()))] == ["", "child"]


def test_checker_refuses_numbers_that_are_not_finite() -> None:
    assert create_field_adapter(TrainerConfig, "loss_upper_bound").validate_python(1) == 1.0
    with pytest.raises(ValidationError):
        create_field_adapter(TrainerConfig, "loss_upper_bound").validate_python(float("nan"))


@pytest.mark.parametrize(
    ("value", "branch"), [("sgd", "sgd"), ("nothing", [*get_fields(OptimizerConfig)][1])]
)
def test_the_advice_for_a_plain_value_shows_the_branch_it_names(value: str, branch: str) -> None:
    advice = suggest_fields(OptimizerConfig, "trainer.optimizer_config.optimizer", value)

    assert advice.endswith(f", as in trainer.optimizer_config.optimizer.type={branch}")
    assert advice.startswith("give its fields (type, ")
