"""Measures the cost of fault tolerance: the stall of a save, a start from a checkpoint, a seek to a far position.

Each function is run by a process of its own, takes its turns from a Pacer and never returns. A turn is one save, one
start or one seek, and what it tells are the seconds of it.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import trainer_kit as tk
from scripts.benchmarks import nets, ours, samples
from scripts.benchmarks.by_hand import Learner
from scripts.benchmarks.pacer import Pacer
from trainer_kit.run.controller import Controller


def save_by_hand(pacer: Pacer, folder: str, *, net: str, size: int) -> None:
    """Saves model and optimizer with TensorFlow's manager after each step; the loop waits for each save."""
    manager, step = _by_hand(folder, net, size)
    while True:
        step()
        begin = time.perf_counter()
        manager.save()
        pacer.tell(time.perf_counter() - begin)


class TimedController(Controller):
    """Controller that measures the time each save stops the loop, and starts the next save when that is written."""

    pacer: Pacer

    def save_checkpoint(self, again: bool = False) -> None:
        """Saves."""
        begin = time.perf_counter()
        super().save_checkpoint(again)
        stall = time.perf_counter() - begin
        self.sync()
        self.pacer.tell(stall)


def save(pacer: Pacer, folder: str, *, net: str, size: int, background: bool) -> None:
    """Saves the state of a run after each step."""
    TimedController.pacer = pacer
    tk.launch(
        _config(net, size, ours.FOR_EVER),
        "train",
        f"{folder}/run",
        save_summary=False,
        console=ours.Silent(),
        controller_cls=TimedController,
        enable_async_checkpointing=background,
    )


def start_by_hand(pacer: Pacer, folder: str, *, net: str, size: int, resumes: bool) -> None:
    """Repeatedly builds model and loop, restores if `resumes`, and takes a step."""
    while True:
        begin = time.perf_counter()
        manager, step = _by_hand(folder, net, size)
        if resumes and manager.latest_checkpoint:
            manager.restore_or_initialize()
        step()
        seconds = time.perf_counter() - begin
        manager.save()
        del manager, step
        _forget()
        pacer.tell(seconds)


def start(pacer: Pacer, folder: str, *, net: str, size: int, resumes: bool) -> None:
    """Repeatedly starts a run, resumed or new, up to the end of its first step."""
    steps = 0
    while True:
        steps = steps + 1 if resumes else 1
        if not resumes:
            shutil.rmtree(f"{folder}/run", ignore_errors=True)
        ends: list[float] = []
        begin = time.perf_counter()
        tk.launch(
            _config(net, size, steps),
            "train",
            f"{folder}/run",
            save_summary=False,
            console=ours.Silent(),
            train_actions=[lambda logs, ends=ends: ends.append(time.perf_counter())],
        )
        _forget()
        pacer.tell(ends[0] - begin)


def seek(pacer: Pacer, folder: str, *, position: int) -> None:
    """Reads the batch at `position` of a shuffled stream of 100,000 examples."""
    del folder
    params = tk.DataConfig(is_training=True, global_batch_size=samples.BATCH, seed=1)
    source = tk.ArraySource((np.arange(100_000, dtype=np.int32),), params)
    while True:
        begin = time.perf_counter()
        next(iter(source.at(position)))
        pacer.tell(time.perf_counter() - begin)


def _config(net: str, size: int, steps: int) -> tk.ExperimentConfig:
    trainer = {"train_steps": steps, "summary_interval": 1, "checkpoint_interval": 1, "max_to_keep": 1}
    return ours.config_of(net, 1, {"size": size}, trainer, {})


def _by_hand(folder: str, net: str, size: int) -> tuple[tf.train.CheckpointManager, Callable[[], Any]]:
    """Returns TensorFlow's manager, and a loop of one step that reads its results."""
    learner = Learner(net, size)
    run, iterator = learner.loop(), iter(nets.pipeline(net))

    def step() -> list[float]:
        return [float(result) for result in run(iterator, tf.constant(1))]

    checkpoint = tf.train.Checkpoint(model=learner.model, optimizer=learner.optimizer)
    return tf.train.CheckpointManager(checkpoint, f"{folder}/run", max_to_keep=1), step


def _forget() -> None:
    """Frees the memory of the last model, which the next one needs."""
    keras.utils.clear_session()
    gc.collect()
