"""The JSON schema of config files, as the package jsonschema reads it."""

from __future__ import annotations

import enum
import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import TypedDict

from trainer_kit.config import discovery
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.config.json_schema import create_json_schema
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import ExperimentConfig, TaskConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.config.sources import yaml_loader

jsonschema = pytest.importorskip("jsonschema")

ROOT = Path(__file__).parents[3]
FILES = sorted(ROOT.glob("configs/*.yaml"))
# Those whose config imports no TensorFlow.
EXPERIMENTS = sorted(path.parent.name for path in ROOT.glob("trainer_kit/experiments/*/config.py"))


class Color(enum.Enum):
    """A color of the drawing."""

    RED = "red"


class _Frame:
    class Color(enum.Enum):
        """A color of the frame, with the name of the other class."""

        BLUE = "blue"


class _Size(TypedDict):
    width: int


@configclass
class _Circle(Config):
    radius: float = 1.0


@configclass
class _Square(Config):
    side: float = 1.0


@configclass
class _DrawingConfig(TaskConfig):
    color: Color | None = None
    sizes: tuple[_Size, ...] = ()
    shape: _Circle | _Square | None = None
    frame: _Circle | _Frame.Color | None = None


@functools.cache
def _create_validator(name: str) -> Any:
    discovery.import_experiment(name)
    schema = create_json_schema(get_experiment(name), name)
    _check_definition(json.dumps({**schema, "$defs": {}}))
    for definition in schema["$defs"].values():
        _check_definition(json.dumps(definition))

    return jsonschema.Draft202012Validator(schema)


@functools.cache
def _check_definition(definition: str) -> None:
    """Fails when part of a schema is not a schema. Experiments have most parts in common."""
    jsonschema.Draft202012Validator.check_schema(json.loads(definition))


def _find_mistake(name: str, text: str) -> Any:
    values = yaml_loader.parse(text, "test").values
    errors = _create_validator(name).iter_errors(values)
    return jsonschema.exceptions.best_match(errors)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_params_of_an_experiment_fit_its_schema(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    discovery.import_experiment(name)
    assert _find_mistake(name, to_yaml(get_experiment(name))) is None


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_shipped_config_file_fits_its_schema(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert _find_mistake(file.stem, file.read_text()) is None


@pytest.mark.parametrize(
    "text",
    [
        "{optimizer: adamw, learning_rate: 1e-3, schedule: cosine, warmup: 5 %}",
        "{optimizer: null, warmup: 500, ema: null, gradient_processors: [check, {type: noise}]}",
        "{warmup: linear, learning_rate: {cosine: {decay_steps: 3 epochs}}}",
    ],
)
def test_short_forms_fit_the_schema(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert _find_mistake("digits", f"trainer: {{optimizer_config: {text}}}") is None


MISTAKES = {
    "trainer: {optimizer_config: {optimizer: adamww}}": "trainer.optimizer_config.optimizer",
    "trainer: {optimizer_config: {schedule: cosin}}": "trainer.optimizer_config.schedule",
    "trainer: {optimizer_config: {learning_rate: -1}}": "trainer.optimizer_config.learning_rate",
    "trainer: {optimizer_config: {warmup: five}}": "trainer.optimizer_config.warmup",
    "trainer: {optimizer_config: {optimizer: {adam: {beta_1: x}}}}": (
        "trainer.optimizer_config.optimizer.adam.beta_1"
    ),
    "trainer: {train_step: 5}": "trainer",
    'trainer: {train_steps: "5"}': "trainer.train_steps",
    "trainer: {checkpoint_interval: -1}": "trainer.checkpoint_interval",
    "task: {train_data: {global_batch_size: 2.5}}": "task.train_data.global_batch_size",
    "task: {model: {dropout: 1.5}}": "task.model.dropout",
    "task: {validation_data: {near: {cache: 3}}}": "task.validation_data.near.cache",
    "trainer: {callbacks: [{nam: log}]}": "trainer.callbacks[0]",
    "trainer: {optimizers: {a: {period: 0}}}": "trainer.optimizers.a.period",
    "runtime: 5": "runtime",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_at_its_path(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    mistake = _find_mistake("digits", text)
    assert mistake is not None
    assert mistake.json_path == f"$.{MISTAKES[text]}"


@pytest.fixture(scope="module")
def drawing_schema() -> dict[str, Any]:
    return create_json_schema(ExperimentConfig(task=_DrawingConfig()), "drawing")


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"color": "red", "sizes": [{"width": 3}], "shape": {"side": 2}, "frame": "blue"}, ""),
        ({"color": "blue"}, "color"),
        ({"frame": "red"}, "frame"),
        ({"sizes": [{"width": "3"}]}, "sizes[0].width"),
        ({"shape": {"side": "wide"}}, "shape.side"),
    ],
)
def test_classes_of_plain_fields_are_described(
    values: dict[str, Any], path: str, drawing_schema: dict[str, Any]
) -> None:
    errors = jsonschema.Draft202012Validator(drawing_schema).iter_errors({"task": values})

    mistake = jsonschema.exceptions.best_match(errors)
    assert (mistake.json_path if mistake else "") == (f"$.task.{path}" if path else "")
