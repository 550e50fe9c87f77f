"""Callbacks by name, from a config."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import trainer_kit
from trainer_kit.callbacks.configured_callbacks import check_callbacks, create_callbacks
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import CallbackConfig, ExperimentConfig
from trainer_kit.errors import UsageError


@trainer_kit.register_callback("test/samples")
class Samples(trainer_kit.Callback):
    def __init__(self, count: int = 4) -> None:
        self.count = count


def _create_callback(name: str, **args: Any) -> Any:
    return create_callbacks([CallbackConfig(name=name, args=args)])[0]


@register_experiment("tests_with_callbacks")
def with_callbacks() -> ExperimentConfig:
    return ExperimentConfig()


def test_gin_names_a_callback_and_its_arguments() -> None:
    binding = "TrainerConfig.callbacks = [{'name': 'test/samples', 'args': {'count': 7}}]"
    config = resolve_config("tests_with_callbacks", ConfigSources(gin_params=(binding,))).config

    (callback,) = create_callbacks(config.trainer.callbacks)

    assert type(callback) is Samples
    assert callback.count == 7


@pytest.mark.parametrize("name", ["test/samples", f"{__name__}:Samples"])
def test_a_callback_is_made_by_its_name_or_by_its_class(name: str) -> None:
    callback = _create_callback(name, count=7)
    assert type(callback) is Samples
    assert callback.count == 7


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("test/sample", {}, r"no callback is called 'test/sample'; did you mean test/samples"),
        (
            "test/samples",
            {"cout": 1},
            r"trainer\.callbacks\[0\]\.args: test/samples: .*'cout'; did you mean count\?",
        ),
        (f"{__name__}:Sample", {}, r"has no subclass of trainer_kit\.Callback called 'Sample'"),
        ("no_such_module:Samples", {}, r"there is no module 'no_such_module'"),
    ],
)
def test_a_mistake_names_what_is_near(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        _create_callback(name, **args)


def test_only_subclasses_of_callback_can_be_registered() -> None:
    with pytest.raises(UsageError):
        trainer_kit.register_callback("test/other")(dict)  # type: ignore[type-var]


@pytest.mark.parametrize("value", [Samples(), [Samples], ["samples"], "samples"])
def test_what_is_no_list_of_callbacks_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^callbacks: "):
        check_callbacks(value)


def test_a_keras_callback_of_another_task_is_refused() -> None:
    with pytest.raises(UsageError):
        check_callbacks([keras.callbacks.TerminateOnNaN()])
