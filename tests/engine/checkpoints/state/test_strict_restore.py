"""What a checkpoint holds, and what a restore refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.strict_restore import (
    create_training_checkpoint,
    restore,
)
from trainer_kit.checkpoints.state.variable_names import model_variables, optimizer_variables
from trainer_kit.errors import StorageError, UsageError


def _create_parts(**more: Any) -> dict[str, Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    return {
        "global_step": tf.Variable(3, dtype=tf.int64),
        "model": model,
        "optimizer": optimizer,
        **more,
    }


def _average(value: float = 0.0) -> dict[str, tf.Variable]:
    return {"sequential/dense/kernel": tf.Variable([[value], [value]])}


def _save(path: Path, parts: dict[str, Any]) -> str:
    return str(create_training_checkpoint(**parts).save(str(path / "ckpt")))


def test_sections_are_model_gardens_with_readable_names(tmp_path: Path) -> None:
    shapes = CheckpointGraph(_save(tmp_path, _create_parts(average=_average()))).shapes_by_name()

    assert shapes["global_step"] == ()
    assert shapes["model/sequential/dense/kernel"] == (2, 1)
    assert shapes["optimizer/sgd/sequential/dense/kernel/momentum"] == (2, 1)
    assert shapes["average/sequential/dense/kernel"] == (2, 1)
    assert {name.split("/")[0] for name in shapes} == {
        "global_step",
        "model",
        "optimizer",
        "average",
    }


def test_names_with_dots_and_slashes_are_as_they_were_saved(tmp_path: Path) -> None:
    names = ["layer.Softmax", "a/b", "a.b", ".S", "a.", "..S/"]
    model = tf.train.Checkpoint(**{name: tf.Variable(0.0) for name in names})

    path = model.write(str(tmp_path / "x"))

    assert set(CheckpointGraph(path).shapes_by_name()) == set(names)


def test_a_moving_average_is_restored_only_if_it_was_saved(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    with_one = _save(tmp_path / "with", _create_parts(average=_average(0.5)))
    without = _save(tmp_path, _create_parts())

    assert CheckpointGraph(with_one).has_section("average") is True
    assert CheckpointGraph(without).has_section("average") is False

    for path, expected in ((with_one, 0.5), (without, 0.25)):
        average = _average(0.25)
        restore(create_training_checkpoint(**_create_parts(average=average)), path, strict=True)
        assert next(iter(average.values())).numpy().ravel().tolist() == [expected] * 2


def test_a_long_list_of_differences_is_cut_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = _save(tmp_path, _create_parts())
    model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(7) for _ in range(10))])

    with pytest.raises(UsageError, match=r"  \.\.\. and 2 more$") as error:
        restore(
            create_training_checkpoint(**{**_create_parts(), "model": model}), path, strict=True
        )

    lines = str(error.value).splitlines()
    assert len([line for line in lines if line.startswith("    ")]) == 20

    layers = [line for line in lines[1:-1] if not line.startswith("    ")]
    assert layers == list(dict.fromkeys(layers))
    assert layers[0] == "  model/sequential/dense"

    restore(
        create_training_checkpoint(**{**_create_parts(), "model": model}),
        path,
        strict=True,
        allow_partial=True,
    )

    # In part: all are listed.
    assert len([line for line in caplog.text.splitlines() if line.startswith("    ")]) == 22


def test_files_that_are_gone_or_damaged_are_storage_errors(tmp_path: Path) -> None:
    path = _save(tmp_path, _create_parts())

    with pytest.raises(StorageError, match="ckpt-9 is gone or incomplete"):
        restore(
            create_training_checkpoint(**_create_parts()), str(tmp_path / "ckpt-9"), strict=True
        )

    data = Path(f"{path}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:10])

    with pytest.raises(StorageError, match="is damaged and cannot be read"):
        restore(create_training_checkpoint(**_create_parts()), path, strict=True)


# ---- a changed model


@pytest.mark.parametrize("library", [keras, tf_keras])
@pytest.mark.parametrize(
    "options", [{"strict": True}, {"strict": False}, {"strict": True, "allow_partial": True}]
)
def test_another_dtype_is_a_table_of_differences(
    library: Any, options: dict[str, bool], tmp_path: Path
) -> None:
    def parts(dtype: str) -> dict[str, Any]:
        inputs = library.Input((2,))
        model = library.Model(inputs, library.layers.Dense(1, name="head", dtype=dtype)(inputs))
        return {"global_step": tf.Variable(3, dtype=tf.int64), "model": model}

    path = _save(tmp_path, parts("float32"))

    with pytest.raises(
        UsageError, match="does not fit this run; use the code and the config"
    ) as error:
        restore(create_training_checkpoint(**parts("float16")), path, **options)

    rows = re.findall(r"(kernel|bias) +float saved, half here\n?", str(error.value))
    assert sorted(rows) == ["bias", "kernel"]


def _create_net_parts(*layers: tuple[str, int], optimizer: Any = None) -> dict[str, Any]:
    model = keras.Sequential(
        [keras.Input((4,)), *(keras.layers.Dense(width, name=name) for name, width in layers)]
    )
    optimizer = optimizer or keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate([*model.variables, *optimizer.variables]):
        variable.assign(keras.ops.full(variable.shape, number, variable.dtype))

    return {"global_step": tf.Variable(7, dtype=tf.int64), "model": model, "optimizer": optimizer}


def _read_values(parts: dict[str, Any]) -> dict[str, list[Any]]:
    sections = {
        "model": model_variables(parts["model"]),
        "optimizer": optimizer_variables(parts["optimizer"], parts["model"]),
    }
    return {
        f"{section}/{name}": v.numpy().tolist()
        for section, variables in sections.items()
        for name, v in variables.items()
    }


SAVED = (("first", 3), ("second", 2))
# What the run has become; a layer in the table, a row below it, and a variable that a partial
# restore takes.
CHANGES: dict[str, tuple[Callable[[], dict[str, Any]], str, str, str]] = {
    "wider layer": (
        lambda: _create_net_parts(("first", 5), ("second", 2)),
        "model/sequential/first",
        r"kernel +another shape +\[4, 3\] saved, \[4, 5\] here",
        "model/sequential/second/bias",
    ),
    "extra layer": (
        lambda: _create_net_parts(*SAVED, ("third", 2)),
        "model/sequential/third",
        r"kernel +missing in the checkpoint  \[2, 2\] here",
        "model/sequential/first/kernel",
    ),
    "missing layer": (
        lambda: _create_net_parts(("first", 3)),
        "model/sequential/second",
        r"kernel +not in this run +\[3, 2\] saved",
        "model/sequential/first/kernel",
    ),
    "renamed layer": (
        lambda: _create_net_parts(("first", 3), ("last", 2)),
        "model/sequential/last",
        r"kernel +missing in the checkpoint  \[3, 2\] here",
        "optimizer/adam/sequential/first/kernel/velocity",
    ),
    "other optimizer": (
        lambda: _create_net_parts(*SAVED, optimizer=keras.optimizers.SGD(momentum=0.9)),
        "optimizer/sgd/sequential/first/kernel",
        r"momentum +missing in the checkpoint  \[4, 3\] here",
        "model/sequential/second/kernel",
    ),
}


def _has_row(text: str, layer: str, row: str) -> bool:
    pattern = rf"^  {re.escape(layer)}\n(?:    .*\n)*?    {row}$"
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_refused_or_restored_in_part(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = _create_net_parts(*SAVED)
    path = _save(tmp_path, saved)
    make, layer, row, taken = CHANGES[change]
    run = make()
    for variable in [*run["model"].variables, *run["optimizer"].variables]:
        variable.assign(keras.ops.zeros_like(variable))
    run["global_step"].assign(0)

    with pytest.raises(UsageError) as error:
        restore(create_training_checkpoint(**run), path, strict=True)

    advice = (
        "use the code and the config that it was saved with, another model_dir, or"
        " allow_partial_restore"
    )
    assert str(error.value).startswith(f"{path} does not fit this run; {advice}")
    assert _has_row(str(error.value), layer, row)

    restore(create_training_checkpoint(**run), path, strict=True, allow_partial=True)

    assert len(caplog.records) == 1

    message = caplog.records[0].getMessage()
    assert message.startswith(f"{path} is restored in part; ")
    assert _has_row(message, layer, row)

    restored = _read_values(run)
    before = _read_values(saved)
    assert restored[taken] == before[taken] != []

    for name, value in restored.items():
        expected = tf.zeros_like(value).numpy().tolist()
        if name in before and tf.constant(value).shape == tf.constant(before[name]).shape:
            expected = before[name]
        assert value == expected, name

    assert int(run["global_step"]) == 7


def _build_tf_keras(width: int = 3, layers: int = 2) -> Any:
    model = tf_keras.Sequential([tf_keras.layers.Dense(width) for _ in range(layers)])
    model.build((None, 4))
    return model


class _Module(tf.Module):  # type: ignore[misc]
    def __init__(self, width: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.layers = [tf.Variable(tf.ones([4, width])) for _ in range(layers)]


@pytest.mark.parametrize("make", [_build_tf_keras, _Module])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"width": 5}, r"\(3,\) .*\(5,\)|\(4, 3\) .*\(4, 5\)"),
        ({"layers": 3}, ""),
        ({"layers": 1}, ""),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_a_changed_tracked_model_is_refused_in_tensorflows_words(
    tmp_path: Path, make: Callable[..., Any], change: dict[str, int], told: str, partial: bool
) -> None:
    step = tf.Variable(7, dtype=tf.int64)
    path = create_training_checkpoint(global_step=step, model=make()).save(str(tmp_path / "ckpt"))
    other = create_training_checkpoint(
        global_step=tf.Variable(0, dtype=tf.int64), model=make(**change)
    )

    with pytest.raises(UsageError, match="does not fit this run") as error:
        restore(other, path, strict=True, allow_partial=partial)

    assert ("allow_partial_restore" in str(error.value)) != partial  # it takes models by name only

    detail = str(error.value).partition(":\n")[2]
    assert len(detail) > 20 and re.search(told, detail), detail
