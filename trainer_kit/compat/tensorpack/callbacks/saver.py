"""ModelSaver, MinSaver and MaxSaver, over the checkpoints of the engine."""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from trainer_kit.compat.tensorpack.callbacks.base import Callback
from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.utils import logger
from trainer_kit.errors import suggest_names

__all__ = ["ModelSaver", "MinSaver", "MaxSaver"]


class ModelSaver(Callback):
    """Saves a checkpoint each time it is triggered. The engine also saves one after each epoch.

    Args:
      max_to_keep: The number of checkpoints to keep.
      keep_checkpoint_every_n_hours: Not used: trainer.keep_interval of the engine pins checkpoints.
      checkpoint_dir: The folder, which has to be the logger directory.
      var_collections: Not used: a checkpoint contains all variables.
    """

    def __init__(
        self,
        max_to_keep: int = 10,
        keep_checkpoint_every_n_hours: float = 0.5,
        checkpoint_dir: str | None = None,
        var_collections: Any = None,
    ) -> None:
        self.max_to_keep = max_to_keep
        folder = logger.get_logger_dir()
        if checkpoint_dir and os.path.realpath(checkpoint_dir) != os.path.realpath(folder or ""):
            raise ProgramError(
                f"ModelSaver(checkpoint_dir={checkpoint_dir!r}): checkpoints are in the logger"
                f" directory {folder!r}, from which a run resumes; leave checkpoint_dir out, or"
                " call logger.set_logger_dir with this folder"
            )

    def _trigger(self) -> None:
        self.trainer.is_save_requested = True


class MinSaver(Callback):
    """Keeps the variables of the epoch in which a statistic is lowest.

    They are written by name to a checkpoint of TensorFlow 1, which SmartInit loads.

    Args:
      monitor_stat: The name of the statistic.
      reverse: Whether the highest value counts.
      filename: The name of the file. None: `min-` or `max-` and the name of the statistic.
      checkpoint_dir: The folder. None: the logger directory.
    """

    def __init__(
        self,
        monitor_stat: str,
        reverse: bool = False,
        filename: str | None = None,
        checkpoint_dir: str | None = None,
    ) -> None:
        self.monitor_stat = monitor_stat
        self.reverse = reverse
        prefix = "max" if reverse else "min"
        self.filename = filename or f"{prefix}-{monitor_stat}"
        self.checkpoint_dir = checkpoint_dir
        # The step and the value of the best one so far.
        self.best: tuple[int, float] | None = None
        self._is_missing_reported = False

    def _setup_graph(self) -> None:
        self.checkpoint_dir = self.checkpoint_dir or logger.get_logger_dir()
        self._saver = tf.compat.v1.train.Saver(
            tf.compat.v1.global_variables(), max_to_keep=1, save_relative_paths=True
        )

    def _trigger(self) -> None:
        try:
            step, value = self.trainer.monitors.get_history(self.monitor_stat)[-1]
        except (KeyError, IndexError):
            if not self._is_missing_reported:
                self._is_missing_reported = True
                history = self.trainer.monitors._scalar_history._dic
                names = [name for name, values in history.items() if values]
                logger.warn(
                    f"{type(self).__name__}({self.monitor_stat!r}) saves nothing: no statistic has"
                    f" this name; {suggest_names(self.monitor_stat, names)}"
                )
            return
        if self.best is not None:
            _, best_value = self.best
            is_better = value < best_value
            if self.reverse:
                is_better = value > best_value
            if not is_better:
                return
        if step != self.global_step:
            logger.warn(
                f"{type(self).__name__}: {self.monitor_stat}={value:.5g} is of step {step}, and the"
                f" variables are those of step {self.global_step}; put this callback after the one"
                " that reports the statistic, with the same period"
            )
            return

        self.best = (step, float(value))
        path = os.path.join(self.checkpoint_dir or ".", self.filename)
        session = tf.compat.v1.get_default_session()
        self._saver.save(session, path, write_meta_graph=False, write_state=False)
        logger.info(f"Model at global_step={step} with {self.monitor_stat}={value:.5g} saved.")


class MaxSaver(MinSaver):
    """Keeps the variables of the epoch in which a statistic is highest. See MinSaver."""

    def __init__(
        self, monitor_stat: str, filename: str | None = None, checkpoint_dir: str | None = None
    ) -> None:
        super().__init__(monitor_stat, True, filename, checkpoint_dir)
