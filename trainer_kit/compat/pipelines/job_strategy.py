"""The strategy of a job: a TPU if it is asked for and there is one, else the current strategy."""

from __future__ import annotations

import logging
import os

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.distribution.strategy import create_strategy
from trainer_kit.distribution.strategy_choice import TPU_VARIABLES
from trainer_kit.errors import ConfigError

_LOG = logging.getLogger(__name__)


def job_strategy(use_tpu: bool) -> tf.distribute.Strategy:
    """Returns a TPUStrategy, or the current strategy, which is TensorFlow's default one outside of a scope.

    Runs eagerly, on the host.

    Args:
      use_tpu: Whether to look for a TPU.

    Raises:
      ConfigError: when an environment variable names a TPU and it does not answer: a job that should run on it would
        take days on a CPU.
    """
    current = tf.distribute.get_strategy()
    if not use_tpu or tf.distribute.has_strategy():
        return current
    try:
        return create_strategy(RuntimeConfig(distribution_strategy="tpu"))
    except ConfigError:
        if any(os.environ.get(name) for name in TPU_VARIABLES):
            raise
    _LOG.warning("use_tpu=True: there is no TPU; the job trains with TensorFlow's default strategy")
    return current
