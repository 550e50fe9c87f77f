"""The weights of a run in other programs, and weights of other programs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit
from tests.builders import assert_all_close, json_lines, read_json
from tests.engine.checkpoints.state.test_keras_structure import (
    MODELS,
    POINTS,
    build_functional,
    build_sequential,
    scramble_weights,
)
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import DataError, StorageError, UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.serving import model_loading
from trainer_kit.serving.run_config_loading import read_run_config
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment
from trainer_kit.testing.tiny_task import CLASSES, FEATURES, tiny_arrays

Output = pytest.CaptureFixture[str]
NAME = "tests_served"
_EXPERIMENT = f"""
import trainer_kit
from trainer_kit.testing import tiny_experiment

trainer_kit.register_experiment("{NAME}")(tiny_experiment)
"""
EMA = {
    "optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.05}},
    "ema": {"average_decay": 0.95},
}


def _build_config() -> Any:
    two = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}
    config = tiny_experiment(
        train_steps=60,
        max_to_keep=3,
        optimizer_config=EMA,
        best_checkpoint_eval_metric="accuracy",
        best_checkpoints={"two": two},
    )
    assert isinstance(config.task, TinyConfig)
    return config.replace(task={"dropout": 0.1})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that evaluates averaged weights, its sidecar, and its module."""
    folder = tmp_path_factory.mktemp("served") / "run"
    (folder.parent / "served.py").write_text(_EXPERIMENT)
    launch(_build_config(), "train_and_eval", str(folder), experiment=NAME)
    launch(_build_config(), "continuous_eval", str(folder), eval_name="beside", experiment=NAME)

    return folder


@pytest.fixture(scope="module")
def modules(run: Path) -> list[str]:
    return [str(run.parent / "served.py")]


def test_a_run_that_an_earlier_release_began_with_auto_is_loaded(
    run: Path, modules: list[str], tmp_path: Path
) -> None:
    text = (run / "params.yaml").read_text()
    manifest = read_json(run / "manifest.json")

    assert "fuse_steps: 1\n" in text

    text = text.replace("fuse_steps: 1\n", "fuse_steps: auto\n")
    text = text.replace("executor: default\n", "executor: auto\n")
    (tmp_path / "params.yaml").write_text(text)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "fuse_steps": 5}))

    assert read_run_config(tmp_path, modules) == read_run_config(run, modules)


def _compute_accuracy(model: Any) -> float:
    points, labels = tiny_arrays(False)
    return float((model(points).numpy().argmax(1) == labels).mean())


def _read_reported_losses(run: Path) -> dict[int, float]:
    records = json_lines(run / "evals/validation.jsonl")
    return {record["step"]: record["metrics"]["accuracy"] for record in records}


