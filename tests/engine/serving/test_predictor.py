"""get_predictor: live models, runs and checkpoints, inputs and outputs by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit as tk
from trainer_kit.config.discovery import import_experiment
from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing.tiny_task import tiny_arrays

NAME = "tests_predicted"
_EXPERIMENT = f"""
import trainer_kit
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment


@trainer_kit.configclass
class NamedConfig(TinyConfig):
    pass


@trainer_kit.register_task(NamedConfig)
class NamedTask(TinyTask):
    def build_model(self):
        model = super().build_model()
        model.layers[0].name, model.layers[-1].name = "hidden", "logits"
        return model


@trainer_kit.register_experiment("{NAME}")
def named():
    trainer = tiny_experiment(train_steps=10, checkpoint_interval=5).trainer
    return trainer_kit.ExperimentConfig(task=NamedConfig(), trainer=trainer)
"""


class Halved(keras.layers.Layer):
    """Exposes half of its inputs."""

    def call(self, inputs: Any) -> Any:
        tk.expose("halved", inputs / 2)
        return inputs


def _build_two_inputs() -> keras.Model:
    a = keras.Input((2,), name="a")
    b = keras.Input((2,), name="b")
    total = Halved(name="same")(keras.layers.Add(name="total")([a, b]))
    return keras.Model([a, b], keras.layers.Dense(1, name="out")(total))


def test_outputs_are_exposed_tensors_and_layers_of_live_weights() -> None:
    model = _build_two_inputs()
    predict = tk.get_predictor(model, ["b", "a"], ["total", "halved", "out"])

    outputs = predict([[1.0, 2.0]], a=[[3.0, 5.0]])

    np.testing.assert_array_equal(outputs["total"], [[4, 7]])
    np.testing.assert_array_equal(outputs["halved"], [[2, 3.5]])

    model.layers[-1].kernel.assign_add([[1.0], [0.0]])

    np.testing.assert_allclose(
        predict(a=[[3.0, 5.0]], b=[[1.0, 2.0]])["out"], outputs["out"] + 4, rtol=1e-6
    )


def test_a_tf_module_may_take_a_dict_and_return_one() -> None:
    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = tf.Variable(2.0)

        def __call__(self, inputs: Any, training: bool = False) -> Any:
            assert not training
            return {
                "scaled": self.weight * inputs["x"],
                "sum": tk.expose("inner", inputs["x"] + inputs["y"]),
            }

    outputs = tk.get_predictor(Module(), ["x", "y"], ["scaled", "inner"])(
        tf.constant(3.0), tf.constant(4.0)
    )

    assert outputs == {"scaled": 6.0, "inner": 7.0}


def test_a_tf_keras_model_has_named_inputs_and_layers_too() -> None:
    class Clipped(tf_keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            if tf.reduce_any(inputs > 4):  # tf_keras converts it with AutoGraph
                inputs = tf.minimum(inputs, 4.0)
            return tk.expose("clipped", inputs) / 2

    a = tf_keras.Input((2,), name="a")
    b = tf_keras.Input((2,), name="b")
    halves = Clipped(name="halves")(tf_keras.layers.Add(name="total")([a, b]))
    model = tf_keras.Model({"a": a, "b": b}, tf_keras.layers.Dense(1, name="out")(halves))

    outputs = tk.get_predictor(model, ["b", "a"], ["total", "clipped", "halves"])(
        [[1.0, 2.0]], [[2.0, 5.0]]
    )

    np.testing.assert_array_equal(outputs["total"], [[3, 7]])
    np.testing.assert_array_equal(outputs["clipped"], [[3, 4]])
    np.testing.assert_array_equal(outputs["halves"], [[1.5, 2]])


def test_runs_and_their_checkpoints_predict_as_their_model(tmp_path: Path) -> None:
    module = tmp_path / "predicted.py"
    folder = tmp_path / "run"
    module.write_text(_EXPERIMENT)
    import_experiment(NAME, [str(module)])
    launch(get_experiment(NAME), "train", str(folder), experiment=NAME)
    points, _ = tiny_arrays(False)
    expected = tk.load_model(folder, 5)(points[:4]).numpy()

    for which in (5, str(folder / "ckpt-5")):
        outputs = tk.get_predictor(folder, ["points"], ["hidden", "logits"], which)(points[:4])
        np.testing.assert_allclose(outputs["logits"], expected, rtol=1e-6)
        assert outputs["hidden"].shape == (4, 16)

    for place, which in ((folder / "ckpt-5", 5), (folder, 7)):
        with pytest.raises(UsageError):
            tk.get_predictor(place, ["points"], ["logits"], which)

    with pytest.raises(
        UsageError, match=r"^import_modules: there is no file .*predict.py; did you mean .*ed.py"
    ):
        tk.get_predictor(
            folder, ["points"], ["logits"], import_modules=[str(tmp_path / "predict.py")]
        )


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (["a", "bb"], ["out"], r"the model has no input 'bb'; did you mean b\?"),
        (["a"], ["out"], r"the model also needs the inputs b; name them in inputs"),
        ("a", ["out"], r"inputs is 'a'; give a list of names, such as \['a'\]"),
        (["a", "b"], ["totl"], r"the model exposes no tensor 'totl', .*; did you mean total\?"),
    ],
)
def test_unknown_names_are_errors_with_near_names(inputs: Any, outputs: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tk.get_predictor(_build_two_inputs(), inputs, outputs)([[1.0, 2.0]], [[1.0, 2.0]])


def test_a_call_with_other_inputs_is_an_error() -> None:
    predict = tk.get_predictor(_build_two_inputs(), ["a", "b"], ["out"])

    with pytest.raises(
        UsageError, match=r"takes the inputs \(a, b\); it was called with \(\.\.\., c=\.\.\.\)"
    ):
        predict([[1.0, 2.0]], c=3)
