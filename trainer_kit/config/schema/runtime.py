"""RuntimeConfig: the devices, threads, precision and seed of an experiment.

Names and defaults are those of TF Model Garden, as in experiment.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.number_types import (
    IntFromMinusOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

ALL_REDUCE_ALGORITHMS = {
    "mirrored": ("nccl", "hierarchical_copy"),
    "multi_worker_mirrored": ("ring", "nccl"),
}


@configclass
class RuntimeConfig(Config):
    """What the experiment runs on.

    Attributes:
      distribution_strategy: The tf.distribute strategy; `auto` chooses by the devices of the
        machine, and `off` uses TensorFlow's default strategy.
      enable_xla: Whether XLA compiles the training step; this needs one replica.
      gpu_thread_mode: How GPUs share host threads, the value of TF_GPU_THREAD_MODE; unset leaves it
        to TensorFlow.
      dataset_num_private_threads: The number of threads that the input pipeline has for itself;
        unset lets it share TensorFlow's.
      per_gpu_thread_count: The number of host threads for each GPU, the value of
        TF_GPU_THREAD_COUNT; 0 means TensorFlow's default of 2. It needs gpu_thread_mode=gpu_private
        or gpu_shared.
      tpu: The name or address of the TPU; the flag --tpu sets it.
      num_gpus: The number of GPUs to use; 0 leaves it to the strategy, of which auto and mirrored
        take all of them.
      worker_hosts: The addresses of all workers as host:port, separated by commas, for
        multi_worker_mirrored.
      task_index: The position of this process in worker_hosts, counted from 0; -1 means that it is
        not set.
      all_reduce_alg: The algorithm that sums gradients over replicas: nccl or hierarchical_copy for
        mirrored, ring or nccl for multi_worker_mirrored; unset leaves it to TensorFlow.
      num_packs: The number of packs that gradients are split into for nccl and hierarchical_copy.
      mixed_precision_dtype: The precision of computation: float32, float16 or bfloat16, or Keras'
        name of the same policy; unset leaves Keras' policy as it is.
      loss_scale: The factor of the loss under float16: `dynamic` or a fixed number.
      run_eagerly: Whether every tf.function runs eagerly, for debugging.
      batchnorm_spatial_persistent: Whether cuDNN uses its faster batch normalisation.
      tpu_enable_xla_dynamic_padder: Whether XLA pads tensors of unknown shape on a TPU; unset
        leaves it to TensorFlow.
      num_cores_per_replica: The number of TPU cores for one replica; only 1 is supported.
      default_shard_dim: The dimension by which a replica's input is split over TPU cores; only -1
        is supported.
      use_tpu_mp_strategy: Whether a TPU strategy with model parallelism is used; only false is
        supported.
      virtual_cpus: The number of devices that the CPU is split into, for runs on several replicas
        without accelerators; 0 does not split it.
      executor: How TensorFlow runs the operations of a loop: `default` on all threads,
        `single_threaded` one after the other. One thread is for very small models on one CPU: up to
        1.8 times as fast, and slower for larger ones. An executor gives the same bits every time,
        but not the bits of the other, which adds up a sum of several parts in another order. On one
        thread neither errors nor a profile name the operations.
      random_seed: The seed of Python, NumPy, TensorFlow and Keras.
      deterministic_ops: Whether TensorFlow uses deterministic kernels where it has a choice.
      inter_op_threads: The number of threads that run operations side by side; 0 means as many as
        at the run's first start, then one for each core. Another number can change the last bits of
        a sum.
      intra_op_threads: The number of threads that share the work of one operation; 0 means as many
        as at the run's first start, then one for each core. Another number can change the last bits
        of a sum.
      peak_flops: The peak rate of one device in FLOPs per second, for the model FLOPs utilisation
        (MFU) in reports, such as 312e12; unset looks the GPU up in a table, and reports none on
        other devices.
    """

    path_in_experiment = "runtime"

    distribution_strategy: Literal[
        "auto", "off", "one_device", "mirrored", "multi_worker_mirrored", "parameter_server", "tpu"
    ] = "auto"
    enable_xla: bool = False
    gpu_thread_mode: Literal["global", "gpu_private", "gpu_shared"] | None = None
    dataset_num_private_threads: PositiveInt | None = None
    per_gpu_thread_count: NonNegativeInt = 0
    tpu: str | None = None
    num_gpus: NonNegativeInt = 0
    worker_hosts: str | None = None
    task_index: IntFromMinusOne = -1
    all_reduce_alg: str | None = None
    num_packs: NonNegativeInt = 1
    mixed_precision_dtype: (
        Literal["float32", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16"] | None
    ) = None
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None
    run_eagerly: bool = False
    batchnorm_spatial_persistent: bool = False
    tpu_enable_xla_dynamic_padder: bool | None = None
    num_cores_per_replica: Literal[1] = 1
    default_shard_dim: Literal[-1] = -1
    use_tpu_mp_strategy: Literal[False] = False
    virtual_cpus: NonNegativeInt = 0
    executor: Literal["default", "single_threaded"] = "default"
    # The upper limit is that of NumPy.
    random_seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    deterministic_ops: bool = False
    inter_op_threads: NonNegativeInt = 0
    intra_op_threads: NonNegativeInt = 0
    peak_flops: PositiveFloat | None = None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks settings that need another setting, or exclude one."""
        is_float16 = self.mixed_precision_dtype in ("float16", "mixed_float16")
        if self.loss_scale is not None and not is_float16:
            yield (
                "loss_scale",
                "is for mixed_precision_dtype=float16 only; remove loss_scale, or set that dtype",
            )
        if self.per_gpu_thread_count and self.gpu_thread_mode not in ("gpu_private", "gpu_shared"):
            yield (
                "per_gpu_thread_count",
                "needs gpu_thread_mode=gpu_private or gpu_shared; set it, or remove the count",
            )

        # The strategy uses the devices. What depends on the machine is checked by runtime/.
        strategy = self.distribution_strategy
        if strategy in ("off", "one_device") and self.num_gpus > 1:
            yield (
                "num_gpus",
                f"distribution_strategy={strategy} uses one device, not {self.num_gpus};"
                " use mirrored",
            )
        if strategy == "tpu" and self.num_gpus:
            yield "num_gpus", "distribution_strategy=tpu uses no GPUs; remove num_gpus"

        # Virtual CPUs are for runs on several replicas without accelerators.
        if self.virtual_cpus and self.num_gpus:
            yield "virtual_cpus", "cannot be combined with num_gpus; set one of them"
        if self.virtual_cpus > 1 and self.executor == "single_threaded":
            yield "executor", "single_threaded is for one device, not virtual_cpus; use default"
        if self.virtual_cpus > 1 and strategy not in ("auto", "mirrored"):
            yield (
                "virtual_cpus",
                f"distribution_strategy={strategy} does not split the CPU; use mirrored",
            )
        if self.tpu and strategy not in ("auto", "tpu"):
            yield (
                "tpu",
                f"distribution_strategy={strategy} does not use the TPU {self.tpu!r};"
                " remove it, or use tpu",
            )
        if self.worker_hosts and strategy not in ("auto", "multi_worker_mirrored"):
            yield (
                "worker_hosts",
                f"distribution_strategy={strategy} has no workers; use multi_worker_mirrored",
            )

        hosts = self.worker_hosts.split(",") if self.worker_hosts else []
        if hosts and self.task_index >= len(hosts):
            yield (
                "task_index",
                f"{self.task_index} is not among the {len(hosts)} worker_hosts; they count from 0",
            )

        # The strategy has the all-reduce algorithm. A strategy that sums nothing accepts any.
        all_algorithms = tuple(
            dict.fromkeys(name for names in ALL_REDUCE_ALGORITHMS.values() for name in names)
        )
        algorithms = ("auto", *ALL_REDUCE_ALGORITHMS.get(strategy, all_algorithms))
        if self.all_reduce_alg is not None and self.all_reduce_alg not in algorithms:
            problem = f"{self.all_reduce_alg!r} is not one of distribution_strategy={strategy}"
            yield "all_reduce_alg", f"{problem}; it has: {', '.join(algorithms)}"

        if self.num_packs != 1 and self.all_reduce_alg not in ALL_REDUCE_ALGORITHMS["mirrored"]:
            yield (
                "num_packs",
                "needs all_reduce_alg=nccl or hierarchical_copy; set one of these, or num_packs=1",
            )
        if self.virtual_cpus > 1 and self.all_reduce_alg == "nccl":
            yield (
                "all_reduce_alg",
                "nccl needs GPUs, not virtual_cpus; use hierarchical_copy or auto",
            )