def _build_plain_model() -> Any:
    layers = [
        keras.layers.Dense(16, "relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(CLASSES),
    ]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


# ---- a run


@pytest.mark.parametrize("place", ["best_ckpt", "best_checkpoints/two", "evals/beside/best_ckpt"])
def test_plain_tensorflow_has_the_accuracy_that_was_reported(run: Path, place: str) -> None:
    path = tf.train.latest_checkpoint(str(run / place))
    info = read_json(run / place / "info.json")

    assert os.path.basename(path) == info["checkpoint"]

    model = _build_plain_model()
    tf.train.Checkpoint(model=model).read(path).assert_existing_objects_matched()
    assert _compute_accuracy(model) == pytest.approx(info["metrics"]["accuracy"])


@pytest.mark.parametrize("which", ["best", "best:two", "latest", 50, "ckpt-60", "path"])
def test_a_model_is_loaded_as_it_was_evaluated(run: Path, modules: list[str], which: Any) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    place = {
        "best": "best_ckpt",
        "best:two": "best_checkpoints/two",
        "path": "evals/beside/best_ckpt",
    }.get(which)
    step = 50 if which == 50 else 60
    if place:
        step = read_json(run / place / "info.json")["step"]
    checkpoint = f"{run}/{place}" if which == "path" else which

    model = trainer_kit.load_model(run, checkpoint, modules)

    assert _compute_accuracy(model) == pytest.approx(_read_reported_losses(run)[step])
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before

    modules.clear()  # it is registered now


class Unbuilt(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, points: Any, training: bool = False) -> Any:
        return self.dense(points)


@configclass
class _TrainOnlyConfig(TinyConfig):
    validation_data: DataConfig = DataConfig(drop_remainder=False)


@trainer_kit.register_task(_TrainOnlyConfig)
class _UnbuiltTask(TinyTask):
    def build_model(self) -> Any:
        return Unbuilt()


def test_a_train_only_run_of_an_unbuilt_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(tiny_experiment(train_steps=5), task=_TrainOnlyConfig())
    name = "tests_train_only"
    trainer_kit.register_experiment(name)(lambda: config)
    task = _UnbuiltTask(config.task)
    model, _ = trainer_kit.run_experiment(
        None, task, "train", config, str(tmp_path), experiment=name
    )
    points = tiny_arrays(False)[0]

    np.testing.assert_array_equal(trainer_kit.load_model(tmp_path, "latest")(points), model(points))

    def fail_to_open(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError("validation.csv")

    monkeypatch.setattr(_UnbuiltTask, "build_inputs", fail_to_open)
    message = (
        r"cannot be opened: .*validation.csv(.|\n)*Unbuilt has no variables yet, .* with a "
        r"keras.Input in "
    )

    with pytest.raises(DataError, match=message):
        trainer_kit.load_model(tmp_path, "latest")


@pytest.mark.parametrize("which", [7, "newest", "bset", "best:tow", True])
def test_an_unknown_checkpoint_is_refused_with_what_there_is(
    run: Path, modules: list[str], which: Any
) -> None:
    with pytest.raises(UsageError, match=r"best.*(40, 50, 60|two)"):
        trainer_kit.load_model(run, which, modules)


@pytest.mark.parametrize("folder", ["", "rnu", "run/ckpt-60"])
def test_a_folder_that_is_no_run_is_refused_with_near_runs(run: Path, folder: str) -> None:
    with pytest.raises(UsageError, match=f"{run}"):
        trainer_kit.load_model(run.parent / folder)


def test_a_run_without_an_experiment_is_told_what_to_do(run: Path, tmp_path: Path) -> None:
    for name in ("params.yaml", "manifest.json"):
        shutil.copy(run / name, tmp_path)
    manifest = read_json(tmp_path / "manifest.json")
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "experiment": ""}))

    with pytest.raises(
        UsageError,
        match=r"no experiment.*trainer_kit\.load_weights\(.*compat\.keras\.load\(model, ",
    ):
        trainer_kit.load_model(tmp_path)

    (tmp_path / "manifest.json").write_text(
        json.dumps({**manifest, "experiment": "not_registered", "command": []})
    )
    message = (
        r"^no experiment is called 'not_registered'; .*; name the module that registers "
        r"it with import_modules$"
    )

    with pytest.raises(UsageError, match=message):
        trainer_kit.load_model(tmp_path)


def test_a_run_with_an_experiment_records_no_model(run: Path) -> None:
    assert read_json(run / "manifest.json")["experiment"] == NAME
    assert not (run / "model.json").exists()


