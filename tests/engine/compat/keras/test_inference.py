"""evaluate, predict and load use the weights of a run."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.builders import json_lines
from tests.engine.compat.keras import keras_programs
from tests.engine.compat.keras.keras_programs import WEIGHTS, X, Y, pairs
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError

classifier = functools.partial(keras_programs.classifier, metrics=["accuracy"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, keras.Model]:
    """The folder of a run whose most accurate weights are not its last, and the model that it
    trained.
    """
    keras.utils.set_random_seed(4)
    folder = tmp_path_factory.mktemp("run")
    model = classifier(optimizer=keras.optimizers.SGD(3.0))
    options = {"epochs": 3, "validation_data": (X, Y), "verbose": 0, "best": "val_accuracy"}
    history = tk_keras.fit(model, X, Y, **options, model_dir=str(folder))
    assert np.argmax(history.history["val_accuracy"]) < 2
    return folder, model


@pytest.mark.parametrize("data", ["arrays", "dataset"])
def test_evaluate_gives_what_keras_gives(data: str, run: tuple[Path, keras.Model]) -> None:
    folder, trained = run
    inputs: dict[str, Any] = {
        "arrays": {"x": X, "y": Y, "sample_weight": WEIGHTS},
        "dataset": {"x": pairs().batch(30)},
    }
    options = {**inputs[data], "return_dict": data == "dataset", "verbose": 0}

    result = tk_keras.evaluate(classifier(), **options, model_dir=str(folder), which="latest")
    assert result == pytest.approx(trained.evaluate(**options), rel=1e-6)


def test_evaluations_of_other_data_are_recorded(
    run: tuple[Path, keras.Model], caplog: pytest.LogCaptureFixture
) -> None:
    folder = run[0]

    losses = []
    for number in (50, 60, 50):
        loss, _ = tk_keras.evaluate(
            classifier(), X[:number], Y[:number], verbose=0, model_dir=str(folder), which=12
        )
        losses.append(loss)

    records = json_lines(folder / "evals" / "eval.jsonl")
    recorded_losses = [record["metrics"]["validation_loss"] for record in records]
    assert [recorded_losses.count(loss) for loss in losses[:2]] == [1, 1]
    assert "gave other metrics" not in caplog.text


def test_predict_gives_what_keras_gives(run: tuple[Path, keras.Model]) -> None:
    folder, trained = run

    outputs = tk_keras.predict(classifier(), X, verbose=0, model_dir=str(folder), which="latest")

    np.testing.assert_allclose(outputs, trained.predict(X, verbose=0), rtol=1e-6)


def test_the_best_weights_are_the_default(run: tuple[Path, keras.Model]) -> None:
    folder, trained = run

    loss, accuracy = tk_keras.evaluate(classifier(), X, Y, verbose=0, model_dir=str(folder))
    assert accuracy == max(trained.history.history["val_accuracy"])

    loaded = tk_keras.load(classifier(), str(folder))  # it is compiled
    np.testing.assert_allclose(loaded.evaluate(X, Y, verbose=0), [loss, accuracy], rtol=1e-6)


def test_load_takes_a_step(run: tuple[Path, keras.Model]) -> None:
    folder, trained = run
    early = tk_keras.load(classifier(), str(folder), which=4)

    assert not np.allclose(early.get_weights()[0], trained.get_weights()[0])
    with pytest.raises(UsageError, match=r"there are the steps 4, 8, 12"):
        tk_keras.load(classifier(), str(folder), which="5")
