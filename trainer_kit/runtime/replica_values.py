"""Reads and sets the values of variables that differ between replicas.

A checkpoint contains one value of such a variable: the sum over the replicas for a metric, and for
the moving averages of batch normalization the first replica's (Keras 3 lets each replica move its
own) or their mean (tf_keras). A restore gives that value to all replicas. A run that resumes with
the same bits needs the value of each replica, so checkpoints contain these as arrays of the run.
"""

from __future__ import annotations

import base64
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, TypedDict

import keras
import numpy as np
import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.runtime.collectives import all_gather, broadcast_text, worker_count, worker_index
from trainer_kit.typing import Variable

_LOG = logging.getLogger(__name__)


class EncodedArray(TypedDict):
    """An array in the form in which workers exchange it as JSON text."""

    dtype: str
    shape: list[int]
    # The bytes, in base64.
    data: str


# The values of a worker: for each variable the values of the worker's replicas.
WorkerValues: TypeAlias = list[list[np.ndarray]]
SavedWorkerValues: TypeAlias = Sequence[Sequence[np.ndarray | EncodedArray]]


def select_replica_local(
    variables: Iterable[Variable], strategy: tf.distribute.Strategy
) -> list[Variable]:
    """Returns the variables that a step may set to different values on different replicas.

    The list is empty for a single replica.
    """
    if strategy.num_replicas_in_sync == 1:
        return []
    # A step sets variables that are trained to the same value on all replicas.
    replica_local = []
    for variable in variables:
        native = native_variable(variable)
        if not native.trainable:
            replica_local.append(variable)
    return replica_local


def are_replicas_equal(state: Sequence[WorkerValues]) -> bool:
    """Whether all replicas have the same bits of each variable.

    Args:
      state: The return value of `read_replica_values`.
    """
    for values_by_worker in zip(*state, strict=True):
        values = itertools.chain.from_iterable(values_by_worker)
        bits = {value.tobytes() for value in values}
        if len(bits) > 1:
            return False
    return True


