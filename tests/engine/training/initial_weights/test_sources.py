"""Starting from a part of the weights in files of several programs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close, on_each_replica, replicas
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.errors import UsageError
from trainer_kit.training.initial_weights.weight_loading import load_initial_weights


def _build_net(classes: int = 5) -> keras.Model:
    """A net whose statistics of batch normalization are not those of a new one."""
    image = keras.Input((6, 6, 2), name="image")
    hidden = keras.layers.BatchNormalization()(keras.layers.Conv2D(3, 3)(image))
    hidden = keras.layers.Dense(4)(keras.layers.Flatten()(hidden))
    net = keras.Model(image, keras.layers.Dense(classes, name="head")(hidden))
    random = np.random.default_rng(classes)
    net.set_weights([random.normal(size=value.shape) for value in net.get_weights()])
    return net


def _write_keras(net: keras.Model, folder: Path) -> str:
    net.save(folder / "net.keras")
    return f"{folder}/net.keras"


def _write_weights(net: keras.Model, folder: Path) -> str:
    net.save_weights(folder / "net.weights.h5")
    return f"{folder}/net.weights.h5"


def _write_h5(net: keras.Model, folder: Path) -> str:
    net.save(folder / "net.h5")
    return f"{folder}/net.h5"


def _export_model(net: keras.Model, folder: Path) -> str:
    net.export(folder / "exported", verbose=False)
    return f"{folder}/exported"


def _write_saved_model(net: keras.Model, folder: Path) -> str:
    tf.saved_model.save(net, str(folder / "saved"))
    return f"{folder}/saved"


def _write_tensorflow_two(net: keras.Model, folder: Path) -> str:
    return tf.train.Checkpoint(net=net).write(f"{folder}/two")


def _write_tensorflow_one(net: keras.Model, folder: Path) -> str:
    values = {variable.path: variable.numpy() for variable in net.variables}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        for path, value in values.items():
            tf.compat.v1.get_variable(path, initializer=value)
        tf.compat.v1.train.create_global_step()
        session.run(tf.compat.v1.global_variables_initializer())
        return tf.compat.v1.train.Saver().save(session, f"{folder}/one")


def _write_ours(net: keras.Model, folder: Path) -> str:
    step = tf.Variable(1, dtype=tf.int64)
    return create_training_checkpoint(global_step=step, model=net).write(f"{folder}/ckpt-1")


SOURCES = (
    _write_keras,
    _write_weights,
    _write_h5,
    _export_model,
    _write_saved_model,
    _write_tensorflow_two,
    _write_tensorflow_one,
    _write_ours,
)
Write = Callable[[keras.Model, Path], str]


def _read_body(net: Any) -> list[np.ndarray]:
    return net.get_weights()[:-2]


def _are_equal(weights: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(weights) == len(other) and all(
        np.array_equal(a, b) for a, b in zip(weights, other, strict=True)
    )


@pytest.fixture(scope="module")
def write_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Write], str]:
    """Returns the path of a net that a function of SOURCES has written."""
    return functools.cache(lambda write: write(_build_net(), tmp_path_factory.mktemp("written")))


@pytest.mark.parametrize("write", SOURCES)
def test_a_net_with_another_head_takes_the_rest_of_any_file(
    write: Write, write_once: Callable[[Write], str]
) -> None:
    old = _build_net()
    new = _build_net(classes=3)
    head = new.get_weights()[-2:]

    (report,) = load_initial_weights(
        new, [InitCheckpointConfig(path=write_once(write), exclude=("^head/",))]
    )

    assert _are_equal(_read_body(old), _read_body(new))
    assert _are_equal(head, new.get_weights()[-2:])
    assert "took 8 of 10 variables" in report
    assert "left new, since they are not chosen: head/kernel, head/bias" in report

    same = _build_net()

    load_initial_weights(same, write_once(write))  # the path alone: all weights

    assert _are_equal(old.get_weights(), same.get_weights())


@pytest.mark.parametrize("write", [_write_weights, _write_tensorflow_one, _write_ours])
def test_a_model_around_the_net_takes_it_as_its_part(
    write: Write, write_once: Callable[[Write], str]
) -> None:
    backbone = _build_net()
    old = _build_net()
    backbone.set_weights([value + 1 for value in old.get_weights()])
    model = keras.Sequential([keras.Input((6, 6, 2)), backbone, keras.layers.Dense(1, name="top")])

    load_initial_weights(model, [InitCheckpointConfig(path=write_once(write), exclude=("top/",))])

    assert _are_equal(backbone.get_weights(), old.get_weights())


def test_names_of_the_file_are_replaced_by_patterns(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.get_variable("tower/fc/w", initializer=np.full((3, 2), 7.0, np.float32))
        tf.compat.v1.get_variable("tower/fc/b", initializer=np.full(2, 8.0, np.float32))
        session.run(tf.compat.v1.global_variables_initializer())
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "one"))

    layers = [keras.layers.Dense(2, name="dense")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="sequential")
    # One after the other.
    rename = {"^tower/fc": "sequential/dense", "dense/w$": "dense/kernel", "/b$": "/bias"}

    load_initial_weights(model, [InitCheckpointConfig(path=path, rename=rename)])

    assert [float(value.ravel()[0]) for value in model.get_weights()] == [7.0, 8.0]


def test_another_shape_is_an_error_left_new_or_taken_in_part(tmp_path: Path) -> None:
    path = _write_weights(_build_net(), tmp_path)

    with pytest.raises(
        UsageError,
        match=r"  head\n.*bias +another shape +\[5\] saved, \[3\] here\n.*\[4, 5\] saved",
    ) as error:
        load_initial_weights(_build_net(3), [InitCheckpointConfig(path=path)])

    assert "task.init_checkpoint.0: 2 of the 10 chosen variables cannot be loaded" in str(
        error.value
    )

    for policy, width, note in (("skip", 0, "left new for their shape"), ("slice", 5, "a part of")):
        new = _build_net(classes=7)
        before = new.get_weights()[-1]
        (report,) = load_initial_weights(
            new, [InitCheckpointConfig(path=path, other_shapes=policy)]
        )
        assert np.array_equal(new.get_weights()[-1][:width], _build_net().get_weights()[-1][:width])
        assert np.array_equal(new.get_weights()[-1][width:], before[width:])
        assert f"  {note}: head/kernel, head/bias" in report


def test_several_files_give_their_parts_and_the_later_wins(tmp_path: Path) -> None:
    first = _build_net()
    second = _build_net(classes=6)
    (tmp_path / "other").mkdir()
    entries = [
        InitCheckpointConfig(path=_write_weights(first, tmp_path), exclude=("^head",)),
        InitCheckpointConfig(
            path=_write_keras(second, tmp_path / "other"), variables=("conv2d", "^head")
        ),
    ]
    new = _build_net(classes=6)

    load_initial_weights(new, entries)

    assert _are_equal(new.get_weights()[2:-2], first.get_weights()[2:-2])
    assert _are_equal(
        new.get_weights()[:2] + new.get_weights()[-2:],
        second.get_weights()[:2] + second.get_weights()[-2:],
    )


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"variables": ("conv3d",)},
            "0.variables: no variable of the model matches 'conv3d'; similar ones are: conv2d",
        ),
        (
            {"exclude": ("haed",)},
            "0.exclude: no variable of the model matches 'haed'; similar ones are: head/",
        ),
        (
            {"rename": {"haed": ""}},
            "0.rename: no variable of .*net.weights.h5 matches 'haed'; similar ones are: head/0",
        ),
        ({"rename": {".*": "x"}}, "0.rename: .* and .* would both be x"),
        ({"variables": ("head",), "exclude": ("head",)}, "0: 0 of the 0 chosen variables"),
        (
            {"path": "{}/nte.weights.h5"},
            "0: there is no checkpoint .*; did you mean .*net.weights.h5",
        ),
    ],
)
def test_a_pattern_or_a_path_that_finds_nothing_is_an_error(
    entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = _write_weights(_build_net(), tmp_path)
    net = _build_net()
    before = net.get_weights()
    fields = {**entry, "path": entry.get("path", path).format(tmp_path)}

    with pytest.raises(UsageError, match=message):
        load_initial_weights(
            net, [InitCheckpointConfig(path=path), InitCheckpointConfig(**fields)][1:]
        )

    assert _are_equal(before, net.get_weights())


def _build_dense(*names: str, model: str = "net") -> keras.Model:
    layers = [keras.layers.Dense(2, name=name) for name in names]
    return keras.Sequential([keras.Input((2,)), *layers], name=model)


def test_layers_of_the_same_names_are_taken(tmp_path: Path) -> None:
    long = _build_dense("block_1", "block_2", "block_3")
    short = _build_dense("block_2", "block_3")

    (report,) = load_initial_weights(
        short, [InitCheckpointConfig(path=_write_weights(long, tmp_path))]
    )

    assert _are_equal(short.get_weights(), long.get_weights()[2:])
    assert "by the order of layers" not in report


@pytest.mark.parametrize("write", [_write_weights, _write_h5, _write_tensorflow_one])
def test_an_equal_name_goes_before_the_order_of_layers(write: Write, tmp_path: Path) -> None:
    old = _build_dense("encoder", "stage_2", "stage_3")
    new = _build_dense("encoder", "stage_1", "stage_2")

    path = write(old, tmp_path)

    for variables in ((), ("stage_1",)):
        with pytest.raises(
            UsageError, match=r"2 of the \d chosen.*\n.*/stage_1\n.*missing in the file"
        ):
            load_initial_weights(new, [InitCheckpointConfig(path=path, variables=variables)])

    load_initial_weights(new, [InitCheckpointConfig(path=path, variables=("stage_2",))])

    assert _are_equal(new.get_weights()[4:], old.get_weights()[2:4])


def test_a_single_layer_of_another_name_is_not_taken(tmp_path: Path) -> None:
    config = InitCheckpointConfig(
        path=_write_weights(_build_dense("fc"), tmp_path), variables=("head",)
    )

    with pytest.raises(UsageError, match="2 of the 2 chosen variables cannot be loaded"):
        load_initial_weights(_build_dense("fc", "head"), [config])

    renamed = config.replace(rename={"^fc": "head"})
    load_initial_weights(_build_dense("fc", "head"), [renamed])


@pytest.mark.parametrize("write", [_write_weights, _write_ours])
def test_variables_that_the_order_of_layers_found_are_listed(write: Write, tmp_path: Path) -> None:
    old = _build_dense("fc", "fc_1")
    new = _build_dense("fc_5", "fc_6")

    (report,) = load_initial_weights(new, [InitCheckpointConfig(path=write(old, tmp_path))])

    assert _are_equal(new.get_weights(), old.get_weights())
    assert "by the order of layers, since their numbers differ: net/fc_5/kernel = " in report


@pytest.mark.parametrize("write", [_write_weights, _write_tensorflow_two])
def test_of_two_equal_inner_models_the_chosen_one_is_loaded(write: Write, tmp_path: Path) -> None:
    teacher = _build_dense("fc", model="teacher")
    student = _build_dense("fc", model="student")
    image = keras.Input((2,))
    saved = _build_dense("fc", model="student")
    both = keras.Model(image, [teacher(image), student(image)])
    before = teacher.get_weights()

    load_initial_weights(
        both, [InitCheckpointConfig(path=write(saved, tmp_path), variables=("^student/",))]
    )

    assert _are_equal(student.get_weights(), saved.get_weights())
    assert _are_equal(teacher.get_weights(), before)


def test_a_module_takes_a_checkpoint_of_another_program(tmp_path: Path) -> None:
    saved = tf.Module()
    module = tf.Module()
    saved.w = tf.Variable([1.0, 2.0])
    module.w = tf.Variable([0.0, 0.0])

    load_initial_weights(module, tf.train.Checkpoint(net=saved).write(f"{tmp_path}/module"))

    assert module.w.numpy().tolist() == [1.0, 2.0]


def test_nothing_but_other_shapes_is_an_error(tmp_path: Path) -> None:
    config = InitCheckpointConfig(
        path=_write_weights(_build_net(), tmp_path), variables=("head",), other_shapes="skip"
    )

    with pytest.raises(
        UsageError, match=r"2 of the 2 chosen variables cannot be loaded(?s:.*)another shape"
    ):
        load_initial_weights(_build_net(3), [config])


def test_each_replica_gets_the_weights(tmp_path: Path) -> None:
    old = _build_net()
    path = _write_keras(old, tmp_path)

    with replicas(2).scope():
        new = _build_net(classes=3)
        load_initial_weights(new, [InitCheckpointConfig(path=path, exclude=("^head",))])

    assert_all_close(on_each_replica(replicas(2), new.variables[0]), 2 * [old.get_weights()[0]])
