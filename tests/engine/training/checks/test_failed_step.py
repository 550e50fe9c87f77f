"""After an error in a training step: what is saved, what is lost, and that a resume is exact."""

from __future__ import annotations

import functools
import json
import logging
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError, InterruptedRunError, TrainerKitError
from trainer_kit.inputs.sources.source_protocol import Source
from trainer_kit.run import save_on_error as checkpointing
from trainer_kit.run.runner import run_experiment
from trainer_kit.testing import compare_runs, tiny_arrays
from trainer_kit.training.loops.loop_function import reads_before_writes

_LOOPS = [{}, {"train_tf_while_loop": False, "train_tf_function": False}]


class _FaultySource(Source):
    """The tiny data; batch number 12 cannot be read as long as a file is not there."""

    def __init__(self, source: Any, path: Path) -> None:
        self._source = source
        self._path = path
        self.num_examples = source.num_examples

    def at(self, position: int, input_context: Any = None) -> tf.data.Dataset:
        return _build_faulty(self._source.at(position, input_context), position, self._path)


def _build_faulty(batches: tf.data.Dataset, position: int, path: Path) -> tf.data.Dataset:
    """Returns batches that begin at `position`; number 12 needs the file at `path`."""
    numbers = tf.data.Dataset.range(position, 1000)
    return tf.data.Dataset.zip(numbers, batches).map(functools.partial(_read, path))


def _read(path: Path, number: tf.Tensor, batch: Any) -> Any:
    missing = tf.cond(number == 12, lambda: tf.io.read_file(str(path)), lambda: tf.constant(""))
    nothing = 0 * tf.strings.length(missing)
    return tf.nest.map_structure(lambda part: part + tf.cast(nothing, part.dtype), batch)


class _FaultyTask(LinearTask):
    """Fails to read batch 12, or to compute the loss of step 13, until a file is there."""

    path = Path()
    in_step = False
    losses = 0

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        source = super().build_inputs(params, input_context)
        return (
            _FaultySource(source, self.path) if params.is_training and not self.in_step else source
        )

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        loss = super().build_losses(labels, model_outputs, aux_losses)
        if not self.in_step:
            return loss

        def fail_once(value: tf.Tensor) -> tf.Tensor:
            self.losses += 1
            if self.losses == 13 and not self.path.exists():
                raise RuntimeError("injected")

            return value

        return loss + 0 * tf.ensure_shape(
            tf.py_function(fail_once, [tf.stop_gradient(loss)], tf.float32), []
        )


def _run(
    folder: Path,
    config: ExperimentConfig,
    path: Path,
    in_step: bool = False,
    kind: type[_FaultyTask] = _FaultyTask,
) -> None:
    keras.utils.set_random_seed(1)
    task = kind(config.task)
    task.path = path
    task.in_step = in_step
    run_experiment(None, task, "train", config, str(folder))


