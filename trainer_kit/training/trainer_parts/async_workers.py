"""AsyncWorkers: schedules a trainer's loops under a parameter-server strategy; has no effect under other strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError


class AsyncWorkers:
    """The workers of asynchronous training, if the strategy uses parameter servers.

    Args:
      strategy: The trainer's strategy.

    Attributes:
      are_there: Whether the strategy uses parameter servers.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        self.are_there = isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy)
        make = tf.distribute.experimental.coordinator.ClusterCoordinator
        self._coordinator = make(strategy) if self.are_there else None

    @property
    def coordinator(self) -> Any:
        """The coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        if self._coordinator is None:
            raise UsageError(
                "asynchronous training needs a parameter-server strategy; this trainer was made under "
                f"{type(self._strategy).__name__}; create it in the scope of a tf.distribute.ParameterServerStrategy"
            )
        return self._coordinator

    def join(self) -> None:
        """Waits for all scheduled steps; returns at once in synchronous training."""
        if self._coordinator is not None:
            self._coordinator.join()

    def scheduled(self, loop: Any) -> Callable[[Any, Any], Any]:
        """Returns `loop_fn(iterator, num_steps)`, which schedules a training loop on a worker.

        Args:
          loop: The LoopFunction of the whole loop; None if only single steps are compiled.

        Raises:
          UsageError: when `loop` is None.
        """
        if loop is None:
            raise UsageError("asynchronous training needs trainer.train_tf_while_loop=true: workers run whole loops")
        return lambda iterator, num_steps: self.coordinator.schedule(
            loop.function, args=(iterator, num_steps, tf.constant(True))
        )

    def per_worker(self, make_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the dataset of `make_dataset(strategy, *args, **kwargs)`; with parameter servers, one per worker."""
        make = functools.partial(make_dataset, self._strategy, *args, **kwargs)
        if self._coordinator is None:
            return make()
        return self._coordinator.create_per_worker_dataset(tf.function(make))
