"""What a run has to remember beside its variables."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.checkpoints.state.python_state import ARRAYS, PythonState
from trainer_kit.checkpoints.state.strict_restore import restore
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.errors import UsageError

# A state without arrays reads nothing but its variable.
NO_ARRAYS: Any = None


class _Part:
    """Holds a value, and notes what it was given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.given: list[Any] = []

    def put(self, value: Any) -> None:
        self.value = value
        self.given.append(value)


def _create_state(**parts: _Part) -> PythonState:
    state = PythonState()
    for name, part in parts.items():
        state.add(name, functools.partial(getattr, part, "value"), part.put)

    return state


def _copy(source: PythonState, target: PythonState, folder: Path) -> None:
    """Stores a state in a checkpoint, and loads it into another one."""
    source.store()
    sections = {"run_state": source.variable, ARRAYS: source.arrays}
    path = tf.train.Checkpoint(**sections).write(str(folder / "ckpt-1"))
    tf.train.Checkpoint(run_state=target.variable).read(path).expect_partial()
    target.load(CheckpointGraph(path))


VALUES: dict[str, Any] = {
    "nothing": None,
    "a truth": True,
    "a large integer": 2**63 + 1,
    "floats": [0.1, 1e-320, 1.7976931348623157e308, -0.0, 2 / 3, math.inf, -math.inf, math.nan],
    "text": 'käse "\\ \n \u2028 ' + chr(0x1F600),
    "nested": {"batch": 12, "left_out": [3, 4], "names": {"a": [], "b": 1}},
    "an empty dict": {},
}


@pytest.mark.parametrize("kind", VALUES)
def test_a_part_comes_back_exactly(tmp_path: Path, kind: str) -> None:
    saved = _Part(VALUES[kind])
    read = _Part("other")

    _copy(_create_state(part=saved), _create_state(part=read), tmp_path)

    assert repr(read.value) == repr(VALUES[kind])


def test_a_missing_part_gets_none_and_an_unknown_part_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = _Part()
    new = _Part(9)
    source = _create_state(data=_Part(1), action=_Part(2), zebra=_Part(3))

    _copy(source, _create_state(data=data, new=new), tmp_path)

    assert data.given == [1]
    assert new.given == [None]
    assert [record.getMessage() for record in caplog.records] == [
        (
            "the checkpoint holds state of parts that this run does not have, and it is not "
            "used: action, zebra"
        )
    ]


def test_clearing_forgets_loaded_state_and_resets_every_part() -> None:
    part = _Part(5)
    state = _create_state(part=part)

    state.store()
    state.load(NO_ARRAYS)
    state.clear()

    assert part.given == [5, None]
    assert state.variable.numpy() == b""


def test_a_part_that_is_added_again_takes_the_place_of_the_first() -> None:
    first = _Part(1)
    second = _Part(2)
    state = _create_state(part=first)
    state.add("part", lambda: second.value, second.put)

    state.store()
    state.load(NO_ARRAYS)

    assert first.given == []
    assert second.given == [2]


def test_what_json_cannot_hold_is_an_error_when_it_is_stored() -> None:
    state = _create_state(part=_Part({1, 2}))

    with pytest.raises(
        UsageError, match=r"the state of part cannot be saved: .* return numbers, strings"
    ):
        state.store()


VALUES_OF_ARRAYS: dict[str, Callable[[], Any]] = {
    "ints": lambda: np.arange(6, dtype=np.int64).reshape(2, 3),
    "floats": lambda: np.array([math.nan, -0.0, 1e-45], np.float32),
    "empty": lambda: np.zeros((0, 2)),
    "a variable": lambda: tf.Variable([1.5, 2.5], dtype=tf.bfloat16),
    "a scalar": lambda: np.array(True),
    "not contiguous": lambda: np.arange(6).reshape(2, 3).T,
    "complex numbers": lambda: np.array([1.5 + 2j], np.complex64),
}


def _read_bits(array: Any) -> tuple[Any, ...]:
    value = np.asarray(array)
    return value.dtype, value.shape, value.tobytes()


@pytest.mark.parametrize("kind", VALUES_OF_ARRAYS)
def test_arrays_and_variables_come_back_bit_by_bit(tmp_path: Path, kind: str) -> None:
    value = VALUES_OF_ARRAYS[kind]()
    read = _Part()
    source = _create_state(part=_Part({"inner": [value]}))

    _copy(source, _create_state(part=read), tmp_path)

    assert _read_bits(read.value["inner"][0]) == _read_bits(value)
    assert b"base64" not in source.variable.numpy()
    assert len(source.variable.numpy()) < 60


def test_arrays_of_checkpoints_of_earlier_versions_are_read() -> None:
    read = _Part()
    state = _create_state(part=read)
    earlier = {"dtype": "int16", "shape": [2, 1], "data": "AQACAA=="}
    state.variable.assign(json.dumps({"part": [{"trainer_kit/array": earlier}, 3]}))

    state.load(NO_ARRAYS)

    assert _read_bits(read.value[0]) == _read_bits(np.array([[1], [2]], np.int16))
    assert read.value[1] == 3


@pytest.mark.parametrize("asynchronous", [True, False])
def test_each_save_has_the_arrays_of_its_time_whatever_shape(
    tmp_path: Path, asynchronous: bool
) -> None:
    step = tf.Variable(0, dtype=tf.int64)
    run = tf.Module()
    part = _Part()
    run.weight = tf.Variable([0.0])
    state = TrainState(step, run, keras.optimizers.SGD(), None, None, seed=0)
    state.python_state.add("part", lambda: part.value, part.put)
    trainer = SavedTrainer(state.checkpoint, step, before_save=lambda _: state.before_save([]))
    manager = manager_of(trainer, tmp_path, max_to_keep=9, asynchronous=asynchronous)
    shapes = [(2,), (2,), (3,), (), None, (1, 2)]
    for number, shape in enumerate(shapes):
        step.assign(number)
        part.value = (
            None
            if shape is None
            else {"a": np.full(shape, number, np.float16), "b": np.full((2, 2), number)}
        )
        manager.save(number)
        part.value = "after the save was asked for"

    manager.sync()
    for number, shape in enumerate(shapes):
        path = f"{tmp_path}/ckpt-{number}"
        restore(state.checkpoint, path, strict=True)
        state.after_restore(path)
        if shape is None:
            assert part.value is None
            assert "run_arrays" not in str(tf.train.list_variables(path))
        else:
            assert _read_bits(part.value["a"]) == _read_bits(np.full(shape, number, np.float16))
            assert _read_bits(part.value["b"]) == _read_bits(np.full((2, 2), number))


def test_arrays_do_not_hide_what_the_run_does_not_have(tmp_path: Path) -> None:
    def run(*sizes: int) -> tuple[TrainState, tf.Module]:
        model = tf.Module()
        model.weights = [tf.Variable(tf.zeros([size])) for size in sizes]
        state = TrainState(
            tf.Variable(0, dtype=tf.int64), model, keras.optimizers.SGD(), None, None, seed=0
        )
        state.python_state.add("part", lambda: np.zeros(2), lambda _: None)
        return state, model

    larger, _ = run(1, 2)
    larger.before_save([])
    path = larger.checkpoint.save(str(tmp_path / "ckpt"))
    again, _ = run(1, 2)
    restore(again.checkpoint, path, strict=True)
    smaller, _ = run(1)

    with pytest.raises(UsageError, match="does not fit this run"):
        restore(smaller.checkpoint, path, strict=True)
