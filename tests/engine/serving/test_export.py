"""Exports: each format runs in its own runtime, and what differs is not published."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from ai_edge_litert.interpreter import Interpreter

import trainer_kit
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.serving.inference_function import name_tensors
from trainer_kit.serving.model_export import publish_folder
from trainer_kit.testing import TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import FEATURES

NAME = "tests_exported"
LEFT = np.random.default_rng(0).random((8, 6)).astype("float32")
RIGHT = LEFT[:, :3] + 1


class ShiftedTask(TinyTask):
    """Takes features that are shifted, and gives probabilities."""

    def preprocess(self, inputs: Any) -> Any:
        return inputs["shifted"] - 1.0

    def postprocess(self, outputs: Any) -> Any:
        return {"probabilities": tf.nn.softmax(outputs)}

    def serving_examples(self) -> Any:
        return {"shifted": np.ones((9, FEATURES), "float32")}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates averaged weights."""
    folder = tmp_path_factory.mktemp("exported") / "run"
    optimization = {
        "optimizer": {"type": "sgd"},
        "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
        "ema": {"average_decay": 0.95},
    }
    config = tiny_experiment(
        train_steps=20, optimizer_config=optimization, best_checkpoint_eval_metric="accuracy"
    )
    trainer_kit.register_experiment(NAME)(lambda: config)
    launch(config, "train_and_eval", str(folder), experiment=NAME)
    return folder


def build_two_inputs() -> keras.Model:
    left = keras.Input((6,), name="left")
    right = keras.Input((3,), name="right")
    hidden = keras.layers.Concatenate()([left, right])
    hidden = keras.layers.GaussianNoise(1.0)(keras.layers.Dropout(0.5)(hidden))
    return keras.Model({"left": left, "right": right}, keras.layers.Dense(2)(hidden))


def test_an_exported_run_gives_the_averaged_weights(run: Path) -> None:
    exported = trainer_kit.export(run, formats=["saved_model"])

    model = tf.saved_model.load(exported.path)
    features = np.ones((5, FEATURES), "float32")
    outputs = model.signatures["serving_default"](inputs=tf.constant(features))
    averaged = trainer_kit.load_model(run)
    np.testing.assert_allclose(outputs["outputs"], averaged(features), rtol=1e-6)
    assert exported.path == str(run / "export" / "20")
    assert exported.formats["saved_model"].difference == 0.0


