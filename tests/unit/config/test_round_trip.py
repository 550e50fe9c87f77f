"""Every section survives YAML, and all of its values are reported when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import apply_values, collect_mistakes, nest_value
from trainer_kit.config.fields import flatten_values, get_fields
from trainer_kit.config.schema.configclass import OneOfConfig
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.optimizer_configs import OptimizerConfig
from trainer_kit.config.schema.schedules import LrConfig, WarmupConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources.layer import is_inside

OPTIMIZATION = "trainer.optimizer_config"
NAMED_OPTIMIZER = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "constant"},
    "variables": ["off", "^a: b/"],
}
NO_OPTIMIZER = {"optimizer": {"type": None}, "learning_rate": {"type": None}}
NUMBERS = {  # what schedules and warm-ups have no default for
    "boundaries": [5],
    "values": [1.0, 0.1],
    "initial_learning_rate": 1e-7,
    "max_learning_rate": 0.1 + 0.2,
    "decay_steps": 5,
    "decay_rate": 0.5,
    "total_decay_steps": 5,
    "first_decay_steps": "5 epochs",
    "total_steps": 5,
    "warmup_steps": "10 %",
}


def _list_choices(config_class: type[OneOfConfig]) -> list[dict[str, Any]]:
    """Returns a section for each type, with the numbers that it needs."""
    sections = []
    for name, branch in config_class.branches().items():
        fields = get_fields(branch)
        numbers: dict[str, Any] = {field: NUMBERS[field] for field in NUMBERS if field in fields}
        if name == "step_cosine_with_offset":
            numbers["values"] = [1.0]  # as many as there are boundaries
        sections.append({"type": name, name: numbers})

    return sections


# Words that YAML 1.1 reads as something else, and floats that need all of their digits.
SECTIONS = [
    ("trainer", {}),
    ("runtime", {"random_seed": 5}),
    ("task", {"weights": [0.1, 5e-324]}),
    ("task.model", {"name": "\x85\u2028", "blocks": [{"width": 3}, {"kind": "conv"}]}),
    ("task.named_data", {"null": {"input_path": {"010": "12:30", "off": ["1e-3", "~"]}}}),
    ("task.validation_data", {"dev": {"seed": 5}, "test": {}}),
    ("task.init_checkpoint", [{"path": "ckpt-1", "rename": {"a": "b"}}]),
    ("trainer.callbacks", [{"name": "samples", "args": {"yes": ["0x1f", None, 1e22]}}]),
    ("trainer.metrics", [{"type": "keras", "keras": {"metric": "Mean"}}]),
    ("trainer.summaries", [{"tensor": "hidden"}]),
    ("trainer.best_checkpoints", {"top": {"metric": "loss"}}),
    ("trainer.early_stopping", {"metric": "loss", "patience": 3}),
    ("trainer", {"optimizers": {"net": NAMED_OPTIMIZER}, "optimizer_config": NO_OPTIMIZER}),
    (f"{OPTIMIZATION}.ema", {"more_decays": {"fast": 0.9}, "evaluate": ["average", "fast"]}),
    (f"{OPTIMIZATION}.layer_decay", {"decay": 0.5, "layers": ["block"]}),
    (f"{OPTIMIZATION}.learning_rate_multipliers", [{"variables": "bias", "multiplier": 0.5}]),
    *((f"{OPTIMIZATION}.optimizer", {"type": name}) for name in OptimizerConfig.branches()),
    *((f"{OPTIMIZATION}.learning_rate", section) for section in _list_choices(LrConfig)),
    *((f"{OPTIMIZATION}.warmup", section) for section in _list_choices(WarmupConfig)),
]


@pytest.mark.parametrize(("path", "section"), SECTIONS)
def test_a_section_survives_yaml_and_tells_all_wrong_values(
    path: str, section: object, default: ExperimentConfig
) -> None:
    config = apply_values(default, nest_value(path, section)).config
    again = from_yaml(to_yaml(config), default)

    assert again == config
    assert flatten_values(again) == flatten_values(config)

    inside = [leaf for leaf in flatten_values(config) if is_inside(leaf, path)]
    wrong = [leaf for leaf in inside if not leaf.endswith(".type")]
    values = [nest_value(leaf, [[[]]]) for leaf in wrong]  # which no field takes

    mistakes = collect_mistakes(apply_values, config, *values)

    assert {mistake.removesuffix(".0") for mistake in mistakes} == {*wrong}
