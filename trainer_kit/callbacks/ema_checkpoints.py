"""EMACheckpoints: writes separate checkpoints of the averaged weights, as a callback."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.errors import UsageError, suggest_names

if TYPE_CHECKING:
    from trainer_kit.checkpoints.weights_folder import WeightsFolder

FOLDER = "ema_checkpoints"
AVERAGE = "average"


class EMACheckpoints(Callback):
    """Writes the averaged weights to `ema_checkpoints/ckpt-<step>` in model_dir.

    It does so after each evaluation of a training, and in mode train, which does not evaluate, with
    each checkpoint. A file contains the average in place of the model's weights, as a plain
    TensorFlow checkpoint that `tf.train.Checkpoint(model=model)` of Keras reads. The averages of
    `ema.more_decays` have folders of their names, such as `ema_checkpoints/fast`. Sidecars write
    none. Runs eagerly, on the host, on every worker.

    Args:
      max_to_keep: The number of newest checkpoints to keep.
      average: "average", or one of `ema.more_decays`.

    Raises:
      UsageError: when max_to_keep is below 1.
    """

    name: str = FOLDER
    # All workers take part in a save, because reading a variable can involve all of them.
    chief_only = False

    def __init__(self, max_to_keep: int = 1, average: str = AVERAGE) -> None:
        if type(max_to_keep) is not int or max_to_keep < 1:
            raise UsageError(
                f"the callback {FOLDER}: max_to_keep={max_to_keep!r} has to be an integer above 0"
            )
        self._max_to_keep = max_to_keep
        self._average = average
        self._folder: WeightsFolder | None = None

    def run_begin(self, run: Run) -> None:
        """Checks that the run has the average, and removes unfinished files of a killed process.

        Raises:
          UsageError: when the run has no such average.
        """
        names = list(getattr(run.trainer, "average_names", ()))
        if self._average not in names:
            advice = "set trainer.optimizer_config.ema"
            if names:
                advice = suggest_names(self._average, names)
            raise UsageError(
                f"the callback {FOLDER}: the run keeps no average {self._average!r}; {advice}"
            )
        if not run.trainer.can_train:
            return

        # This imports TensorFlow, which the module itself does not need.
        from trainer_kit.checkpoints.weights_folder import WeightsFolder

        place = os.path.join(run.directory, FOLDER)
        if self._average != AVERAGE:
            place = os.path.join(place, self._average)
        self._folder = WeightsFolder(place, run.is_chief)

    def checkpoint_begin(self, run: Run) -> None:
        """Writes the average with a checkpoint of a run that does not evaluate.

        Writes nothing if the run has to stop quickly.
        """
        if not run.trainer.can_evaluate and not run.trainer.is_stop_requested:
            self._write(run)

    def evaluation_end(self, run: Run, logs: Mapping[str, object]) -> None:
        """Writes the average of the evaluated step.

        It is written again if a killed process has recorded the evaluation already.
        """
        del logs
        self._write(run)

    def _write(self, run: Run) -> None:
        if self._folder is None:
            return

        # Checkpoints of later steps are those of a run that was killed or went back. They are
        # removed too.
        steps = [step for step in self._folder.steps() if step < run.step]
        steps.append(run.step)
        save = functools.partial(run.trainer.write_weights, name=self._average)
        self._folder.write(run.step, save, steps[-self._max_to_keep :])