def test_the_card_has_a_command_that_can_be_repeated(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["command"] = ["/env/trainer_kit/train.py", "--experiment=digits"]
    (copy / "manifest.json").write_text(json.dumps(manifest))

    trainer_kit.export(copy, tmp_path / "model")

    text = (tmp_path / "model" / "README.md").read_text()
    assert "\npython -m trainer_kit.train --experiment=digits\n" in text


def test_the_card_says_what_the_model_is(run: Path, tmp_path: Path) -> None:
    trainer_kit.export(run, tmp_path / "model")

    text = (tmp_path / "model" / "README.md").read_text()
    record = json.loads((tmp_path / "model" / "export.json").read_text())
    assert f"# {NAME}, step 20" in text
    assert f"- `inputs`: float32, [batch, {FEATURES}]" in text
    assert "- accuracy: " in text
    assert f'tf.saved_model.load("{tmp_path / "model"}")' in text
    assert record["step"] == 20
    assert record["inputs"] == {"inputs": {"dtype": "float32", "shape": [None, FEATURES]}}


@pytest.mark.parametrize("file", ["saved_model", "keras", "litert", "onnx"])
def test_two_named_inputs_reach_each_runtime(file: str, tmp_path: Path) -> None:
    model = build_two_inputs()

    exported = trainer_kit.export(
        model, tmp_path / "model", [file], examples={"left": LEFT, "right": RIGHT}
    )

    assert exported.formats[file].difference < 1e-5
    assert exported.formats[file].examples == 8


def test_a_task_has_its_own_inputs_and_outputs(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("preprocess", "postprocess", "serving_examples"):
        monkeypatch.setattr(TinyTask, name, getattr(ShiftedTask, name))

    exported = trainer_kit.export(run, tmp_path / "model")
    with pytest.raises(UsageError, match="would have the model without the task's preprocess"):
        trainer_kit.export(run, tmp_path / "other", ["keras"])

    model = tf.saved_model.load(exported.path)
    outputs = model.signatures["serving_default"](shifted=tf.ones([2, FEATURES]))
    np.testing.assert_allclose(tf.reduce_sum(outputs["probabilities"], 1), [1, 1], rtol=1e-6)


class Unregistered(keras.Model):
    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.noise = noise

    def call(self, inputs: Any, training: bool = False) -> Any:
        outputs = self.dense(inputs)
        return outputs + self.noise * tf.random.normal([2]) if self.noise else outputs


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = Unregistered()
    model(LEFT)

    with pytest.raises(UsageError, match="knows only Keras cannot load the file: TypeError: Could"):
        trainer_kit.export(model, tmp_path / "model", ["saved_model", "keras"], examples=LEFT)

    # The other format is there.
    assert (tmp_path / "model" / "saved_model.pb").exists()
    assert not (tmp_path / "model" / "model.keras").exists()


def test_a_model_that_draws_random_numbers_is_refused(tmp_path: Path) -> None:
    model = Unregistered(noise=1.0)
    model(LEFT)

    with pytest.raises(UsageError, match="two calls on the same batch differ"):
        trainer_kit.export(model, tmp_path / "model", examples=LEFT)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def stripes() -> tuple[keras.Model, np.ndarray]:
    """A convnet that was fitted to tell the place of a stripe, and images."""
    keras.utils.set_random_seed(1)
    labels = np.arange(128) % 4
    images = np.random.default_rng(1).random((128, 8, 8, 1)).astype("float32")
    images[np.arange(128), labels * 2] += 1
    inputs = keras.Input((8, 8, 1), name="image")
    hidden = keras.layers.Conv2D(4, 3, activation="relu")(inputs)
    outputs = keras.layers.Dense(4)(keras.layers.Flatten()(hidden))
    model = keras.Model(inputs, outputs)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(images, labels, epochs=5, verbose=0)
    return model, images


def test_int8_gives_the_same_classes(
    stripes: tuple[keras.Model, np.ndarray], tmp_path: Path
) -> None:
    model, images = stripes

    exported = trainer_kit.export(
        model, tmp_path / "model", ["litert", "litert_int8"], examples=images
    )

    parity = exported.formats["litert_int8"]
    assert parity.examples == 128
    assert parity.class_agreement is not None
    assert parity.class_agreement >= 0.9
    # The comparison in float32 stays as strict as without int8.
    assert exported.formats["litert"].examples == 8
    assert exported.formats["litert"].class_agreement is None

    interpreter = Interpreter(str(tmp_path / "model" / "model_int8.tflite"))
    dtypes = [tensor["dtype"] for tensor in interpreter.get_tensor_details()]
    assert dtypes.count(np.int8) >= 5
    assert interpreter.get_input_details()[0]["dtype"] == np.float32
    assert interpreter.get_output_details()[0]["dtype"] == np.float32
    assert "model_int8.tflite" in (tmp_path / "model" / "README.md").read_text()


def test_int8_has_the_bound_that_the_user_gives(
    stripes: tuple[keras.Model, np.ndarray], tmp_path: Path
) -> None:
    model, examples = stripes

    exported = trainer_kit.export(
        model, tmp_path / "model", ["litert_int8"], examples=examples, tolerance=0.3
    )
    with pytest.raises(UsageError, match=r"litert_int8: the outputs differ .* 1.0e-04 is allowed"):
        trainer_kit.export(
            model, tmp_path / "other", ["litert_int8"], examples=examples, tolerance=1e-4
        )

    assert 1e-4 < exported.formats["litert_int8"].difference < 0.3
    assert not (tmp_path / "other").exists()


def test_int8_of_numbers_needs_a_bound(tmp_path: Path) -> None:
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))

    with pytest.raises(UsageError, match=r"no classes, and they differ by .*; give a"):
        trainer_kit.export(model, tmp_path / "model", ["litert_int8"], examples=LEFT)


def build_table() -> tf.lookup.StaticHashTable:
    entries = tf.lookup.KeyValueTensorInitializer(tf.constant(["low", "high"]), [0.0, 1.0])
    return tf.lookup.StaticHashTable(entries, 0.5)


