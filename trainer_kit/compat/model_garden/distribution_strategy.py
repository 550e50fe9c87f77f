"""get_distribution_strategy with Model Garden's arguments and trainer_kit's strategies."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf
from official.common.distribute_utils import get_distribution_strategy as model_gardens

from trainer_kit.config.schema.runtime import ALL_REDUCE_ALGORITHMS, RuntimeConfig
from trainer_kit.config.schema.section import FieldError
from trainer_kit.errors import UsageError
from trainer_kit.runtime.strategy import create_strategy
from trainer_kit.runtime.tf_config import read_cluster

_LOG = logging.getLogger(__name__)


def get_distribution_strategy(
    distribution_strategy: str = "mirrored",
    num_gpus: int = 0,
    all_reduce_alg: str | None = None,
    num_packs: int = 1,
    tpu_address: str | None = None,
    **kwargs: Any,
) -> tf.distribute.Strategy:
    """Returns a strategy by its name. Runs eagerly, on the host.

    Mirroring over one device gives TensorFlow's default strategy. Model Garden creates a
    MirroredStrategy with one replica, which computes the same but takes three times as long for a
    small step (0.3 ms instead of 0.1 on a CPU).

    Args:
      distribution_strategy: off, one_device, mirrored, multi_worker_mirrored, parameter_server,
        tpu, or auto (which uses what the machine has). Case does not matter.
      num_gpus: The number of GPUs for one_device and mirrored. With 0 they use the CPU, even if
        there are GPUs. The other strategies use all GPUs.
      all_reduce_alg: The algorithm that sums gradients: nccl or hierarchical_copy for mirrored,
        ring or nccl for multi_worker_mirrored, None or auto for TensorFlow's choice.
      num_packs: The number of packs in which mirrored sums gradients, if all_reduce_alg is set.
      tpu_address: The name or address of the TPU, for tpu.
      **kwargs: Ignored, as in Model Garden.

    Raises:
      UsageError: (a ValueError) For arguments that Model Garden refuses, in Model Garden's words.
      ConfigError: (a ValueError) For devices that this machine does not have.
    """
    del kwargs
    # YAML reads off as False.
    name: Any = distribution_strategy
    name = name.lower() if isinstance(name, str) else name
    # Programs pass all arguments, also those that the strategy ignores and RuntimeConfig refuses.
    if all_reduce_alg not in ALL_REDUCE_ALGORITHMS["mirrored"]:
        num_packs = 1
    if name not in ("auto", "tpu"):
        tpu_address = None
    try:
        config = RuntimeConfig(
            distribution_strategy=name,
            num_gpus=num_gpus,
            all_reduce_alg=all_reduce_alg,
            num_packs=num_packs,
            tpu=tpu_address,
        )
    except FieldError as error:
        # The error begins with Model Garden's words, if it has any. Model Garden is not asked about
        # auto, which it does not know, or tpu, for which it would connect to a TPU.
        if name not in ("auto", "tpu") and type(num_gpus) is int:
            try:
                model_gardens(name, num_gpus, all_reduce_alg)
            except ValueError as garden_error:
                raise UsageError(f"{garden_error}: {error}") from None
        raise error from None

    if name == "multi_worker_mirrored" and read_cluster() is None:
        _LOG.warning(
            "multi_worker_mirrored: no cluster is configured, so this process trains alone; set"
            " TF_CONFIG, or call configure_cluster with the addresses of the workers"
        )
        algorithm = None if all_reduce_alg == "auto" else all_reduce_alg
        return model_gardens(name, all_reduce_alg=algorithm)

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and name in ("one_device", "mirrored") and num_gpus == 0:
        _LOG.warning(
            "num_gpus=0: training on the CPU; %d GPU(s) are left unused, set num_gpus to use them",
            len(gpus),
        )
        return tf.distribute.OneDeviceStrategy("CPU:0")
    return create_strategy(config)
