"""Runs without an experiment: their Keras model is in model.json, and can be loaded and used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit
from trainer_kit.compat import keras as tk_keras
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.serving.recorded_model import describe_model
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import FEATURES

X = np.random.default_rng(0).uniform(-1, 1, (64, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")

SCALE_MODULE = """
import keras

@keras.saving.register_keras_serializable("recorded")
class Scale(keras.layers.Layer):
    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, inputs):
        return inputs * self.factor

    def get_config(self):
        return {**super().get_config(), "factor": self.factor}
"""


class CustomStep(keras.Model):
    """A functional model with its own training step, which no other process knows."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return dict(super().train_step(data))


class Subclassed(keras.Model):
    """A model without get_config whose arguments are layers."""

    def __init__(self, layer: keras.Layer) -> None:
        super().__init__()
        self.layer = layer

    def call(self, inputs: Any) -> Any:
        return self.layer(inputs)


def build_sequential() -> keras.Model:
    hidden = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    return keras.Sequential([keras.Input((4,)), *hidden, keras.layers.Dense(2)])


def build_without_input() -> keras.Model:
    return keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(2)])


def build_custom_step() -> keras.Model:
    normalization = keras.layers.Normalization()
    normalization.adapt(X)
    inputs = keras.Input((4,))
    steps = normalization(inputs)[:, None]
    encoder = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(3)])
    outputs = keras.layers.Dense(2)(keras.layers.TimeDistributed(encoder)(steps))
    return CustomStep(inputs, outputs[:, 0])


def build_lambda() -> keras.Model:
    layers = [keras.layers.Lambda(lambda inputs: inputs * 2), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((4,)), *layers])


def build_bins() -> keras.Model:
    bins = keras.layers.Discretization(num_bins=4)
    bins.adapt(X)
    return keras.Sequential([keras.Input((4,)), bins, keras.layers.Dense(2)])


def build_subclassed() -> keras.Model:
    return Subclassed(keras.layers.Dense(2))


def build_keras_2() -> tf_keras.Model:
    return tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(2)])


def fit(model: Any, folder: Path, **options: Any) -> None:
    """Trains for an epoch, with a loss that Keras cannot serialize."""
    library = keras if isinstance(model, keras.Model) else tf_keras
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", lambda labels, outputs: loss(labels, outputs))
    tk_keras.fit(model, X, Y, batch_size=16, verbose=0, **options, model_dir=str(folder))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The folder of a fit, and the outputs of its model."""
    folder = tmp_path_factory.mktemp("fit") / "run"
    model = build_sequential()
    fit(model, folder, validation_data=(X, Y))
    return folder, np.asarray(model(X))


@pytest.mark.parametrize("build", [build_without_input, build_custom_step])
def test_the_model_of_a_fit_is_loaded(build: Any, tmp_path: Path) -> None:
    model = build()
    fit(model, tmp_path)

    loaded = trainer_kit.load_model(tmp_path, "latest", import_modules=False)

    np.testing.assert_array_equal(loaded(X), model(X))


def test_a_fit_is_exported_after_a_comparison_on_random_numbers(
    run: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    folder, expected = run

    exported = trainer_kit.export(folder, tmp_path / "model")

    signature = tf.saved_model.load(exported.path).signatures["serving_default"]
    card = (tmp_path / "model" / "README.md").read_text()
    np.testing.assert_allclose(signature(inputs=X)["outputs"], expected, rtol=1e-6)
    assert "# run, step 4" in card
    assert "on 8 random examples\n" in card


def test_rows_are_predicted_by_a_fit_if_they_are_given(run: tuple[Path, np.ndarray]) -> None:
    folder, expected = run

    columns = trainer_kit.predict(folder, {"inputs": X})

    assert isinstance(columns, dict)
    np.testing.assert_allclose(columns["outputs"], expected, rtol=1e-6)
    with pytest.raises(UsageError, match=r"the run has no validation data; predict needs --input"):
        trainer_kit.predict(folder)


def test_a_launched_run_gives_its_averaged_weights(tmp_path: Path) -> None:
    optimization = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
        "ema": {"average_decay": 0.95},
    }
    config = tiny_experiment(train_steps=20, optimizer_config=optimization)
    trained, _ = launch(config, "train", str(tmp_path))
    features = np.ones((5, FEATURES), "float32")

    averaged = trainer_kit.load_model(tmp_path, "latest")
    weights = trainer_kit.load_model(tmp_path, "latest", weights="weights")

    np.testing.assert_array_equal(weights(features), trained(features))
    assert not np.array_equal(averaged(features), trained(features))


def test_a_task_with_its_own_inference_records_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TinyTask(TinyConfig())
    model = task.build_model()

    plain = describe_model(task, model)
    monkeypatch.setattr(TinyTask, "postprocess", lambda self, outputs: -outputs)
    own = describe_model(task, model)

    assert plain.keys() == {"model.json"}
    assert own == {}


@pytest.mark.parametrize("build", [build_bins, build_keras_2, build_subclassed])
def test_what_keras_cannot_record_has_no_description(build: Any) -> None:
    model = build()
    model(X)

    assert describe_model(TinyTask(TinyConfig()), model) == {}


def test_a_model_without_a_record_trains_and_is_refused(tmp_path: Path) -> None:
    fit(build_subclassed(), tmp_path)

    assert not (tmp_path / "model.json").exists()
    with pytest.raises(UsageError, match=r"it has no model\.json.*trainer_kit\.load_weights\(mod"):
        trainer_kit.load_model(tmp_path)


def test_code_in_a_layer_is_refused(run: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(run[0], tmp_path / "run"))
    record = describe_model(TinyTask(TinyConfig()), build_lambda())
    (folder / "model.json").write_text(record["model.json"])

    with pytest.raises(UsageError, match=r"model\.json: .*`Lambda` .*enable_unsafe_deserializ"):
        trainer_kit.load_model(folder)


def test_registered_classes_come_from_the_modules_that_are_named(tmp_path: Path) -> None:
    module = tmp_path / "recorded_scale.py"
    module.write_text(SCALE_MODULE)
    namespace: dict[str, Any] = {}
    exec(SCALE_MODULE, namespace)
    model = keras.Sequential([keras.Input((4,)), namespace["Scale"](3.0), keras.layers.Dense(2)])
    fit(model, tmp_path / "run")
    del keras.saving.get_custom_objects()["recorded>Scale"]

    with pytest.raises(UsageError, match=r"locate class 'Scale'.*Name the modules of its classes"):
        trainer_kit.load_model(tmp_path / "run", "latest")
    loaded = trainer_kit.load_model(tmp_path / "run", "latest", import_modules=str(module))

    np.testing.assert_array_equal(loaded(X), model(X))
