"""The number of steps in an epoch of the training data."""

from __future__ import annotations

import logging
from fractions import Fraction

import tensorflow as tf

from trainer_kit.errors import ConfigError, Mistake
from trainer_kit.inputs.dataset_structure import is_infinite
from trainer_kit.inputs.sources.example_order import count_local_replicas
from trainer_kit.inputs.sources.source_protocol import Source

_LOG = logging.getLogger(__name__)
_SET_IT = "set trainer.steps_per_epoch to the number of steps that count as an epoch"


def compute_epoch_length(
    data: tf.data.Dataset | Source | None,
    batch_size: int,
    input_context: tf.distribute.InputContext | None = None,
    required_by: str = "an epoch",
) -> Fraction:
    """Returns the number of steps in an epoch. Runs eagerly, on the host.

    It is a fraction where batches run over the end of an epoch. A dataset whose length TensorFlow
    does not know is read once from its start to its end to count it.

    Args:
      data: The data that build_inputs has returned: a Source with `batches_per_epoch` or
        `num_examples`, or a tf.data.Dataset of batches for one replica. None if the config has no
        task.train_data.
      batch_size: The global batch size, by which a Source counts.
      input_context: The worker's place among the others. None for a single replica.
      required_by: The name of the setting that needs the length, for the message.

    Raises:
      ConfigError: when the data has no end, or its length is not known.
    """
    if isinstance(data, Source):
        if batches := getattr(data, "batches_per_epoch", None):
            return Fraction(batches)
        examples = getattr(data, "num_examples", None)
        if not examples or not batch_size:
            raise _not_known(
                required_by,
                f"{type(data).__name__} does not tell it by num_examples or batches_per_epoch",
            )
        # A fraction, since batches may run over the end of an epoch.
        return Fraction(examples, batch_size)

    if data is None:
        raise _not_known(required_by, "the config has no task.train_data")
    if not isinstance(data, tf.data.Dataset):
        raise _not_known(required_by, f"a {type(data).__name__} does not tell it")
    if is_infinite(data):
        raise _not_known(required_by, "task.train_data has no end")

    batches = int(data.cardinality())
    if batches == tf.data.UNKNOWN_CARDINALITY:
        zero = tf.constant(0, tf.int64)
        batches = int(data.reduce(zero, lambda count, _: count + 1))
        _LOG.info(
            "task.train_data was read once to count the batches of an epoch: %d; set"
            " trainer.steps_per_epoch to save this time at the next start",
            batches,
        )
    if not batches:
        raise _not_known(required_by, "task.train_data has no batch")

    # Each step takes a batch for each replica of this worker.
    local_replicas = count_local_replicas(input_context)
    return Fraction(batches, local_replicas)


def _not_known(required_by: str, reason: str) -> ConfigError:
    return ConfigError(
        [Mistake(required_by, f"needs the length of an epoch, but {reason}", _SET_IT)]
    )
