"""A small run with real checkpoints, iterator state included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from tests.engine.checkpoints.saved_trainer import SavedTrainer, manager_of
from trainer_kit.checkpoints.state.strict_restore import create_training_checkpoint
from trainer_kit.testing import stop_at

RUN_ID = "ours"


class SmallRun:
    """Weights that hold the step they are of, the data's iterator beside them, and a manager that
    restores at once.

    Args:
      folder: of the checkpoints.
      size: numbers in the weights, of 4 bytes each.
      **arguments: of `manager_of`; `trains` is of the trainer.

    Attributes:
      trainer: what the manager saves.
      start: the step that it goes on from.
    """

    def __init__(self, folder: Path, size: int = 1000, **arguments: Any) -> None:
        self.step = tf.Variable(0, dtype=tf.int64)
        self.model = tf.Module()
        self.model.weight = tf.Variable(tf.zeros([size]))
        options = tf.data.Options()
        options.autotune.enabled = False  # whose thread an iterator waits for at its end
        self._data = iter(tf.data.Dataset.range(10**6).shuffle(50, seed=1).with_options(options))
        checkpoint = create_training_checkpoint(global_step=self.step, model=self.model)
        can_train = arguments.pop("can_train", True)
        self.trainer = SavedTrainer(
            checkpoint, self.step, can_train=can_train, before_save=self._save_data
        )
        self.manager = manager_of(self.trainer, folder, **arguments)
        self.manager.restore_or_initialize()
        self.start = int(self.step)
        assert (
            float(tf.reduce_min(self.model.weight))
            == float(tf.reduce_max(self.model.weight))
            == self.start
        )

    def train_to(self, *steps: int, sync: bool = True, again: bool = False) -> None:
        """Saves a checkpoint of each of `steps`, saved ones too if `again`, and waits if `sync`."""
        for step in steps:
            self.step.assign(step)
            self.model.weight.assign(tf.fill(self.model.weight.shape, float(step)))
            next(self._data)
            self.manager.save(step, overwrite=again)
        if sync:
            self.manager.sync()

    def _save_data(self, prefix: str) -> None:
        tf.train.Checkpoint(iterator=self._data).write(f"{prefix}.iterator")


def save_and_die(folder: str, point: str, occurrence: int, asynchronous: bool) -> None:
    """Saves the next step, with two to keep, and is killed at a write point of that save."""
    run = SmallRun(Path(folder), max_to_keep=2, asynchronous=asynchronous, run_id=RUN_ID)
    stop_at(point, occurrence)
    run.train_to(run.start + 1)


def names(folder: Path) -> list[str]:
    """The names in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def parts(step: int) -> list[str]:
    """The names of the files of a small run's checkpoint, sorted."""
    ends = (
        "commit.json",
        "data-00000-of-00001",
        "index",
        "iterator.data-00000-of-00001",
        "iterator.index",
    )
    return [f"ckpt-{step}.{end}" for end in ends]


def flip_bit(path: Path) -> None:
    """Turns one bit in the middle of a file over."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
