"""A hyper-parameter that falls when evaluations stop improving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from trainer_kit.callbacks.callback import Run
from trainer_kit.callbacks.reduce_on_plateau import ReduceOnPlateau
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.training.trainer import Trainer

HIGHER = {"metric_comp": "higher"}
VALUES = np.random.default_rng(0).normal(size=80) + 3 / np.arange(1, 81)


def _compute_rates_of_keras(**options: Any) -> list[float]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01))
    callback = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", **options)
    callback.set_model(model)
    callback.on_train_begin()
    rates = []
    for epoch, value in enumerate(VALUES):
        callback.on_epoch_end(epoch, {"val_loss": float(value)})
        rates.append(float(model.optimizer.learning_rate.numpy()))

    return rates


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras' callback
@pytest.mark.parametrize(
    "options",
    [
        {"patience": 3},
        {"patience": 2, "factor": 0.5, "cooldown": 4, "min_delta": 0.3},
        {"patience": 2, "factor": 0.7, "cooldown": 1, "min_value": 0.003, "metric_comp": "higher"},
    ],
)
def test_the_rates_are_those_of_reduce_lr_on_plateau(options: dict[str, Any]) -> None:
    config = tiny_experiment()
    run = Run(Trainer.create(config, TinyTask(config.task), train=True, evaluate=True))
    callback = ReduceOnPlateau("validation_loss", **{"metric_comp": "lower", **options})
    rates = []
    for step, value in enumerate(VALUES):
        run.step = step
        for _ in range(2):  # the logs of a step come again when another validation set is evaluated
            callback.evaluation_end(run, {"validation_loss": np.float64(value)})
        rates.append(run.hyper_parameters.value("learning_rate"))
        again = ReduceOnPlateau("validation_loss", **{"metric_comp": "lower", **options})
        again.restore(callback.state())
        callback = again

    names = {"min_value": "min_lr", "metric_comp": "mode"}
    of_keras = {
        names.get(name, name): {"higher": "max"}.get(value, value)
        for name, value in options.items()
    }

    assert rates == _compute_rates_of_keras(**of_keras)
    assert len(set(rates)) > 2


@pytest.mark.parametrize(
    ("mode", "args", "message"),
    [
        (
            "train_and_eval",
            {"metric": "acuracy", **HIGHER},
            r"reports no metric 'acuracy'; did you mean accuracy",
        ),
        ("train", {"metric": "accuracy", **HIGHER}, r"the mode does not evaluate during training"),
        ("train", {"metric": "accuracy", **HIGHER, "factor": 2.0}, "factor is 2.0"),
        ("train", {"metric": "accuracy", **HIGHER, "patience": 1.5}, "patience is 1.5"),
        ("train", {"metric": "accuracy", **HIGHER, "min_delta": "a"}, "min_delta is 'a'"),
        ("train", {"metric": "accuracy"}, "metric_comp"),
        (
            "train",
            {"metric": "accuracy", "metric_comp": "max"},
            "metric_comp is 'max'; use lower or higher",
        ),
    ],
)
def test_a_mistake_is_reported_before_training(
    tmp_path: Path, mode: str, args: Any, message: str
) -> None:
    config = tiny_experiment(callbacks=[{"name": "reduce_on_plateau", "args": args}])
    with pytest.raises(UsageError, match=message):
        launch(config, mode, str(tmp_path))
