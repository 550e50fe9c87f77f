"""Runs a program of Tensorpack on the engine."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.callbacks.inference import (
    BinaryClassificationStats,
    ClassificationError,
    ScalarStats,
)
from trainer_kit.compat.tensorpack.callbacks.saver import MinSaver, ModelSaver
from trainer_kit.compat.tensorpack.program_config import ProgramConfig
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import InterruptedRunError, PreemptedError
from trainer_kit.process.error_report import print_error
from trainer_kit.run.runner import run_experiment

if TYPE_CHECKING:
    from trainer_kit.compat.tensorpack.train.base import Trainer


class CapturedProgram(BaseException):
    """Leaves a program where its training would begin.

    Args:
      trainer: The trainer, which is ready to begin.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("the program is ready to train")
        self.trainer = trainer


_is_capturing = False


@contextlib.contextmanager
def capture_programs() -> Iterator[None]:
    """A context in which a program stops with CapturedProgram where its training would begin."""
    global _is_capturing
    _is_capturing = True
    try:
        yield
    finally:
        _is_capturing = False


def run_program(trainer: Trainer) -> None:
    """Trains until the last epoch, from the newest checkpoint of the logger directory.

    Without a logger directory the run keeps nothing, as in Tensorpack.

    Raises:
      CapturedProgram: In `capture_programs`, instead of the training.
      SystemExit: When SIGTERM (code 75) or Ctrl-C stopped the run, after it saved.
    """
    if _is_capturing:
        raise CapturedProgram(trainer)
    from trainer_kit.compat.tensorpack.program_task import ProgramTask
    from trainer_kit.compat.tensorpack.utils import logger

    config = build_config(trainer)
    mode = "train_and_eval" if trainer.inference_runners() else "train"
    with contextlib.ExitStack() as stack:
        model_dir = logger.get_logger_dir()
        if model_dir is None:
            logger.warn(
                "no logger directory is set, so this run cannot be resumed; call"
                " logger.auto_set_dir() or logger.set_logger_dir(folder) first"
            )
            model_dir = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(trainer.program.leave())
        task = ProgramTask(config.task, model_dir, trainer)
        try:
            run_experiment(tf.distribute.get_strategy(), task, mode, config, model_dir)
        except (PreemptedError, InterruptedRunError) as error:
            raise SystemExit(int(print_error(error))) from error
    if not trainer.has_begun:
        logger.info(
            f"nothing to do: the run in {model_dir} has ended; give a higher max_epoch to train it"
            " further, or another logger directory to begin a new run"
        )


def build_config(trainer: Trainer) -> ExperimentConfig:
    """Returns the config of a program's run: what the program has set."""
    steps = trainer.steps_per_epoch
    fields: dict[str, Any] = {
        "train_steps": trainer.loop.total_steps,
        "steps_per_loop": steps,
        "steps_per_epoch": steps,
        "summary_interval": steps,
        "fuse_steps": trainer.fuse_steps,
        "checkpoint_interval": steps,
        # Callbacks ask for the other evaluations.
        "validation_interval": trainer.loop.total_steps,
        # Tensorpack continues with a loss that is not finite.
        "recovery_max_trials": -1,
    }
    evaluated_names = _list_evaluated_names(trainer)
    for callback in trainer.inner_callbacks():
        if isinstance(callback, ModelSaver):
            fields["max_to_keep"] = callback.max_to_keep
        if isinstance(callback, MinSaver) and callback.monitor_stat in evaluated_names:
            # The first saver decides which checkpoint is the best.
            fields.setdefault("best_checkpoint_eval_metric", callback.monitor_stat)
            comparison = "higher" if callback.reverse else "lower"
            fields.setdefault("best_checkpoint_metric_comp", comparison)
    return ExperimentConfig(task=ProgramConfig(), trainer=TrainerConfig(**fields))


def _list_evaluated_names(trainer: Trainer) -> set[str]:
    """Returns the names of the statistics that Tensorpack's Inferencers will report."""
    names: set[str] = set()
    for runner in trainer.inference_runners():
        for inferencer in runner.infs:
            if isinstance(inferencer, ClassificationError):
                names.add(inferencer.summary_name)
                continue
            parts = []
            if isinstance(inferencer, ScalarStats):
                parts = [name.partition(":")[0] for name in inferencer.names]
            elif isinstance(inferencer, BinaryClassificationStats):
                parts = ["precision", "recall"]
            prefix = getattr(inferencer, "prefix", "")
            if prefix:
                parts = [f"{prefix}_{part}" for part in parts]
            names.update(parts)
    return names
