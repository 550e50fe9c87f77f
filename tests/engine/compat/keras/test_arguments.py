"""Mistakes in the arguments of fit and train_loop are reported in the words of Keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.compat.keras.keras_programs import X, Y, classifier, pairs
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError


@pytest.fixture(scope="module")
def model() -> Any:
    return classifier(metrics=["accuracy"])


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"epoch": 2}, r"fit has no argument 'epoch'; did you mean epochs"),
        ({"epochs": "2"}, r"epochs='2' is not a whole number"),
        ({"validation_freq": 0}, r"validation_freq=0: .* at least 1"),
        ({"best": "val_acc"}, r"best='val_acc': .*did you mean val_accuracy"),
        ({"best": "val_auc"}, r"best='val_auc': .*a callback adds.*ModelCheckpoint\(monitor"),
        ({"best": "accuracy"}, r"best='accuracy': .*did you mean val_accuracy"),
        ({"best": "val_loss", "validation_data": None}, r"best='val_loss': there is no validation data"),
        ({"x": pairs, "y": None}, r"x is a dataset of single examples: .* shape \(\); .*x\.batch\(32\)"),
    ],
)
def test_a_mistake_is_reported(model: Any, mistake: dict[str, Any], message: str, tmp_path: Path) -> None:
    given = {"x": X, "y": Y, "validation_data": (X, Y), "verbose": 0, **mistake}
    if given["x"] is pairs:
        given["x"] = pairs()
    with pytest.raises(UsageError, match=message):
        tk_keras.fit(model, **given, model_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
