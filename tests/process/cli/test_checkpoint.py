"""trainer-kit checkpoint list, diff, average and rename."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint
from trainer_kit.cli.main import main
from trainer_kit.training.initial_weights.weight_loading import load_initial_weights


def _build_net(value: float) -> keras.Model:
    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    net.set_weights([np.full(weight.shape, value) for weight in net.get_weights()])
    return net


def _write_weights(folder: Path, value: float, kind: str = "ours") -> str:
    """Writes weights that all have one value; returns the path that the command takes."""
    net = _build_net(value)
    folder = folder / str(value)
    folder.mkdir()
    if kind == "ours":
        optimizer = keras.optimizers.SGD()
        optimizer.build(net.trainable_variables)
        step = tf.Variable(int(value), dtype=tf.int64)
        checkpoint = create_training_checkpoint(global_step=step, model=net, optimizer=optimizer)
        return checkpoint.write(f"{folder}/ckpt-1")
    if kind == "plain":
        return tf.train.Checkpoint(net=net).write(f"{folder}/plain")
    path = f"{folder}/net{kind}"
    if kind == ".weights.h5":
        net.save_weights(path)
    else:
        net.save(path)
    return path


def _run_command(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["checkpoint", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_list_shows_names_shapes_and_dtypes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = _run_command(capsys, "list", _write_weights(tmp_path, 1.0)).splitlines()
    assert lines[0].endswith("ckpt-1, a TensorFlow 2 checkpoint")
    assert lines[1].split() == ["name", "shape", "dtype"]

    rows = [line.split() for line in lines]
    assert ["model/sequential/dense/kernel", "[2,", "1]", "float32"] in rows
    assert lines[-1].startswith("5 variables with ")


def test_diff_shows_values_and_what_one_file_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = _write_weights(tmp_path, 1.0)
    second = _write_weights(tmp_path, 3.5)

    out = _run_command(capsys, "diff", first, second)

    assert "by at most 2.5" in out
    assert out.endswith("2 variables are equal, 3 differ\n")
    assert _run_command(capsys, "diff", first, first) == "5 variables are equal, 0 differ\n"
    assert f"only in {first}" in _run_command(
        capsys, "diff", first, _write_weights(tmp_path, 1.5, "plain")
    )


def test_diff_counts_variables_that_have_other_numbers_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [_write_weights(tmp_path, value, ".weights.h5") for value in (1.0, 1.5)]
    assert "0 variables are equal, 2 differ" in _run_command(capsys, "diff", *files)


@pytest.mark.parametrize("kind", ["ours", "plain", ".weights.h5", ".keras"])
def test_an_average_is_loaded_like_the_files_it_is_made_of(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [_write_weights(tmp_path, value, kind) for value in (1.0, 2.0, 6.0)]
    output = f"{tmp_path}/new/average{kind if kind.startswith('.') else ''}"
    assert "of 3 files" in _run_command(capsys, "average", *paths, "--output", output)
    for load in (tk.load_weights, lambda model, path: load_initial_weights(model, path)):
        net = _build_net(0.0)
        load(net, output)
        assert all((weight == 3.0).all() for weight in net.get_weights())

    names = [path.name for path in Path(output).parent.iterdir()]
    assert len(names) == (2 if kind in ("ours", "plain") else 1)
    assert all(name.startswith("average") for name in names)

    for same in (output, f"{output}/"):
        err = _run_command(capsys, "average", *paths, "--output", same, code=2)
        assert "exists, and no file is overwritten" in err


@pytest.mark.parametrize("name", ["ckpt-30", "best_ckpt/ckpt-30"])
def test_an_average_is_no_checkpoint_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "best_ckpt").mkdir()
    err = _run_command(capsys, "average", "one", "two", "--output", f"{tmp_path}/{name}", code=2)

    assert f"{name} would be taken for a checkpoint of the run; give another name" in err


def test_files_of_other_variables_are_not_averaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [_write_weights(tmp_path, 1.0), _write_weights(tmp_path, 2.0, "plain")]
    err = _run_command(capsys, "average", *paths, "--output", f"{tmp_path}/new", code=2)

    assert f"cannot be averaged: global_step only in {paths[0]}" in err
    assert not list(tmp_path.glob("new*"))


@pytest.mark.parametrize("kind", ["ours", ".weights.h5"])
def test_renamed_variables_are_loaded_under_their_new_names(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind == "ours":
        names = [("sequential/dense", "tower/fc")]
    else:
        names = [("^dense.*/0", "tower/fc/kernel"), ("^dense.*/1", "tower/fc/bias")]
    arguments = [argument for pair in names for argument in ("--rename", *pair)]
    path = _write_weights(tmp_path, 4.0, kind)

    _run_command(capsys, "rename", path, *arguments, "--output", f"{tmp_path}/renamed")

    other = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="fc")], name="tower")
    load_initial_weights(other, f"{tmp_path}/renamed")
    assert all((weight == 4.0).all() for weight in other.get_weights())


@pytest.mark.parametrize("kind", ["ours", ".weights.h5"])
def test_names_that_no_rename_can_give_are_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _write_weights(tmp_path, 4.0, kind)
    for pattern, message in (("dnese", "no variable of"), (".*", "would both be")):
        arguments = [path, "--rename", pattern, "x", "--output", "new"]
        assert message in _run_command(capsys, "rename", *arguments, code=2)
