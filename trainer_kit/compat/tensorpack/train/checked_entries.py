"""Checks at the places where a program enters Tensorpack, and classes that the door refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import trainer_kit.compat.tensorpack.callbacks.prof as prof
import trainer_kit.compat.tensorpack.graph_builder.training as training
import trainer_kit.compat.tensorpack.models.batch_norm as batch_norm
import trainer_kit.compat.tensorpack.predict.dataset as predict_dataset
import trainer_kit.compat.tensorpack.train.interface as interface
import trainer_kit.compat.tensorpack.train.trainers as trainers
from trainer_kit.compat.tensorpack.callbacks.inference_runner import (
    DataParallelInferenceRunner,
    InferenceRunner,
)
from trainer_kit.compat.tensorpack.input_source.input_source import FeedfreeInput
from trainer_kit.compat.tensorpack.program_errors import (
    ProgramError,
    explain_assertions,
    name_user_line,
)
from trainer_kit.compat.tensorpack.tfutils.tower import (
    BaseTowerContext,
    TowerFunc,
    TrainTowerContext,
    get_current_tower_context,
)
from trainer_kit.compat.tensorpack.train.config import AutoResumeTrainConfig, TrainConfig
from trainer_kit.compat.tensorpack.train.model_desc import ModelDesc, ModelDescBase
from trainer_kit.compat.tensorpack.train.tower import SingleCostTrainer, TowerTrainer
from trainer_kit.errors import UsageError

_OTHER_PROCESSES = "the engine trains all towers in step and in one process"
_REPLICATED = f"{_OTHER_PROCESSES}; use SyncMultiGPUTrainerReplicated(number of GPUs)"
_PARAMETER_SERVER = f"{_OTHER_PROCESSES}; use SyncMultiGPUTrainerParameterServer(number of GPUs)"
_PROFILER = "there is no session to profile; use tf.profiler.experimental of TensorFlow 2"
_MEMORY = "there is no session; use tf.config.experimental.get_memory_info of TensorFlow 2"
_FORKS = "it forks a process in which TensorFlow 2 runs; use SimpleDatasetPredictor"

# Classes by module, with the reason and what to use in their place.
_REFUSED = (
    (trainers, "HorovodTrainer", _REPLICATED),
    (trainers, "BytePSTrainer", _REPLICATED),
    (trainers, "AsyncMultiGPUTrainer", _PARAMETER_SERVER),
    (trainers, "DistributedTrainerBase", _REPLICATED),
    (trainers, "DistributedTrainerParameterServer", _PARAMETER_SERVER),
    (trainers, "DistributedTrainerReplicated", _REPLICATED),
    (prof, "GraphProfiler", _PROFILER),
    (prof, "PeakMemoryTracker", _MEMORY),
    (predict_dataset, "MultiProcessDatasetPredictor", _FORKS),
)

_ENTRIES = (
    (interface, "launch_train_with_config"),
    (InferenceRunner, "__init__"),
    (DataParallelInferenceRunner, "__init__"),
    (ModelDescBase, "get_input_signature"),
    (ModelDesc, "get_optimizer"),
    (TrainConfig, "__init__"),
    (BaseTowerContext, "__init__"),
    (BaseTowerContext, "__enter__"),
    (BaseTowerContext, "__exit__"),
    (TrainTowerContext, "__init__"),
    (TowerFunc, "__call__"),
    (TowerTrainer, "_set_tower_func"),
    (TowerTrainer, "get_predictor"),
    (SingleCostTrainer, "setup_graph"),
)


def refuse(owner: Any, name: str, reason: str) -> None:
    """Has the constructor of a class raise UsageError.

    Args:
      owner: The module of the class.
      name: The name of the class.
      reason: Why it is refused, and what to use in its place.
    """

    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        raise ProgramError(f"{name} is not supported: {reason}")

    getattr(owner, name).__init__ = __init__


def check_cost(get_cost: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that builds the cost of a tower, and checks that it is a scalar."""
    if isinstance(get_cost, TowerFunc):
        return get_cost

    @functools.wraps(get_cost)
    def build_cost(*inputs: tf.Tensor) -> Any:
        cost = get_cost(*inputs)
        context = get_current_tower_context()
        if context is None or not context.is_training:
            return cost
        name = getattr(get_cost, "__qualname__", "the tower function")
        if not isinstance(cost, tf.Tensor):
            message = f"{name} returned {cost!r:.60}; return the cost, a scalar tensor"
            raise ProgramError(message)
        if cost.shape.rank != 0:
            message = (
                f"{name} returned the cost {cost.op.name!r} of shape {cost.shape}; return a scalar,"
                " such as tf.reduce_mean(cost)"
            )
            raise UsageError(name_user_line(message, cost.op.traceback))
        return cost

    return build_cost


