"""The two doors that the programs train through, and runs of programs in processes of their own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tests.process.compat.keras.programs import PROGRAMS, Door
from trainer_kit.callbacks.base import Callback, Run
from trainer_kit.compat import keras as tk_keras


class Keras:
    """Keras itself, and a loop by hand."""

    def fit(self, model: Any, *arguments: Any, **options: Any) -> Any:
        model.jit_compile = False  # XLA would take half of the time; programs of the engine's tests have it
        return model.fit(*arguments, **options)

    def train_loop(
        self, train_step: Any, train_ds: Any, *, epochs: int, model: Any, optimizer: Any, metrics: Any, test_step: Any,
        val_dataset: Any, val_metrics: Any,
    ) -> Any:  # fmt: skip
        """Trains as the guide to loops by hand does."""
        del optimizer  # the step has it
        history: dict[str, list[float]] = {}
        mean = keras.metrics.Mean(name="loss")
        for _ in range(epochs):
            for x, y in train_ds:
                mean.update_state(train_step(x, y))
            for x, y in val_dataset:
                test_step(x, y)
            named = [*((one.name, one) for one in (mean, *metrics)), *((f"val_{one.name}", one) for one in val_metrics)]
            for name, metric in named:
                history.setdefault(name, []).append(float(metric.result()))
                metric.reset_state()
        found = keras.callbacks.History()
        found.set_model(model)
        found.history, found.epoch = dict(sorted(history.items())), list(range(epochs))
        return found


class TrainerKit:
    """trainer_kit, in a folder of a run; with a step, the process kills itself when a loop has reached that step."""

    def __init__(self, folder: Path, kill: int = 0) -> None:
        self._folder, self._kill = folder, [Kill(kill)] if kill else []

    def fit(self, model: Any, *arguments: Any, callbacks: Any = (), **options: Any) -> Any:
        model.jit_compile = False
        return tk_keras.fit(model, *arguments, callbacks=[*callbacks, *self._kill], **options, **self._settings())

    def train_loop(self, train_step: Any, train_ds: Any, **options: Any) -> Any:
        return tk_keras.train_loop(train_step, train_ds, callbacks=self._kill, verbose=0, **options, **self._settings())

    def _settings(self) -> dict[str, Any]:
        loops = {"steps_per_loop": 4, "checkpoint_interval": 4}  # an epoch is no multiple of a loop
        return {"model_dir": str(self._folder), "trainer": loops, "best": False}


class Kill(Callback):
    """Kills the process at the end of the loop that reaches a step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step >= self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def result(history: Any) -> dict[str, Any]:
    """Returns the history of a program and the bits of all variables that it has trained."""
    variables = {id(one): one for one in (*history.model.variables, *_of_optimizers(history.model))}
    bits = [tf.convert_to_tensor(one).numpy().tobytes().hex() for one in variables.values()]
    return {"history": history.history, "epoch": history.epoch, "bits": bits}


def _of_optimizers(model: Any) -> list[Any]:
    found = [one for one in vars(model).values() if isinstance(one, keras.Optimizer)]
    return [variable for one in found for variable in one.variables]


def run_to_the_end(folder: Path) -> None:
    """Runs the killed programs to their end, all programs whole, and all with Keras; writes the results to files."""
    for kind in ("again", "whole"):
        _run({name: TrainerKit(folder / kind / name) for name in PROGRAMS}, folder / f"{kind}.json")
    _run({name: Keras() for name in PROGRAMS}, folder / "keras.json")


def run_killed(name: str, folder: Path, step: int) -> None:
    """Runs a program that kills its process."""
    PROGRAMS[name](TrainerKit(folder / "again" / name, step))


def _run(doors: dict[str, Door], output: Path) -> None:
    tf.config.set_visible_devices([], "GPU")
    output.write_text(json.dumps({name: result(PROGRAMS[name](door)) for name, door in doors.items()}))
