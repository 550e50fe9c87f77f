"""Writes a report of a divergence to one file: the step, batches, layers, and a command that repeats it."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit import files
from trainer_kit.checkpoints.manager import CheckpointManager
from trainer_kit.checkpoints.startup_scan import DIVERGED
from trainer_kit.checkpoints.state.variable_names import model_variables
from trainer_kit.errors import DivergedError
from trainer_kit.optimizers import gradients
from trainer_kit.telemetry.scalars import to_json_number
from trainer_kit.training.loops.iterators import OneElement

_LOG = logging.getLogger(__name__)
SEARCH_SECONDS = 60.0  # how long the steps since the last checkpoint are gone through again, one by one


def explain_divergence(
    trainer: Any, manager: CheckpointManager, model_dir: str, recovery: Any, error: DivergedError, begun: int, end: int
) -> tuple[str, str]:
    """Writes `diverged/step-<n>.json` and returns its path, and advice if its batch is not finite, else "".

    Runs eagerly. Every worker calls it, and the chief writes the file.

    It restores the last checkpoint, trains step by step until a step diverges, for SEARCH_SECONDS at most, and then
    computes the gradients of that step. The state of the run cannot be used afterwards: the run is about to end.

    Args:
      trainer: The run's trainer.
      manager: The run's checkpoint manager.
      model_dir: The run's folder.
      recovery: The run's Recovery, which finds the step that diverges.
      error: The error that ended the run.
      begun, end: The global steps before and after the loop that diverged.
    """
    record: dict[str, Any] = {"error": str(error), "steps": [begun + 1, end], "trials": recovery.trials}
    record["not_finite"] = first_not_finite(trainer.model)
    record["batches"] = [trainer.data.batch_of(begun + 1), trainer.data.batch_of(end)]
    path, step, advice = manager.newest(), None, ""
    if path is not None:
        saved = recovery.restore_checkpoint(path)
        record["checkpoint"] = os.path.basename(path)
        step = recovery.first_bad_step(saved, end, time.monotonic() + SEARCH_SECONDS)
        if step is not None:
            record |= {"step": step, "batch": trainer.data.batch_of(step)}
            recovery.restore_checkpoint(path)
            if step - saved > 1:
                trainer.train(tf.constant(step - saved - 1, tf.int32))
        if step is not None and int(trainer.global_step.numpy()) == step - 1:  # else a stop was asked for meanwhile
            batch = trainer.next_batch()
            if examples := examples_not_finite(trainer.strategy, batch):
                record["examples_not_finite"] = examples
                advice = f"values of example {examples[0]} in batch {record['batch']} are not finite: repair the data"
            norms = gradient_norms(trainer, batch)
            record["gradient_norms"] = {name: to_json_number(norm) for name, norm in norms.items()}
            record["not_finite"] = first_not_finite(trainer.model) or record["not_finite"]
    if step is None:
        record["hint"] = (
            "to find the step, its batch and its gradients, the steps since a checkpoint are repeated: there was no "
            "checkpoint, or the search took too long; trainer.recovery_max_trials=1 saves a checkpoint at the start"
        )
    record["command"] = command(model_dir, path, step or end)
    target = os.path.join(model_dir, DIVERGED, f"step-{record.get('step', end)}.json")
    if trainer.strategy.extended.should_checkpoint:
        files.write_json(target, record, point="divergence")
    return target, advice


def examples_not_finite(strategy: tf.distribute.Strategy, batch: Any) -> list[int]:
    """Returns the places, in the batch of this worker, of the examples with values that are not finite."""
    places: set[int] = set()
    for leaf in tf.nest.flatten(batch):
        parts = strategy.experimental_local_results(leaf)
        if all(isinstance(part, tf.Tensor) and part.dtype.is_floating and part.shape.rank for part in parts):
            values = tf.concat(parts, 0).numpy()
            places.update(np.argwhere(~np.isfinite(values))[:, 0].tolist())
    return sorted(places)


def first_not_finite(model: Any) -> str | None:
    """Returns the name of the model's first variable with a value that is not finite; None if all are finite."""
    for name, variable in _named(model):
        if variable.dtype.is_floating and not np.all(np.isfinite(tf.cast(variable, tf.float32).numpy())):
            return str(name)
    return None


def _named(model: Any) -> list[tuple[str, Any]]:
    variables = model_variables(model)
    return list(variables.items()) if isinstance(variables, dict) else [(v.name, v) for v in model.variables]


def gradient_norms(trainer: Any, batch: Any) -> dict[str, float]:
    """Takes one training step eagerly on a batch and returns the L2 norm of each gradient before clipping, by variable.

    The gradients are those of the first replica. The result is empty when the task applies gradients without
    trainer_kit.apply_gradients.
    """
    norms: dict[str, float] = {}
    names = {id(variable): name for name, variable in _named(trainer.model)}

    def see(pairs: list[tuple[Any, Any]]) -> None:
        for gradient, variable in pairs:
            values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
            own = variable.value if isinstance(variable, keras.Variable) else variable
            norms.setdefault(names.get(id(own), own.name), float(tf.norm(tf.cast(values, tf.float32))))

    eagerly = tf.config.functions_run_eagerly()
    gradients.on_gradients = see
    tf.config.run_functions_eagerly(True)
    try:
        trainer.train_step(OneElement(batch))
    except (tf.errors.OpError, RuntimeError, ValueError, TypeError) as error:
        # Some steps cannot run eagerly, under this strategy or by their nature: the rest of the file is still worth it.
        _LOG.warning("the norms of the gradients could not be computed: %s", (str(error).splitlines() or [""])[0])
    finally:
        gradients.on_gradients = None
        tf.config.run_functions_eagerly(eagerly)
    return norms


def command(model_dir: str, checkpoint: str | None, step: int) -> str:
    """Returns shell commands that repeat the steps from `checkpoint`, or from 0, to `step` in a separate folder.

    If another program than `python -m trainer_kit.train` started the run, a comment describes the last command.
    """
    again = os.path.join(model_dir, DIVERGED, "again")
    overrides = f"trainer.train_steps={step},trainer.steps_per_loop=1,trainer.summary_interval=1"
    overrides += ",trainer.recovery_max_trials=0"  # it ends at the first divergence
    copy = f"cp {shlex.quote(checkpoint)}.* {shlex.quote(again)} && " if checkpoint else ""
    begin = f"cd {shlex.quote(os.getcwd())} && mkdir -p {shlex.quote(again)} && {copy}"
    if os.path.realpath(sys.argv[0]) != os.path.join(os.path.dirname(os.path.realpath(files.__file__)), "train.py"):
        return f"{begin}true  # then run your program again with model_dir={again} and {overrides}"
    flags = [shlex.quote(flag) for flag in _flags_without(sys.argv[1:], "model_dir", "max_restarts", "from_step")]
    rerun = ["python -m trainer_kit.train", *flags, f"--model_dir={shlex.quote(again)}"]
    return f"{begin}{' '.join(rerun)} --params_override={overrides}"


def _flags_without(arguments: list[str], *names: str) -> Iterator[str]:
    waiting = iter(arguments)
    for argument in waiting:
        name, given, _ = argument.lstrip("-").partition("=")
        if argument.startswith("-") and name in names:
            if not given:
                next(waiting, None)
            continue
        yield argument
