"""Each public name of the installed package, in the door's module of the same path."""

from __future__ import annotations

import ast
import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.dataflow import AugmentImageCoordinates, DataFromList, imgaug
from trainer_kit.compat.tensorpack.tfutils.summary import create_image_summary

from trainer_kit.compat.tensorpack import tfutils, tfv1
from trainer_kit.compat.tensorpack.installed_package import (
    DOOR,
    collect_no_garbage,
    find_original_folder,
    hide_packages,
)

tf = tfv1

# They fail to import in the original too: TensorFlow 2 has no tf.contrib, and a name is gone.
BROKEN = {"models._old_batch_norm", "train.utility"}
# The packages whose names are those of tensorpack.
PACKAGES = ("callbacks.", "input_source.", "models.", "predict.", "train.")


def read_public_names() -> dict[str, list[str]]:
    """Returns the names in `__all__` of the installed package's modules, without importing it."""
    folder = Path(find_original_folder())
    names: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(folder).with_suffix("").parts)
        if module in BROKEN or module.endswith(("_test", "unit_tests", "__init__")):
            continue
        names[module] = []
        for statement in ast.parse(path.read_text()).body:
            targets = getattr(statement, "targets", ())
            is_all = any(getattr(target, "id", "") == "__all__" for target in targets)
            if is_all and isinstance(statement.value, ast.List):
                names[module] = [item.value for item in statement.value.elts]
    return names


def test_modules_have_the_names_of_the_package() -> None:
    names = read_public_names()
    # TensorFlow's own TensorSpec is used.
    names.pop("compat.tensor_spec")

    missing = []
    for module_name, public_names in names.items():
        module = importlib.import_module(f"{DOOR}.{module_name}")
        missing += [f"{module_name}.{name}" for name in public_names if not hasattr(module, name)]

    assert len(names) > 100
    assert missing == []


def test_package_has_the_names_of_its_modules() -> None:
    door = importlib.import_module(DOOR)

    missing = []
    for module_name, public_names in read_public_names().items():
        if module_name.startswith(PACKAGES):
            missing += [name for name in public_names if not hasattr(door, name)]

    assert missing == []
    for name in ("logger", "dataset", "imgaug", "summary", "gradproc", "varreplace", "optimizer"):
        assert hasattr(door, name)
    assert door.summary is tfutils.summary


def test_star_import_brings_the_modules() -> None:
    names: dict[str, Any] = {}

    exec(f"from {DOOR} import *", names)

    for name in ("callbacks", "dataflow", "models", "tfutils", "train", "utils"):
        assert names[name] is importlib.import_module(f"{DOOR}.{name}")


def test_hidden_packages_are_missing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)

    with hide_packages("colorsys", "ast"):
        with pytest.raises(ImportError):
            importlib.import_module("colorsys")
        imported_before = importlib.import_module("ast")

    assert imported_before is ast
    assert importlib.import_module("colorsys").__name__ == "colorsys"


def test_garbage_is_collected_after_the_imports() -> None:
    with collect_no_garbage():
        is_enabled_inside = gc.isenabled()
    freeze_count = gc.get_freeze_count()
    gc.unfreeze()

    assert not is_enabled_inside
    assert gc.isenabled()
    assert freeze_count > 1000


def test_pictures_are_stacked_and_colored() -> None:
    viz = importlib.import_module(f"{DOOR}.utils.viz")

    stacked = viz.stack_patches([np.zeros([4, 4, 3], np.uint8)] * 2, 1, 2)
    colored = viz.intensity_to_rgb(np.zeros([4, 4], np.float32))

    assert stacked.shape == (4, 8, 3)
    assert colored.shape == (4, 4, 3)


@pytest.mark.parametrize("scope", ["name_scope", "variable_scope"])
def test_scope_may_be_the_first_name(scope: str) -> None:
    with getattr(tf, scope)("first"):
        variable = tf.get_variable("weight", [])
        tensor = tf.identity(variable, name="tensor")

    assert tensor.name == "first/tensor:0"
    assert variable.name == ("weight:0" if scope == "name_scope" else "first/weight:0")


def test_sparse_placeholder_is_fed() -> None:
    sparse = tf.sparse_placeholder(tf.int32)
    dense = tf.sparse_tensor_to_dense(sparse)

    value = tf.Session().run(dense, {sparse: tf.SparseTensorValue([[0, 1]], [3], [2, 2])})

    np.testing.assert_array_equal(value, [[0, 3], [0, 0]])


def test_ctc_loss_has_a_gradient() -> None:
    labels = tf.SparseTensor(tf.constant([[0, 0], [1, 0]], tf.int64), [1, 0], [2, 1])
    logits = tf.constant(np.random.RandomState(0).rand(5, 2, 4).astype(np.float32))

    loss = tf.nn.ctc_loss(labels, logits, [5, 4], time_major=True)
    decoded = tf.nn.ctc_greedy_decoder(logits, [5, 4])[0][0]
    distance = tf.edit_distance(tf.to_int32(decoded), tf.cast(labels, tf.int32))
    values = tf.Session().run([loss, tf.gradients(loss, logits)[0], distance])

    assert all(np.isfinite(value).all() for value in values)
    assert (values[0] > 0).all()
    assert np.abs(values[1]).sum() > 0


def test_recurrent_nets_run() -> None:
    inputs = tf.ones([2, 5, 3])
    cells = [tf.nn.rnn_cell.LSTMCell(4), tf.contrib.rnn.LSTMBlockCell(4)]
    cell = tf.nn.rnn_cell.MultiRNNCell(cells)

    outputs, _ = tf.nn.dynamic_rnn(cell, inputs, sequence_length=[5, 3], dtype=tf.float32)
    with tf.variable_scope("static"):
        steps = tf.unstack(inputs, axis=1)
        static_outputs, _ = tf.contrib.rnn.static_rnn(cells[0], steps, dtype=tf.float32)
    values, static_value = tf.Session().run([outputs, static_outputs[-1]])

    assert values.shape == (2, 5, 4)
    # The second sequence has three steps.
    assert (values[1, 3:] == 0).all()
    assert (values[0, 4] != 0).any()
    assert static_value.shape == (2, 4)


def test_images_become_a_summary() -> None:
    images = np.zeros((2, 4, 5, 3), np.uint8)
    images[..., 0] = 255

    summary = create_image_summary("faces", images)

    assert [value.tag for value in summary.value] == ["faces/0", "faces/1"]
    decoded = tf.Session().run(tf.image.decode_png(summary.value[0].image.encoded_image_string))
    np.testing.assert_array_equal(decoded, images[0])


def test_coordinates_of_single_precision_are_augmented() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    points = np.array([[10, 4]], np.float32)
    data = DataFromList([[image, points]], shuffle=False)
    data = AugmentImageCoordinates(data, [imgaug.Resize(10)], img_index=0, coords_index=1)
    data.reset_state()

    _, resized_points = next(iter(data))

    np.testing.assert_allclose(resized_points, [[5, 2]])
