"""What a trainer needs under a parameter-server strategy; under every other one it does nothing."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError


class AsyncTraining:
    """The methods of a trainer that concern asynchronous training; to be inherited from."""

    _strategy: tf.distribute.Strategy

    def init_async(self) -> None:
        """Makes the coordinator when the strategy is a parameter-server strategy."""
        self._is_async = isinstance(self._strategy, tf.distribute.experimental.ParameterServerStrategy)
        self._coordinator = (
            tf.distribute.experimental.coordinator.ClusterCoordinator(self._strategy) if self._is_async else None
        )

    def coordinator_for_async(self) -> Any:
        """Returns the coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        if self._coordinator is None:
            raise UsageError(
                "asynchronous training needs a parameter-server strategy; this trainer was made under "
                f"{type(self._strategy).__name__}; make it in the scope of a tf.distribute.ParameterServerStrategy"
            )
        return self._coordinator

    def join(self) -> None:
        """Waits for all scheduled steps; returns at once in synchronous training."""
        if self._is_async:
            self.coordinator_for_async().join()

    def per_worker(self, make_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the dataset of `make_dataset(strategy, *args, **kwargs)`, one on each worker if asynchronous."""
        make = functools.partial(make_dataset, self._strategy, *args, **kwargs)
        if self._is_async:
            return self.coordinator_for_async().create_per_worker_dataset(tf.function(make))
        return make()