def test_a_rotated_checkpoint_is_replaced_by_the_newest(
    run: Path, modules: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    newest = copy / "ckpt-60"
    original = model_loading.CheckpointGraph

    def remove_before_reading(prefix: str) -> Any:
        if prefix == str(newest):
            for path in copy.glob("ckpt-60.*"):
                path.unlink()
        return original(prefix)

    monkeypatch.setattr(model_loading, "CheckpointGraph", remove_before_reading)

    assert trainer_kit.load_weights(_build_plain_model(), copy).path == str(copy / "ckpt-50")


def test_averages_are_loaded_unless_the_weights_are_asked_for(run: Path, capsys: Output) -> None:
    model = _build_plain_model()
    loaded = trainer_kit.load_weights(model, run)

    assert loaded.averaged
    assert _compute_accuracy(model) == pytest.approx(_read_reported_losses(run)[60])

    said = capsys.readouterr().out
    assert said == f"{loaded}\n"
    assert "moving averages" in said
    assert "optimizer (6)" in said

    averaged = [variable.numpy() for variable in model.trainable_variables]
    assert not trainer_kit.load_weights(model, run / "ckpt-60", averaged=False).averaged

    raw = [variable.numpy() for variable in model.trainable_variables]
    assert not any(np.array_equal(value, other) for value, other in zip(averaged, raw, strict=True))


def test_best_weights_of_earlier_versions_are_loaded(run: Path, tmp_path: Path) -> None:
    old = _build_plain_model()
    scramble_weights(old)
    path = create_training_checkpoint(global_step=tf.Variable(5, dtype=tf.int64), model=old).write(
        str(tmp_path / "ckpt-5")
    )
    for place in (path, tmp_path):
        model = _build_plain_model()
        # Four and the state of a generator.
        assert trainer_kit.load_weights(model, place).variables == 5
        assert_all_close(
            [variable.numpy() for variable in model.variables],
            [variable.numpy() for variable in old.variables],
        )


# ---- other programs


def _choose_writer(kind: str) -> Callable[[Any, Path], str | Path]:
    def write_with_optimizer(model: Any, folder: Path) -> str:
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        return str(tf.train.Checkpoint(net=model, optimizer=optimizer).write(str(folder / "x")))

    def write_with_manager(model: Any, folder: Path) -> Path:
        manager = tf.train.CheckpointManager(
            tf.train.Checkpoint(model=model, step=tf.Variable(1)), str(folder), 2
        )
        manager.save()
        manager.save()
        return folder

    def write_keras_file(model: Any, folder: Path) -> Path:
        model.save_weights(str(folder / "x.weights.h5"))
        return folder / "x.weights.h5"

    return {
        "model": lambda model, folder: str(
            tf.train.Checkpoint(model=model).write(str(folder / "x"))
        ),
        "root": lambda model, folder: str(tf.train.Checkpoint(model).write(str(folder / "x"))),
        "net and optimizer": write_with_optimizer,
        "manager": write_with_manager,
        "weights.h5": write_keras_file,
    }[kind]


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *((kind, "model") for kind in MODELS),
        ("subclassed", "root"),
        ("module", "root"),
        ("sequential", "net and optimizer"),
        ("functional", "manager"),
        ("subclassed", "weights.h5"),
        ("tf_keras", "weights.h5"),
    ],
)
def test_weights_of_another_program_are_loaded(tmp_path: Path, kind: str, form: str) -> None:
    theirs = MODELS[kind]()
    model = MODELS[kind]()
    scramble_weights(theirs)
    path = _choose_writer(form)(theirs, tmp_path)

    loaded = trainer_kit.load_weights(model, path)

    np.testing.assert_array_equal(model(POINTS), theirs(POINTS))
    assert bool(loaded.unused) == (form in ("net and optimizer", "manager"))


def test_weights_of_keras_two_are_loaded_into_keras_three(tmp_path: Path) -> None:
    layers = tf_keras.layers
    theirs = tf_keras.Sequential(
        [layers.Dense(4, input_shape=(3,)), layers.BatchNormalization(), layers.Dropout(0.5)]
    )
    scramble_weights(theirs)
    theirs.save_weights(str(tmp_path / "x"))  # in TensorFlow's format
    model = build_sequential()

    trainer_kit.load_weights(model, tmp_path / "x")

    np.testing.assert_allclose(model(POINTS), theirs(POINTS), rtol=1e-5)


