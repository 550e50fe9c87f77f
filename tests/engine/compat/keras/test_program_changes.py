"""A resumed fit warns where its program has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tf_keras

from tests.engine.compat.keras.keras_programs import X, Y
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.program_changes import describe_model


def build_model(
    of: Any = keras, activation: str = "relu", rate: float = 0.01, from_logits: bool = True
) -> Any:
    model = of.Sequential([of.Input((8,)), of.layers.Dense(3, activation=activation)])
    loss = of.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    model.compile(of.optimizers.SGD(rate), loss, jit_compile=False)
    return model


@pytest.mark.parametrize("of", [keras, tf_keras])
def test_a_changed_program_is_named_at_a_resume(
    of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(epochs: int, **changed: Any) -> str:
        caplog.clear()
        model = build_model(of, **changed)
        tk_keras.fit(model, X, Y, epochs=epochs, verbose=0, model_dir=str(tmp_path))
        assert float(model.optimizer.learning_rate) == pytest.approx(changed.get("rate", 0.01))
        return "".join(line for line in caplog.messages if "the program has changed" in line)

    assert fit(1) == ""
    assert fit(1) == ""

    changes = fit(1, rate=0.002, activation="tanh", from_logits=False)
    assert "learning_rate of the optimizer was 0.01 and is 0.002" in changes
    assert "layer 0 was Dense with arguments" in changes
    assert "the loss was SparseCategoricalCrossentropy" in changes


def test_an_optimizer_without_a_config_is_described_by_its_class() -> None:
    class Composite(tf_keras.optimizers.legacy.SGD):  # type: ignore[misc]
        def get_config(self) -> dict[str, Any]:
            raise NotImplementedError("it consists of several")

    model = build_model(tf_keras)
    model.optimizer = Composite()
    described = describe_model(model)
    assert described["the optimizer"] == "Composite"
    assert not any("of the optimizer" in name for name in described)


def test_a_rate_that_callbacks_changed_is_no_program_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(model: Any, epochs: int) -> None:
        lower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        tk_keras.fit(
            model, X, Y, epochs=epochs, callbacks=[lower], verbose=0, model_dir=str(tmp_path)
        )

    model = build_model()
    fit(model, 1)
    fit(model, 2)
    fit(build_model(), 2)
    assert "the program has changed" not in caplog.text