def _find_differences(folder: Path, other: Path) -> list[str]:
    return [line for line in compare_runs(str(folder), str(other)) if "_OBJECT_GRAPH" not in line]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in graph without an error."""
    folder = tmp_path_factory.mktemp("whole")
    _run(folder / "run", linear_experiment(), Path(__file__))  # any file that is there
    return folder / "run"


@pytest.mark.parametrize("loop", _LOOPS, ids=["graph", "eager"])
def test_a_batch_that_cannot_be_read_loses_no_step(
    loop: dict[str, bool], whole: Path, tmp_path: Path
) -> None:
    config = linear_experiment(**loop)
    path = tmp_path / "there"

    with pytest.raises(DataError, match="cannot be read"):
        _run(tmp_path / "failed", config, path)

    assert list(complete_checkpoints(str(tmp_path / "failed"))) == [10, 12]

    path.write_text("")
    _run(tmp_path / "failed", config, path)

    if loop:
        whole = tmp_path / "whole"
        _run(whole, config, path)

    assert _find_differences(whole, tmp_path / "failed") == []


def test_a_step_that_may_have_written_is_not_saved(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = linear_experiment()
    path = tmp_path / "there"

    with (
        caplog.at_level(logging.WARNING, "trainer_kit"),
        pytest.raises(tf.errors.OpError, match="injected"),
    ):
        _run(tmp_path / "failed", config, path, in_step=True)

    assert list(complete_checkpoints(str(tmp_path / "failed"))) == [10]
    assert "nothing was saved after the error" in caplog.text
    assert "resumes from step 10 (" in caplog.text

    path.write_text("")

    _run(tmp_path / "failed", config, path, in_step=True)

    assert _find_differences(whole, tmp_path / "failed") == []


def test_a_keyboard_interrupt_of_user_code_saves_as_ctrl_c_does(tmp_path: Path) -> None:
    config = linear_experiment()
    steps = iter((5, 10, 15))

    def interrupt_at_step_15(logs: Any) -> None:
        if next(steps) == 15:
            raise KeyboardInterrupt

    actions = [interrupt_at_step_15]
    folder = tmp_path / "run"

    with pytest.raises(InterruptedRunError, match="your code raised KeyboardInterrupt at step 15"):
        run_experiment(
            None, LinearTask(config.task), "train", config, str(folder), train_actions=actions
        )

    assert list(complete_checkpoints(str(folder))) == [10, 15]
    assert json.loads((folder / "heartbeat.json").read_text())["ended"] == "stopped"


@pytest.mark.parametrize("strategy", ["one worker", "one of two"])
def test_an_action_that_exits_loses_no_step_and_is_named(
    strategy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if strategy == "one of two":
        # A save would have to wait for the other one.
        monkeypatch.setattr(checkpointing, "worker_count", lambda _: 2)
    config = linear_experiment()
    steps = iter((5, 10, 15))

    def exit_at_step_15(logs: Any) -> None:
        if next(steps) == 15:
            sys.exit(75)

    line = exit_at_step_15.__code__.co_firstlineno + 2

    with caplog.at_level(logging.INFO, "trainer_kit"), pytest.raises(TrainerKitError) as raised:
        run_experiment(
            None,
            LinearTask(config.task),
            "train",
            config,
            str(tmp_path / "run"),
            train_actions=[exit_at_step_15],
        )

    assert str(raised.value).startswith(
        f"{__file__}:{line}: this line ends the program (SystemExit(75));"
    )
    assert raised.value.exit_code == 1

    alone = strategy == "one worker"
    assert list(complete_checkpoints(str(tmp_path / "run"))) == ([10, 15] if alone else [10])

    told = "saved step 15 after the error" if alone else "the same command resumes from step 10 ("
    assert told in caplog.text
    assert ("5 steps are lost" in caplog.text) is not alone
    assert '"ended": "failed"' in (tmp_path / "run" / "heartbeat.json").read_text()


def test_a_read_that_failed_ahead_of_a_save_is_done_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The iterator's state at step 10 contains the batches 10 to 14, which could not be read."""

    class Plain(_FaultyTask):
        def build_inputs(self, params: Any, input_context: Any = None) -> Any:
            arrays = tiny_arrays(True)
            examples = len(tf.nest.flatten(arrays)[0])

            def batch_of(number: tf.Tensor) -> Any:
                indices = (8 * number + tf.range(8, dtype=tf.int64)) % examples
                batch = tf.nest.map_structure(lambda array: tf.gather(array, indices), arrays)
                return _read(self.path, number, batch)

            return tf.data.Dataset.range(1000).map(batch_of)

    config = linear_experiment(fuse_steps=5)
    path = tmp_path / "there"
    folder = tmp_path / "failed"

    for _ in range(2):  # also when it still cannot be read
        with pytest.raises(DataError, match="cannot be read"):
            _run(folder, config, path, kind=Plain)

    assert "a batch that was read ahead had failed" in caplog.text

    path.write_text("")

    _run(folder, config, path, kind=Plain)
    _run(tmp_path / "whole", config, path, kind=Plain)

    assert _find_differences(tmp_path / "whole", folder) == []


@pytest.mark.parametrize("early", [False, True])
def test_a_write_that_waits_for_no_batch_is_found(early: bool) -> None:
    count = tf.Variable(0)
    total = tf.Variable(0.0)
    iterator = iter(tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(4))

    @tf.function(autograph=False)
    def loop(steps: tf.Tensor) -> tf.Tensor:
        def step(number: tf.Tensor) -> tuple[tf.Tensor]:
            points, _ = next(iterator)
            total.assign_add(tf.reduce_sum(points))
            with tf.control_dependencies([] if early else [points]):
                count.assign_add(1)

            return (number + 1,)

        return tf.while_loop(lambda number: number < steps, step, (tf.constant(0),))

    assert reads_before_writes(loop.get_concrete_function(tf.constant(2)).graph) is not early
