"""Variables of which each replica has its own, and their values, replica by replica, for a checkpoint's run state.

A checkpoint holds one value of such a variable: the sum over the replicas of what a metric has added up, the first
replica's moving averages of batch normalization (Keras 3 lets each replica move its own). A restore gives that to all
of them. A run that goes on with the same bits needs each replica's own.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.distribution.collectives import all_gather, worker_count, worker_index

_LOG = logging.getLogger(__name__)


def own_to_each_replica(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns those that a step may set to another value on each replica; [] for a single replica."""
    if strategy.num_replicas_in_sync == 1:
        return []
    return [variable for variable in variables if not _native(variable).trainable]


def are_alike(state: list[Any]) -> bool:
    """Whether all replicas have the same value of each variable; `state` is of `replica_values`."""
    return all(
        value == by_worker[0][0] for by_worker in zip(*state, strict=True) for values in by_worker for value in values
    )


def replica_values(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns the values of all replicas as JSON can hold them, by worker; eager, on every worker at once."""
    own = [[_encode(part.numpy()) for part in parts] for parts in _parts(variables, strategy)]
    if worker_count(strategy) == 1:
        return [own]
    return [json.loads(text) for text in all_gather(strategy, json.dumps(own))]


def put_replica_values(variables: Sequence[Any], strategy: tf.distribute.Strategy, state: list[Any]) -> bool:
    """Takes back what `replica_values` returned; False, and nothing is changed, if it is of others or more replicas."""
    if len(state) != worker_count(strategy):
        return False
    there = _parts(variables, strategy)
    values = [[_decode(part) for part in parts] for parts in state[worker_index(strategy)]]
    fits = [[part.shape for part in parts] for parts in values] == [[tuple(p.shape) for p in ps] for ps in there]
    if fits:
        for parts, saved in zip(there, values, strict=True):
            for part, value in zip(parts, saved, strict=True):
                part.assign(value)
    return fits


class ReplicasState:
    """What the replicas hold each for itself, such as the averages of batch normalization, for the checkpoint.

    Args:
      variables: returns those of the model.
      strategy: in whose scope they were made.
    """

    def __init__(self, variables: Callable[[], Iterable[Any]], strategy: tf.distribute.Strategy) -> None:
        self._variables, self._strategy = variables, strategy

    def state(self) -> list[Any] | None:
        """Returns the values of all replicas; None where all have the same. Eager, on every worker at once."""
        own = own_to_each_replica(self._variables(), self._strategy)
        state = replica_values(own, self._strategy) if own else []
        return None if are_alike(state) else state

    def restore(self, state: list[Any] | None) -> None:
        """Takes back what `state` returned; warns when there were other replicas."""
        own = own_to_each_replica(self._variables(), self._strategy)
        if own and state is not None and not put_replica_values(own, self._strategy, state):
            _LOG.warning(
                "the checkpoint was saved on other replicas: each replica continues with the values of the first one, "
                "such as the moving averages of batch normalization"
            )


def _parts(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> list[Sequence[Any]]:
    """The variables of each, as each replica of this worker has them."""
    return [strategy.experimental_local_results(_native(variable)) for variable in variables]


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _encode(array: np.ndarray) -> dict[str, Any]:
    """Returns an array as JSON can hold it, bit by bit."""
    contiguous = np.ascontiguousarray(array)
    data = base64.b64encode(contiguous.tobytes()).decode()
    return {"dtype": contiguous.dtype.str, "shape": list(array.shape), "data": data}


def _decode(value: dict[str, Any]) -> np.ndarray:
    """Returns the array that `_encode` was given."""
    data = np.frombuffer(base64.b64decode(value["data"]), np.dtype(value["dtype"]))
    return data.reshape(value["shape"])