def test_layers_in_lists_are_loaded_from_our_files_only(tmp_path: Path) -> None:
    class Listed(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [keras.layers.Dense(4)]
            self(tf.zeros([1, 3]))

        def call(self, inputs: Any) -> Any:
            return self.blocks[0](inputs)

    path = tf.train.Checkpoint(model=Listed()).write(str(tmp_path / "x"))

    with pytest.raises(UsageError, match=r"(?s)nothing fits.*kernel +missing in the checkpoint"):
        trainer_kit.load_weights(Listed(), path)


def _create_misfit(kind: str, folder: Path) -> tuple[Any, str | Path]:
    wide = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(7), keras.layers.BatchNormalization()]
    )
    if kind == "h5":
        wide.save_weights(str(folder / "x.weights.h5"))
        return build_functional(), folder / "x.weights.h5"
    short = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    saved = {"shape": wide, "missing": short, "nothing": tf.Module()}[kind]
    return build_sequential(), str(tf.train.Checkpoint(model=saved).write(str(folder / "x")))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("shape", r"kernel +another shape +\[3, 7\] saved, \[3, 4\] here"),
        (
            "missing",
            r"fits best: 4 variables do not fit.*gamma +missing in the checkpoint +\[4\] here",
        ),
        ("nothing", r"nothing fits.*kernel +missing in the checkpoint"),
        ("h5", "no weight was changed.*dense"),
    ],
)
def test_a_misfit_is_an_error_with_a_table_and_changes_nothing(
    tmp_path: Path, kind: str, told: str
) -> None:
    model, path = _create_misfit(kind, tmp_path)
    before = [variable.numpy() for variable in model.variables]

    with pytest.raises(UsageError, match=f"(?s){told}"):
        trainer_kit.load_weights(model, path)

    assert all(
        np.array_equal(old, variable) for old, variable in zip(before, model.variables, strict=True)
    )


def test_ctrl_c_in_keras_changes_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_sequential()
    model.save_weights(tmp_path / "x.weights.h5")
    before = [variable.numpy() for variable in model.variables]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "load_weights", interrupt)

    with pytest.raises(KeyboardInterrupt):
        trainer_kit.load_weights(model, tmp_path / "x.weights.h5")

    assert all(
        np.array_equal(old, variable) for old, variable in zip(before, model.variables, strict=True)
    )


def test_a_part_has_to_be_named_where_several_fit(tmp_path: Path) -> None:
    first = build_sequential()
    second = build_sequential()
    model = build_sequential()
    scramble_weights(second)
    path = tf.train.Checkpoint(one=first, two=second).write(str(tmp_path / "x"))

    with pytest.raises(
        UsageError, match=r"several parts that fit: one, two; give one of them as part="
    ):
        trainer_kit.load_weights(model, path)

    assert trainer_kit.load_weights(model, path, part="two").part == "two"
    np.testing.assert_array_equal(model(POINTS), second(POINTS))

    with pytest.raises(UsageError, match="has no 'tow'; did you mean two"):
        trainer_kit.load_weights(model, path, part="tow")


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    path = tf.train.Checkpoint(model=build_sequential()).write(str(tmp_path / "x"))

    for model, place in (
        (keras.Sequential([keras.layers.Dense(2)]), path),
        (build_sequential(), tmp_path / "y"),
        (3, path),
    ):
        with pytest.raises(UsageError):
            trainer_kit.load_weights(model, place)

    (tmp_path / "x.index").write_bytes(b"broken")

    with pytest.raises(StorageError):
        trainer_kit.load_weights(build_sequential(), path)

    assert not complete_checkpoints(str(tmp_path))


def test_a_shipped_experiment_does_not_replace_the_users(tmp_path: Path) -> None:
    (tmp_path / "params.yaml").write_text("{}")
    manifest = {"experiment": "tabular", "modules": {"experiments/tabular.py": "0f"}}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(UsageError, match=r"was trained with experiments/tabular\.py, and not with"):
        read_run_config(tmp_path)

    # The module may be named after the refusal.
    read_run_config(tmp_path, "trainer_kit.experiments.tabular")
    manifest["modules"] = {"trainer_kit/experiments/tabular.py": "0f"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read_run_config(tmp_path)
