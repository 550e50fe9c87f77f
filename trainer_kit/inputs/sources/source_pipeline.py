"""The common parts of all Sources.

These are prefetching, tf.data's options, and a warning about fields that they do not read.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection

import tensorflow as tf

from trainer_kit.config.schema.experiment import DataConfig
from trainer_kit.errors import UsageError, suggest_names

_LOG = logging.getLogger(__name__)

# The fields of DataConfig that every Source reads, and the one that changes nothing by design.
_COMMON_FIELDS = {
    "global_batch_size",
    "is_training",
    "drop_remainder",
    "seed",
    "prefetch_buffer_size",
    "deterministic",
    "autotune_algorithm",
    "sharding",
}


def build_options(params: DataConfig) -> tf.data.Options:
    """Returns tf.data's options for `params`.

    Raises:
      UsageError: when autotune_algorithm is unknown.
    """
    options = tf.data.Options()
    # A gather has nothing to tune, and the tuner's pauses of up to a minute would delay the end of
    # the process.
    options.autotune.enabled = params.autotune_algorithm is not None
    if params.deterministic is not None:
        options.deterministic = params.deterministic
    if params.autotune_algorithm is not None:
        algorithms = {
            algorithm.name.lower(): algorithm
            for algorithm in tf.data.experimental.AutotuneAlgorithm
        }
        algorithm = algorithms.get(params.autotune_algorithm.lower())
        if algorithm is None:
            raise UsageError(
                f"autotune_algorithm: {params.autotune_algorithm!r} is not an algorithm of tf.data;"
                f" {suggest_names(params.autotune_algorithm, list(algorithms))}"
            )
        options.autotune.autotune_algorithm = algorithm
    return options


def finish_pipeline(
    batches: tf.data.Dataset, params: DataConfig, options: tf.data.Options
) -> tf.data.Dataset:
    """Returns `batches`, prefetched as `params` says, and with `options`."""
    buffer_size = params.prefetch_buffer_size
    if buffer_size is None:
        batches = batches.prefetch(tf.data.AUTOTUNE)
    elif buffer_size != 0:
        batches = batches.prefetch(buffer_size)
    return batches.with_options(options)


def warn_of_unread_fields(reader: str, params: DataConfig, own_fields: Collection[str]) -> None:
    """Warns of fields that are set and that `reader` does not read, once per process.

    A field is set if it differs from its default.

    Args:
      reader: The name of the Source, for the message.
      params: The data's section of the config.
      own_fields: The fields that this Source reads in addition to those that all Sources read.
    """
    defaults = DataConfig()
    unread = [
        name
        for name in defaults.as_dict()
        if name not in _COMMON_FIELDS
        and name not in own_fields
        and getattr(params, name) != getattr(defaults, name)
    ]
    if unread:
        _warn_once(
            f"{reader} does not read {', '.join(unread)}; unless the task reads them, these fields"
            " have no effect"
        )


@functools.cache
def _warn_once(message: str) -> None:
    _LOG.warning(message)
