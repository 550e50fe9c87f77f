"""AveragingTrainer: the methods of a trainer that replace its weights by their moving averages."""

from __future__ import annotations

from contextlib import AbstractContextManager

import tensorflow as tf

from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.training.base_trainer import BaseTrainer
from trainer_kit.training.trainer_parts.evaluated_weights import EvaluatedWeights
from trainer_kit.training.trainer_parts.tracked_state import TrackedState


class AveragingTrainer(BaseTrainer):
    """A trainer whose weights can be replaced by their moving averages.

    Attributes:
      state: The TrainState of the run.
    """

    state: TrainState
    _weights: EvaluatedWeights
    _tracked: TrackedState

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """The tf.train.Checkpoint with all state of the run."""
        return self.state.checkpoint

    def weights_of_metric(self, metric: str) -> str:
        """Returns which weights a metric of an evaluation is of: the name of an average, or "weights"."""
        return self._weights.of_metric(metric, [name for name in self.validation_sets if name])[0]

    def averaged_weights(self, name: str = "") -> AbstractContextManager[None]:
        """Replaces the weights by a moving average, if any, and makes late saves wait; runs eagerly, on the host.

        Args:
          name: "average", "weights" or one of `ema.more_decays`; "": what evaluations use, the first of `ema.evaluate`.

        Raises:
          UsageError: when the run keeps no such average.
        """
        return self._weights.averaged(name)

    @property
    def averages(self) -> list[str]:
        """The names of the moving averages that the run keeps."""
        return self._weights.averages

    def write_weights(self, prefix: str, name: str = "") -> None:
        """Writes a checkpoint of weights alone, as the best checkpoint is one.

        Runs eagerly, on the host, on every worker.

        Args:
          prefix: The path of the checkpoint, without suffixes.
          name: Which weights; see `averaged_weights`.
        """
        self._tracked.before_save()
        with self.averaged_weights(name):
            self.state.weights.write(prefix)

    def end_averaging(self) -> None:
        """Restores the weights and the states of random generators after an evaluation; any thread may call it."""
        self._weights.put_back()