def test_a_table_of_the_task_is_exported_with_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up_words(self: TinyTask, inputs: Any) -> Any:
        return self.table.lookup(inputs["words"])

    def look_up_in_list(self: TinyTask, inputs: Any) -> Any:
        return self.tables[0].lookup(inputs["words"])

    create_task = TinyTask.__init__

    def create_task_with_tables(self: TinyTask, *args: Any, **kwargs: Any) -> None:
        create_task(self, *args, **kwargs)
        self.table = build_table()
        self.tables = [build_table()]

    words = np.array([["low"] * FEATURES, ["high"] * FEATURES])
    monkeypatch.setattr(TinyTask, "__init__", create_task_with_tables)
    monkeypatch.setattr(TinyTask, "preprocess", look_up_words)
    monkeypatch.setattr(TinyTask, "serving_examples", lambda self: {"words": words})

    exported = trainer_kit.export(run, tmp_path / "model")
    monkeypatch.setattr(TinyTask, "preprocess", look_up_in_list)
    with pytest.raises(UsageError, match="reads a lookup table that is no attribute of the task"):
        trainer_kit.export(run, tmp_path / "other")

    model = tf.saved_model.load(exported.path)
    outputs = model.signatures["serving_default"](words=tf.constant(words))
    numbers = np.array([[0.0] * FEATURES, [1.0] * FEATURES], "float32")
    np.testing.assert_allclose(outputs["outputs"], trainer_kit.load_model(run)(numbers), rtol=1e-5)


def test_a_recurrent_layer_needs_unroll_in_litert(tmp_path: Path) -> None:
    inputs = keras.Input((4, 3))
    model = keras.Model(inputs, keras.layers.LSTM(2)(inputs))

    with pytest.raises(UsageError, match=r"litert refuses the model: .* unroll=True"):
        trainer_kit.export(model, tmp_path / "model", ["litert"], examples=np.ones((8, 4, 3)))


def test_a_model_of_keras_2_is_exported(tmp_path: Path) -> None:
    inputs = tf_keras.Input((6,))
    model = tf_keras.Model(inputs, tf_keras.layers.BatchNormalization()(inputs))

    exported = trainer_kit.export(model, tmp_path / "model", examples=LEFT)
    with pytest.raises(UsageError, match="is not a model of Keras 3; take the format saved_model"):
        trainer_kit.export(model, tmp_path / "other", ["keras"], examples=LEFT)

    assert exported.formats["saved_model"].difference == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"formats": ["onix"]}, "there is no format 'onix'; did you mean onnx?"),
        ({"path": "."}, "exists already"),
        ({"which": 7}, "there is no checkpoint of step 7"),
        ({"path": "empty", "examples": np.ones((0, FEATURES))}, "give one batch"),
    ],
)
def test_mistakes_are_one_line(run: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer_kit.export(run, **arguments)


def test_an_export_removes_what_killed_ones_have_left(tmp_path: Path) -> None:
    # In a container each process may have the same number.
    for number in (999_999_999, os.getpid()):
        (tmp_path / f".model.{number}.tmp").mkdir()

    with publish_folder(tmp_path / "model") as folder:
        Path(folder, "file").write_text("content")
        assert not (tmp_path / "model").exists()

    assert os.listdir(tmp_path) == ["model"]


def test_a_preprocess_needs_examples(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyTask, "preprocess", ShiftedTask.preprocess)

    with pytest.raises(UsageError, match="has a preprocess, and no serving_examples"):
        trainer_kit.export(run, tmp_path / "model")


@pytest.mark.parametrize(
    ("structure", "names"),
    [
        (1, ["inputs"]),
        ([1, 2], ["inputs_0", "inputs_1"]),
        ({"b": 1, "a": [2, 3]}, ["a_0", "a_1", "b"]),
        ({"a-b": 1}, ["a_b"]),
        (OrderedDict([("z", 1), ("y", 2)]), ["y", "z"]),
    ],
)
def test_inputs_have_names(structure: Any, names: list[str]) -> None:
    assert list(name_tensors(structure, "inputs")) == names
