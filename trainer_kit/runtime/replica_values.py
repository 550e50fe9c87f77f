"""Reads and sets the values of variables that differ between replicas; checkpoints contain them as arrays of the run.

A checkpoint holds one value of such a variable: the sum over the replicas for a metric, and for the
moving averages of batch normalization the first replica's (Keras 3 lets each replica move its own)
or their mean (tf_keras). A restore gives that value to all replicas. A run that resumes with the
same bits needs the value of each replica.
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

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.collectives import all_gather, broadcast_text, worker_count, worker_index

_LOG = logging.getLogger(__name__)


def select_replica_local(variables: Iterable[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns the variables that a step may set to different values on different replicas; [] for a single replica."""
    if strategy.num_replicas_in_sync == 1:
        return []
    return [variable for variable in variables if not _native(variable).trainable]


def are_replicas_equal(state: list[Any]) -> bool:
    """Whether all replicas have the same bits of each variable, in the return value of `read_replica_values`."""
    for by_worker in zip(*state, strict=True):
        bits = {value.tobytes() for values in by_worker for value in values}
        if len(bits) > 1:
            return False
    return True


def read_replica_values(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> list[Any]:
    """Returns the values of all replicas as NumPy arrays: a list of workers, of variables, of replicas.

    Runs eagerly. All workers call it.
    """
    local = [[np.asarray(part) for part in parts] for parts in _parts(variables, strategy)]
    if worker_count(strategy) == 1:
        return [local]
    text = json.dumps([[encode_array(array) for array in arrays] for arrays in local])
    gathered = [json.loads(text) for text in all_gather(strategy, text)]
    return [[[decode_array(value) for value in values] for values in worker] for worker in gathered]


def restore_replica_values(
    variables: Sequence[Any], strategy: tf.distribute.Strategy, state: list[Any]
) -> bool:
    """Restores what `read_replica_values` returned; returns False, without a change, if the replicas differ."""
    if len(state) != worker_count(strategy):
        return False
    there = _parts(variables, strategy)
    values = [list(map(_array, parts)) for parts in state[worker_index(strategy)]]
    fits = [[part.shape for part in parts] for parts in values] == [
        [tuple(p.shape) for p in ps] for ps in there
    ]
    if fits:
        for parts, saved in zip(there, values, strict=True):
            for part, value in zip(parts, saved, strict=True):
                part.assign(value)
    return fits


class ReplicaLocalState:
    """The values that differ between replicas, such as averages of batch normalization, for the checkpoint.

    Args:
      variables: A function that returns the variables.
      strategy: The strategy in whose scope they were made.
    """

    def __init__(
        self, variables: Callable[[], Iterable[Any]], strategy: tf.distribute.Strategy
    ) -> None:
        self._variables, self._strategy = variables, strategy
        self._replaced_values: list[tuple[tf.Variable, tf.Tensor]] = []

    def state(self) -> list[Any] | None:
        """Returns the values of all replicas; None if all replicas have the same.

        Runs eagerly. All workers call it.
        """
        variables = select_replica_local(self._variables(), self._strategy)
        state = read_replica_values(variables, self._strategy) if variables else []
        return None if are_replicas_equal(state) else state

    def restore(self, state: list[Any] | None) -> None:
        """Gives each replica the values that `state` returned for it; None changes nothing.

        If they were saved on another number of replicas, or on other workers, it changes nothing
        and warns.
        """
        variables = select_replica_local(self._variables(), self._strategy)
        if (
            variables
            and state is not None
            and not restore_replica_values(variables, self._strategy, state)
        ):
            _LOG.warning(
                "the checkpoint was saved on other replicas: each replica continues with the values"
                " of the first one, such as the moving averages of batch normalization"
            )

    def share_values(self) -> None:
        """Gives all replicas the values that a checkpoint would hold, for an evaluation, unless they have them.

        Runs eagerly. All workers call it.
        """
        candidates = (
            [] if self._replaced_values else select_replica_local(self._variables(), self._strategy)
        )
        variables = [variable for variable in candidates if _is_moving_average(_native(variable))]
        if not variables:
            return
        values = [
            encode_array(tf.convert_to_tensor(_native(variable)).numpy()) for variable in variables
        ]
        values = json.loads(
            broadcast_text(self._strategy, json.dumps(values))
        )  # the chief writes the checkpoint
        for parts, value in zip(_parts(variables, self._strategy), values, strict=True):
            for part in parts:
                self._replaced_values.append((part, part.read_value()))
                part.assign(decode_array(value))

    def unshare_values(self) -> None:
        """Gives each replica its own values again; runs eagerly, from any thread."""
        own_values, self._replaced_values = self._replaced_values, []
        for part, value in own_values:
            part.assign(value)


def _is_moving_average(variable: tf.Variable) -> bool:
    """Whether a variable that is not trained is no count or sum: a checkpoint adds up those of all replicas."""
    return variable.dtype.is_floating and variable.aggregation != tf.VariableAggregation.SUM


def _parts(variables: Sequence[Any], strategy: tf.distribute.Strategy) -> list[Sequence[Any]]:
    """Returns each variable's local values, one per replica of this worker."""
    return [strategy.experimental_local_results(_native(variable)) for variable in variables]


def _native(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


def _array(value: Any) -> np.ndarray:
    """Returns a value of a replica; checkpoints of earlier versions contain the array as JSON."""
    return decode_array(value) if isinstance(value, dict) else value


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """Returns an array as text between workers can hold it, bit by bit."""
    contiguous = np.ascontiguousarray(array)
    data = base64.b64encode(contiguous.tobytes()).decode()
    return {"dtype": contiguous.dtype.name, "shape": list(array.shape), "data": data}


def decode_array(value: dict[str, Any]) -> np.ndarray:
    """Returns the array that workers exchange as text, and that checkpoints of earlier versions contain as JSON."""
    data = np.frombuffer(
        base64.b64decode(value["data"]), tf.as_dtype(value["dtype"]).as_numpy_dtype
    )
    return data.reshape(value["shape"]).copy()


def local_tensors(inputs: Any, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns all tensors of a distributed batch, of every replica of this worker; runs in graph, cross-replica."""
    values = [
        local
        for value in tf.nest.flatten(inputs)
        for local in strategy.experimental_local_results(value)
    ]
    return [
        tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(tensor)
    ]


def build_run_options(runtime: RuntimeConfig) -> tf.distribute.RunOptions | None:
    """Returns the options of strategy.run that the config asks for; None if it asks for none."""
    padder = runtime.tpu_enable_xla_dynamic_padder
    if padder is None:
        return None
    return tf.distribute.RunOptions(
        experimental_xla_options=tf.tpu.XLAOptions(enable_xla_dynamic_padder=padder)
    )