def allreduce_grads(all_grads: Sequence[Any], average: bool, mode: str = "nccl") -> list[Any]:
    """Returns the sums or means of gradients over towers, for each tower. Called in graph."""
    return [training.allreduce_grads_naive(all_grads, None, average)] * len(all_grads)


def compute_synchronized_moments(
    inputs: tf.Tensor, red_axis: Sequence[int], sync_statistics: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance of the only tower. Called in graph.

    Raises:
      UsageError: When there are several towers.
    """
    context = get_current_tower_context()
    if context.total > 1:
        message = (
            f"BatchNorm(sync_statistics={sync_statistics!r}) needs {context.total} towers at once;"
            " leave it out, and each tower has its own statistics"
        )
        raise ProgramError(message)
    return tf.nn.moments(inputs, red_axis)


def get_towers(self: Any) -> Any:
    """Is the property TowerTrainer.towers.

    Raises:
      UsageError: When the trainer has no towers yet.
    """
    if self.tower_func is None:
        message = (
            f"{type(self).__name__} has no towers yet; call setup_graph, or set tower_func and"
            " call it in a TowerContext"
        )
        raise ProgramError(message)
    return self.tower_func.towers


def check_entries() -> None:
    """Adds the checks to the installed package. Called once."""
    for owner, name, reason in _REFUSED:
        refuse(owner, name, reason)
    for owner, name in _ENTRIES:
        setattr(owner, name, explain_assertions(getattr(owner, name)))
    training.allreduce_grads = allreduce_grads
    batch_norm.get_sync_bn_mean_var = compute_synchronized_moments
    AutoResumeTrainConfig.__init__ = create_resumed_config
    _check_setup(SingleCostTrainer)
    _check_length(TrainConfig)
    TowerTrainer.towers = property(get_towers, doc=TowerTrainer.towers.__doc__)


def _check_setup(trainer_class: Any) -> None:
    setup_graph = trainer_class.setup_graph

    @functools.wraps(setup_graph)
    def checked_setup_graph(
        self: Any, input_signature: Any, input: Any, get_cost_fn: Any, get_opt_fn: Any
    ) -> Any:
        if len(getattr(self, "devices", ())) > 1 and not isinstance(input, FeedfreeInput):
            message = (
                f"{type(input).__name__} gives all towers the same datapoint; use a QueueInput,"
                " which gives each its own"
            )
            raise ProgramError(message)
        return setup_graph(self, input_signature, input, check_cost(get_cost_fn), get_opt_fn)

    trainer_class.setup_graph = checked_setup_graph


def create_resumed_config(self: Any, always_resume: bool = True, **options: Any) -> None:
    """Is the constructor of AutoResumeTrainConfig: the engine resumes the run itself."""
    TrainConfig.__init__(self, **options)


def _check_length(config_class: Any) -> None:
    create = config_class.__init__

    @functools.wraps(create)
    def checked_init(self: Any, *arguments: Any, **options: Any) -> None:
        try:
            create(self, *arguments, **options)
        except NotImplementedError as error:
            message = (
                "TrainConfig has no steps_per_epoch, and its data has no length; give one of them"
            )
            raise ProgramError(message) from error

    config_class.__init__ = checked_init
