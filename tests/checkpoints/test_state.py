"""What a checkpoint holds, and what a restore refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer_kit.checkpoints.state import holds, restore, saved_shapes, training_checkpoint, weights_checkpoint
from trainer_kit.errors import StorageError, UsageError


def _parts(**more: Any) -> dict[str, Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    return {"global_step": tf.Variable(3, dtype=tf.int64), "model": model, "optimizer": optimizer, **more}


def _average(value: float = 0.0) -> dict[str, tf.Variable]:
    return {"sequential_9/dense_4/kernel": tf.Variable([[value], [value]])}


def _save(path: Path, parts: dict[str, Any]) -> str:
    return training_checkpoint(**parts).save(str(path / "ckpt"))


def test_the_sections_are_model_gardens_and_names_tell_what_is_in_them(tmp_path: Path) -> None:
    shapes = saved_shapes(_save(tmp_path, _parts(average=_average())))
    assert shapes["global_step"] == ()
    assert shapes["model/sequential/dense/kernel"] == (2, 1)
    assert shapes["optimizer/sgd/sequential/dense/kernel/momentum"] == (2, 1)
    assert shapes["average/sequential/dense/kernel"] == (2, 1)
    assert {name.split("/")[0] for name in shapes} == {"global_step", "model", "optimizer", "average"}


def test_several_optimizers_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    def parts() -> dict[str, Any]:
        one, other = _parts(), keras.optimizers.Adam()
        other.build(one["model"].trainable_variables)
        return {**one, "optimizer": {"first": one["optimizer"], "second": other}}

    saved, read = parts(), parts()
    saved["optimizer"]["second"].iterations.assign(8)
    path = _save(tmp_path, saved)
    restore(training_checkpoint(**read), path, whole=True)
    assert int(read["optimizer"]["second"].iterations.numpy()) == 8
    assert int(read["optimizer"]["first"].iterations.numpy()) == 0
    rows = r"  optimizer/third/adam/sequential/dense/kernel\n    momentum +missing in the checkpoint  \[2, 1\] here"
    with pytest.raises(UsageError, match=rows):
        wrong = parts()
        wrong["optimizer"]["third"] = wrong["optimizer"].pop("second")
        restore(training_checkpoint(**wrong), path, whole=True)


def test_a_checkpoint_of_weights_holds_no_optimizer(tmp_path: Path) -> None:
    parts = _parts()
    path = weights_checkpoint(global_step=parts["global_step"], model=parts["model"]).write(str(tmp_path / "best"))
    assert set(saved_shapes(path)) == {"global_step", "model/sequential/dense/kernel"}
    reader = _parts()
    restore(training_checkpoint(**{**reader, "optimizer": None}), path, whole=False)
    assert reader["model"].get_weights()[0].tolist() == parts["model"].get_weights()[0].tolist()


def test_what_a_run_has_no_place_for_is_refused_when_it_goes_on_and_skipped_by_evaluation(tmp_path: Path) -> None:
    path = _save(tmp_path, _parts())
    without = training_checkpoint(**{**_parts(), "optimizer": None})
    rows = r"  optimizer/sgd/sequential/dense/kernel\n    momentum +not in this run +\[2, 1\] saved"
    with pytest.raises(UsageError, match=rows) as error:
        restore(without, path, whole=True)
    advice = "use the code and the config that it was made with, another model_dir, or --allow_partial_restore"
    assert advice in str(error.value)
    restore(without, path, whole=False)


def test_a_moving_average_is_restored_or_left_as_it_is_when_the_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    with_one, without = _save(tmp_path / "with", _parts(average=_average(0.5))), _save(tmp_path, _parts())
    assert (holds(with_one, "average"), holds(without, "average")) == (True, False)
    for path, expected in ((with_one, 0.5), (without, 0.25)):
        average = _average(0.25)
        restore(training_checkpoint(**_parts(average=average)), path, whole=True)
        assert next(iter(average.values())).numpy().ravel().tolist() == [expected] * 2


def test_a_long_list_of_differences_is_cut_and_counted(tmp_path: Path) -> None:
    path = _save(tmp_path, _parts())
    model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(7) for _ in range(10))])
    with pytest.raises(UsageError, match=r"  \.\.\. and 2 more$") as error:
        restore(training_checkpoint(**{**_parts(), "model": model}), path, whole=True)
    lines = str(error.value).splitlines()
    assert len([line for line in lines if line.startswith("    ")]) == 20
    layers = [line for line in lines[1:-1] if not line.startswith("    ")]
    assert layers == list(dict.fromkeys(layers)) and layers[0] == "  model/sequential/dense"


def test_files_that_are_gone_or_damaged_are_storage_errors(tmp_path: Path) -> None:
    path = _save(tmp_path, _parts())
    with pytest.raises(StorageError, match="ckpt-9 is gone or incomplete"):
        restore(training_checkpoint(**_parts()), str(tmp_path / "ckpt-9"), whole=True)
    data = Path(f"{path}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:10])
    with pytest.raises(StorageError, match="is damaged and cannot be read"):
        restore(training_checkpoint(**_parts()), path, whole=True)