def read_replica_values(
    variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> list[WorkerValues]:
    """Returns the values of all replicas as NumPy arrays.

    The result is a list of workers, each a list of variables, each a list of replicas. Runs
    eagerly. All workers call it.
    """
    local = []
    for parts in _parts(variables, strategy):
        arrays = [np.asarray(part) for part in parts]
        local.append(arrays)
    if worker_count(strategy) == 1:
        return [local]

    encoded = []
    for arrays in local:
        encoded_arrays = [encode_array(array) for array in arrays]
        encoded.append(encoded_arrays)
    local_text = json.dumps(encoded)

    state = []
    for text in all_gather(strategy, local_text):
        worker_values = []
        for values in json.loads(text):
            arrays = [decode_array(value) for value in values]
            worker_values.append(arrays)
        state.append(worker_values)
    return state


def restore_replica_values(
    variables: Sequence[Variable],
    strategy: tf.distribute.Strategy,
    state: Sequence[SavedWorkerValues],
) -> bool:
    """Restores the return value of `read_replica_values`; runs eagerly.

    Args:
      variables: The variables whose values were read.
      strategy: The strategy in whose scope the variables were created.
      state: The values. Checkpoints of earlier versions contain the arrays as JSON.

    Returns:
      Whether the values were restored. False, without a change, if they were saved on other
      replicas.
    """
    if len(state) != worker_count(strategy):
        return False

    variable_parts = _parts(variables, strategy)
    saved_values = []
    for saved in state[worker_index(strategy)]:
        saved_values.append(
            [decode_array(value) if isinstance(value, dict) else value for value in saved]
        )

    shapes = []
    for parts in variable_parts:
        part_shapes = [tuple(part.shape) for part in parts]
        shapes.append(part_shapes)
    saved_shapes = []
    for values in saved_values:
        value_shapes = [value.shape for value in values]
        saved_shapes.append(value_shapes)
    if saved_shapes != shapes:
        return False

    for parts, values in zip(variable_parts, saved_values, strict=True):
        for part, value in zip(parts, values, strict=True):
            part.assign(value)
    return True


class ReplicaLocalState:
    """The values that differ between replicas, for the checkpoint.

    Moving averages of batch normalization are such values.

    Args:
      variables: A function that returns the variables.
      strategy: The strategy in whose scope the variables were created.
    """

    def __init__(
        self, variables: Callable[[], Iterable[Variable]], strategy: tf.distribute.Strategy
    ) -> None:
        self._variables = variables
        self._strategy = strategy
        self._replaced_values: list[tuple[tf.Variable, tf.Tensor]] = []

    def state(self) -> list[WorkerValues] | None:
        """Returns the values of all replicas; None if all replicas have the same.

        Runs eagerly. All workers call it.
        """
        variables = select_replica_local(self._variables(), self._strategy)
        if not variables:
            return None

        state = read_replica_values(variables, self._strategy)
        return None if are_replicas_equal(state) else state

    def restore(self, state: Sequence[SavedWorkerValues] | None) -> None:
        """Gives each replica the values that `state` returned for it; None changes nothing.

        If they were saved on another number of replicas, or on other workers, it changes nothing
        and warns. Runs eagerly.
        """
        variables = select_replica_local(self._variables(), self._strategy)
        if not variables or state is None:
            return
        if not restore_replica_values(variables, self._strategy, state):
            _LOG.warning(
                "the checkpoint was saved on other replicas: each replica continues with the values"
                " of the first one, such as the moving averages of batch normalization"
            )

    def share_values(self) -> None:
        """Gives all replicas the values that a checkpoint would contain, for an evaluation.

        Changes nothing if they have these values already. Runs eagerly. All workers call it.
        """
        if self._replaced_values:
            return

        # Of a count or a sum a checkpoint contains the sum over replicas. It is left as it is, and
        # the other variables are moving averages.
        variables = []
        for variable in select_replica_local(self._variables(), self._strategy):
            native = native_variable(variable)
            is_sum = native.aggregation == tf.VariableAggregation.SUM
            if native.dtype.is_floating and not is_sum:
                variables.append(variable)
        if not variables:
            return

        # The chief's values count, since the chief writes the checkpoint.
        encoded = []
        for variable in variables:
            tensor = tf.convert_to_tensor(native_variable(variable))
            encoded.append(encode_array(tensor.numpy()))
        local_text = json.dumps(encoded)
        text = broadcast_text(self._strategy, local_text)
        chief_values = json.loads(text)

        variable_parts = _parts(variables, self._strategy)
        for parts, value in zip(variable_parts, chief_values, strict=True):
            for part in parts:
                own_value = part.read_value()
                self._replaced_values.append((part, own_value))
                part.assign(decode_array(value))

    def unshare_values(self) -> None:
        """Gives each replica its own values again; runs eagerly, from any thread."""
        own_values = self._replaced_values
        self._replaced_values = []
        for part, value in own_values:
            part.assign(value)


def _parts(
    variables: Sequence[Variable], strategy: tf.distribute.Strategy
) -> list[Sequence[tf.Variable]]:
    """Returns each variable's local values, one per replica of this worker."""
    variable_parts = []
    for variable in variables:
        native = native_variable(variable)
        variable_parts.append(strategy.experimental_local_results(native))
    return variable_parts


def native_variable(variable: Variable) -> tf.Variable:
    """Returns the tf.Variable behind a Keras 3 variable; any other variable unchanged."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def encode_array(array: np.ndarray) -> EncodedArray:
    """Returns an array, bit by bit, in the form in which workers exchange it as JSON text."""
    contiguous = np.ascontiguousarray(array)
    array_bytes = contiguous.tobytes()
    data = base64.b64encode(array_bytes)
    return EncodedArray(
        dtype=contiguous.dtype.name,
        # np.ascontiguousarray gives a scalar the shape (1,).
        shape=list(array.shape),
        data=data.decode(),
    )


def decode_array(value: EncodedArray) -> np.ndarray:
    """Returns the array of `encode_array`, which checkpoints of earlier versions contain too."""
    dtype = tf.as_dtype(value["dtype"])
    data = base64.b64decode(value["data"])
    array = np.frombuffer(data, dtype.as_numpy_dtype)
    # The copy can be written to, the buffer cannot.
    return array.reshape(value["shape"]).copy()


def local_tensors(inputs: Any, strategy: tf.distribute.Strategy) -> list[tf.Tensor]:
    """Returns all tensors of a distributed batch, of every replica of this worker.

    Runs in graph, in cross-replica context.
    """
    values: list[tf.Tensor] = []
    for value in tf.nest.flatten(inputs):
        values.extend(strategy.experimental_local_results(value))
    leaves = tf.nest.flatten(values, expand_composites=True)
    return [leaf for leaf in leaves if tf.is_tensor(leaf)]


def build_run_options(runtime: RuntimeConfig) -> tf.distribute.RunOptions | None:
    """Returns the options of strategy.run that the config asks for; None if it asks for none."""
    padder = runtime.tpu_enable_xla_dynamic_padder
    if padder is None:
        return None
    return tf.distribute.RunOptions(
        experimental_xla_options=tf.tpu.XLAOptions(enable_xla_dynamic_padder=padder)
    )
