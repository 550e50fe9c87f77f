"""The config of a sweep: its mistakes have paths and near names."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config.merge import apply_layers
from trainer_kit.config.sources.config_files import read_config_file, read_params_override
from trainer_kit.errors import ConfigError
from trainer_kit.sweeps.sweep_config import SearchRange, SweepConfig, format_override


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trialss: 4", "trialss (FILE:1): there is no such key; did you mean trials?"),
        ("sampler: tp", "sampler (FILE:1): 'tp' is not one of tpe, grid; did you mean tpe"),
        ("pruner: medain", "did you mean median?"),
        (
            "space: {a.b: {low: 1, high: 3, hihg: 2}}",
            "space.a.b.hihg (FILE:1): there is no such key; did",
        ),
        ("space: {a.b: {low: 1}}", "give either choices, or low and high of a range"),
        ("space: {a: {choices: [1], low: 0}}", "give either choices, or low and high of a range"),
        ("space: {a: {choices: [1], log: true}}", "give either choices, or low and high of"),
        ("space: {a: {low: 3, high: 1}}", "space.a.low (FILE:1): 3 is above high, 1; exchange"),
        ("space: {a: {low: 0, high: 1, log: true}}", "cannot contain 0; begin above 0"),
        ("{sampler: grid, space: {a: {low: 1, high: 9}}}", "sampler (FILE:1): a grid has only"),
    ],
)
def test_mistakes_in_the_file_are_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        apply_layers(SweepConfig(), [read_config_file(path)])

    assert message.replace("FILE", str(path)) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_override_gives_back_the_value_of_a_trial() -> None:
    texts = ["adam", "5 %", "1", "a, 'b' = \"c\"", "[64]", "", "\u00e9\n#"]
    choices = [1e-05, 3, True, None, *texts, [64, 32], {"type": "sgd"}]

    values = []
    for choice in choices:
        override = format_override("task.x", choice)
        layer = read_params_override(f"{override},task.y=1")
        values.append(layer.values["task"]["x"])

    assert values == choices


def test_a_trial_gets_a_choice_with_its_type() -> None:
    optuna = pytest.importorskip("optuna")
    choices = ("[64]", [64, 32], {"type": "sgd"}, "a, b", None, 0.5)
    search_range = SearchRange(choices=choices)

    values = []
    for label in search_range.get_labels():
        trial = optuna.trial.FixedTrial({"task.x": label})
        values.append(search_range.suggest(trial, "task.x"))

    assert values == list(choices)
