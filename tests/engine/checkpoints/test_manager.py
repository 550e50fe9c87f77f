"""Saving, rotating and restoring real files."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.builders import assert_all_close
from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints import manager
from trainer_kit.checkpoints.commit import read_commit_record
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint
from trainer_kit.config.schema.durations import Duration
from trainer_kit.errors import StorageError


class _Run:
    def __init__(
        self, folder: Path, init_fn: Callable[[], None] = lambda: None, **arguments: Any
    ) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(3),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(2),
            ]
        )
        self.optimizer = keras.optimizers.Adam()
        self.optimizer.build(self.model.trainable_variables)
        self.step = tf.Variable(0, dtype=tf.int64)
        checkpoint = create_training_checkpoint(
            global_step=self.step, model=self.model, optimizer=self.optimizer
        )
        trainer = SavedTrainer(checkpoint, self.step, initialize=init_fn)
        self.manager = manager_of(trainer, folder, max_to_keep=2, **arguments)

    def train(self) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(tf.ones((2, 4)), training=True) ** 2)
        self.optimizer.apply_gradients(
            zip(
                tape.gradient(loss, self.model.trainable_variables),
                self.model.trainable_variables,
                strict=True,
            )
        )
        self.step.assign_add(1)

    def values(self) -> list[np.ndarray]:
        return [variable.numpy() for variable in [*self.model.variables, *self.optimizer.variables]]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_restored_run_has_the_same_bits_with_dropout_and_slots(
    tmp_path: Path, asynchronous: bool
) -> None:
    run = _Run(tmp_path, asynchronous=asynchronous)
    for _ in range(4):
        run.train()
        run.manager.save(run.step)

    run.manager.sync()
    saved = run.values()

    run.train()
    again = _Run(tmp_path)

    assert again.manager.restore_or_initialize() == str(tmp_path / "ckpt-4")
    assert_all_close(again.values(), saved)

    again.train()

    assert_all_close(again.values(), run.values())


@pytest.mark.parametrize("asynchronous", [True, False])
def test_reports_are_settled_before_a_checkpoint_is_in_place(
    tmp_path: Path, asynchronous: bool
) -> None:
    file_names: list[list[str]] = []

    class Reports:
        def flush_to_disk(self, step: int) -> dict[str, Any]:
            file_names.append(
                sorted({path.name.partition(".")[0] for path in tmp_path.glob("ckpt-*")})
            )
            return {"history": step}

    run = _Run(tmp_path, asynchronous=asynchronous, reports=Reports())
    for _ in range(2):
        run.train()
        run.manager.save(run.step)

    run.manager.sync()

    assert file_names == [[], ["ckpt-1"]]
    records = [read_commit_record(f"{tmp_path}/ckpt-{step}") or {} for step in (1, 2)]
    assert [record["recorded"] for record in records] == [{"history": 1}, {"history": 2}]


def test_the_callers_shards_and_save_options_are_kept(tmp_path: Path) -> None:
    run = _Run(tmp_path, asynchronous=False)
    small = tf.train.experimental.MaxShardSizePolicy(max_shard_size=100)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=small)

    run.manager.save(run.step, options=options)

    assert len(list(tmp_path.glob("ckpt-0.data-*"))) > 1
    assert options.experimental_sharding_callback is small


def test_a_second_restore_acts_only_after_the_run_has_moved(tmp_path: Path) -> None:
    calls: list[int] = []
    run = _Run(tmp_path, init_fn=lambda: calls.append(1))

    assert [run.manager.restore_or_initialize() for _ in range(2)] == [None, None]
    assert calls == [1]

    run.train()

    assert run.manager.restore_or_initialize() is None
    assert calls == [1, 1]

    run.manager.save(run.step)
    run.manager.sync()
    again = _Run(tmp_path, init_fn=lambda: calls.append(2))

    path = again.manager.restore_or_initialize()

    assert path is not None

    saved = again.values()
    assert again.manager.restore_or_initialize() == path

    again.train()
    again.manager.save(again.step)
    again.train()

    assert again.manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
    assert int(again.step.numpy()) == 2
    assert not np.array_equal(again.values()[0], saved[0])
    assert calls == [1, 1]


def test_an_error_unrelated_to_the_disk_does_not_mention_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of a user's variable")

    run = _Run(tmp_path)
    monkeypatch.setattr(run.manager.checkpoint, "write", fail)

    with pytest.raises(ValueError, match="of a user's variable"), run.manager:
        run.manager.save()

    assert "was not written" not in caplog.text


def test_after_another_error_the_previous_checkpoint_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("of a user's variable")

    run = _Run(tmp_path)
    run.train()
    run.manager.save()
    run.train()
    monkeypatch.setattr(run.manager.checkpoint, "write", fail)
    with pytest.raises(ValueError, match="of a user's variable"):
        run.manager.save()
    assert (run.manager.saved_step, run.manager.saved_path) == (1, str(tmp_path / "ckpt-1"))


def test_after_a_failed_save_no_checkpoint_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("of the disk")

    run = _Run(tmp_path)
    run.train()
    run.manager.save()
    run.train()
    monkeypatch.setattr(run.manager.checkpoint, "write", fail)
    with pytest.raises(StorageError, match="ckpt-2 was not written: of the disk"):
        run.manager.save()
    assert (run.manager.saved_step, run.manager.saved_path) == (-1, None)


def test_with_a_time_the_chief_decides_whether_a_save_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _Run(tmp_path, interval=Duration.parse("1 h"))
    answers = []

    def broadcast_answer(_: tf.distribute.Strategy, answer: int) -> int:
        answers.append(answer)
        return 0

    # The chief has saved, and this worker has not: both have to take part in the broadcast.
    monkeypatch.setattr(manager, "broadcast_int", broadcast_answer)
    run.train()
    assert run.manager.save() is None
    assert answers == [1]


def test_a_left_manager_frees_model_and_thread_and_saves_again(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # of which some may end meanwhile
    run = _Run(tmp_path)

    for _ in range(2):
        with run.manager:
            run.train()
            run.manager.save()
        assert set(threading.enumerate()) <= before

    assert list(complete_checkpoints(str(tmp_path))) == [1, 2]

    model = weakref.ref(run.model)
    del run
    keras.utils.clear_session()
    gc.collect()

    assert model() is None


def test_our_manager_overrides_all_of_tensorflows_manager(tmp_path: Path) -> None:
    theirs = tf.train.CheckpointManager
    public = {name for name in vars(theirs) if not name.startswith("_")}

    assert public <= set(vars(CheckpointManager))

    plain = theirs(tf.train.Checkpoint(), str(tmp_path / "plain"), max_to_keep=1)
    hidden = {
        name
        for name in (*vars(theirs), *vars(plain))
        if name.startswith("_") and not name.endswith("__")
    }
    manager = _Run(tmp_path / "run").manager

    assert hidden & {*vars(CheckpointManager), *vars(manager)} == set()


def test_orbits_own_controller_saves_and_restores_with_it(orbit: Any, tmp_path: Path) -> None:
    class Steps(orbit.AbstractTrainer):
        def __init__(self, run: _Run) -> None:
            self._run = run

        def train(self, num_steps: tf.Tensor) -> None:
            for _ in range(int(num_steps)):
                self._run.train()

    for begun, end in ((0, 2), (2, 4)):
        run = _Run(tmp_path)
        controller = orbit.Controller(
            trainer=Steps(run),
            global_step=run.step,
            steps_per_loop=1,
            checkpoint_manager=run.manager,
        )
        assert int(run.step.numpy()) == begun  # it restores when it is made
        controller.train(end)

    assert run.manager.latest_checkpoint == str(tmp_path / "ckpt-4")
    assert run.manager.checkpoints == [str(tmp_path / f"ckpt-{step}") for step in (3, 4)]
    assert run.manager.directory == str(tmp_path)
    assert run.manager.checkpoint_interval == 1
    assert controller.restore_checkpoint(str(tmp_path / "ckpt-3"))
    assert int(run.step.numpy()) == 3


def test_tensorflows_manager_can_continue_and_rotate_our_saves(tmp_path: Path) -> None:
    run = _Run(tmp_path)
    for _ in range(3):
        run.train()
        run.manager.save()

    run.manager.sync()
    saved = [str(tmp_path / f"ckpt-{step}") for step in (2, 3)]

    state = tf.train.get_checkpoint_state(str(tmp_path))

    assert state.model_checkpoint_path == saved[-1]
    assert list(state.all_model_checkpoint_paths) == saved

    theirs = tf.train.CheckpointManager(run.manager.checkpoint, str(tmp_path), max_to_keep=2)
    assert theirs.latest_checkpoint == saved[-1]
    assert theirs.checkpoints == saved

    theirs.save(4)

    assert list(complete_checkpoints(str(tmp_path))) == [3, 4]
