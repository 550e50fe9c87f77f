"""Checks and creates Model Garden's optimizers, their variables and their moving averages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING

import tensorflow as tf
import tf_keras
from official.core.train_utils import create_optimizer as model_gardens
from official.modeling.optimization import ExponentialMovingAverage
from official.modeling.optimization.ema_optimizer import maybe_merge_call

from trainer_kit.compat.model_garden.build_errors import explain_config_errors
from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import find_broken_rules
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.optimization import AVERAGE, EMAConfig
from trainer_kit.errors import ConfigError, Mistake, UsageError
from trainer_kit.optimizers.moving_average import exchange
from trainer_kit.typing import IntLike, Model, Optimizer

if TYPE_CHECKING:
    from official.modeling.multitask.multitask import MultiTask

    from trainer_kit.compat.model_garden.garden_types import (
        ExperimentParams,
        GardenConfig,
        GardenOptimizer,
        GardenTask,
    )


def check_values(task: GardenTask | MultiTask, params: ExperimentParams) -> None:
    """Checks the restrictions, and the number of classes of Model Garden's own tasks.

    Called before anything is built. With zero classes Keras would build a layer that ends the
    process in the first step.

    Args:
      task: A task or a MultiTask of Model Garden.
      params: The experiment's config, Model Garden's or trainer_kit's.

    Raises:
      ConfigError: Names every value that is missing or wrong.
    """
    mistakes = find_broken_rules(params)
    task_config = getattr(task, "task_config", None)
    model_config = getattr(task_config, "model", None)
    is_of_garden = type(task).__module__.startswith("official.")
    if is_of_garden and getattr(model_config, "num_classes", None) == 0:
        mistakes.append(Mistake("task.model.num_classes", "is 0", "give the number of classes"))
    if mistakes:
        raise ConfigError(mistakes)


def create_optimizer(task: GardenTask | MultiTask, params: ExperimentParams) -> GardenOptimizer:
    """Returns the optimizer that `task` creates. Called in strategy scope.

    Args:
      task: A task or a MultiTask of Model Garden.
      params: The experiment's config, Model Garden's or trainer_kit's.

    Raises:
      UsageError: When the optimizer cannot be created from the config.
    """
    optimizer_config = params.trainer.optimizer_config
    if isinstance(params, ExperimentConfig):
        optimizer_config = build_original(optimizer_config)

    # Model Garden's function reads no other values.
    trainer = SimpleNamespace(optimizer_config=optimizer_config)
    sections = SimpleNamespace(task=params.task, trainer=trainer, runtime=params.runtime)
    with explain_config_errors("trainer.optimizer_config"):
        return model_gardens(task, sections)


def create_optimizer_variables(
    optimizer: GardenOptimizer | Optimizer | None, variables: Sequence[tf.Variable]
) -> None:
    """Creates all variables of a Keras 2 optimizer, which would else come in the first step.

    A checkpoint is restored strictly into existing variables, before the first step. Runs eagerly,
    in strategy scope.

    Args:
      optimizer: A Keras 2 optimizer, legacy or not, wrapped for loss scaling or not. Others are
        left unchanged.
      variables: The variables that the optimizer will train.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, tf_keras.optimizers.legacy.Optimizer):
        inner._create_all_weights(variables)
    elif isinstance(inner, tf_keras.optimizers.Optimizer):
        inner.build(variables)


def find_averaging_optimizer(
    optimizer: GardenOptimizer | Optimizer | None,
) -> ExponentialMovingAverage | None:
    """Returns the ExponentialMovingAverage that `optimizer` is or, for float16, wraps.

    None for other optimizers.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(inner, ExponentialMovingAverage):
        return inner
    return None


def check_single_average(section: TrainerConfig | GardenConfig) -> None:
    """Checks that a config asks for one average, since Model Garden's optimizer keeps one.

    Args:
      section: The section trainer of a config of either framework.

    Raises:
      UsageError: When it asks for several averages.
    """
    optimizer_config = getattr(section, "optimizer_config", None)
    ema = getattr(optimizer_config, "ema", None)
    if not isinstance(ema, EMAConfig):
        return

    if ema.more_decays or ema.evaluate != (AVERAGE,):
        raise UsageError(
            "trainer.optimizer_config.ema: the optimizer of a Model Garden task keeps one average,"
            " which evaluations use; remove more_decays and evaluate"
        )


class _LossScaledMovingAverage(ExponentialMovingAverage):
    """ExponentialMovingAverage that accepts the extra argument that a loss-scale wrapper passes."""

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> tf.Operation:
        """Applies gradients and moves the averages. Called in replica context."""
        result = self._optimizer.apply_gradients(
            grads_and_vars,
            name,
            experimental_aggregate_gradients=experimental_aggregate_gradients,
        )
        maybe_merge_call(self.update_average, tf.distribute.get_strategy())
        return result


class OptimizerAverages:
    """The averages of an optimizer that averages the weights itself, for evaluations.

    Model Garden swaps by adding and subtracting, which changes last bits of the weights. This class
    exchanges values. Created in strategy scope.

    Args:
      optimizer: An ExponentialMovingAverage, wrapped for loss scaling or not.
      model: The built model whose weights are averaged.
    """

    names = (AVERAGE,)
    weights_to_evaluate = (AVERAGE,)
    more_variables = MappingProxyType[str, tf.Variable]({})

    # The section of a checkpoint that contains the averages. They are slots of the optimizer.
    section = "optimizer"
    more_section = "more_averages"

    def __init__(self, optimizer: GardenOptimizer, model: Model) -> None:
        inner = find_averaging_optimizer(optimizer)
        assert inner is not None, "the optimizer does not average"
        # A loss-scale wrapper passes an argument that Model Garden's method does not take.
        if type(inner) is ExponentialMovingAverage and inner is not optimizer:
            inner.__class__ = _LossScaledMovingAverage
        if not inner.has_shadow_copy:
            inner.shadow_copy(model)

        self.variables = optimizer
        self._averages = list(inner._average_weights)
        self._weights = list(inner._model_weights)
        self._strategy = tf.distribute.get_strategy()
        self._swapped = ""
        self._exchange_function = tf.function(self._swap_average_and_weights, autograph=False)
        self._copy_function = tf.function(self._set_average_to_weights, autograph=False)

    @property
    def active_average(self) -> str:
        """The name "average" while the model contains the averages, and the optimizer the weights.

        Otherwise "".
        """
        return self._swapped

    def update(self, step: IntLike) -> None:
        """Does nothing: the optimizer averages as it applies gradients."""

    def initialize(self) -> None:
        """Does nothing: Model Garden's average begins at zero."""

    def reset(self, names: Sequence[str] | None = None, keys: Sequence[str] | None = None) -> None:
        """Sets all averages to the weights, for example after only weights were restored.

        Runs eagerly, on the host.
        """
        self._copy_function()

    def swap(self, name: str = AVERAGE) -> None:
        """Exchanges weights and averages exactly on every replica. A second call undoes it.

        Runs eagerly, on the host.
        """
        self._exchange_function()
        self._swapped = "" if self._swapped else name

    def _swap_average_and_weights(self) -> None:
        exchange(self._strategy, self._averages, self._weights)

    def _set_average_to_weights(self) -> None:
        update = self._strategy.extended.update
        with self._strategy.scope():
            for average, weight in zip(self._averages, self._weights, strict=True):
                update(average, lambda target, value: target.assign(value), args=(weight,))
