"""Creates the optimizer of a task, or several by name, and gives each the variables that it updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_kit.config.schema.optimization import EMAConfig
from trainer_kit.errors import UsageError
from trainer_kit.optimizers.factory import build_optimizers
from trainer_kit.optimizers.moving_average import MovingAverage, averaged_variables, create_average
from trainer_kit.optimizers.named_optimizers import NamedOptimizers, log_ownership, owned_variables
from trainer_kit.optimizers.per_variable import native_variable
from trainer_kit.optimizers.periodic import PeriodicOptimizer


def create_optimizers(task: Any, options: Any, runtime: Any) -> Any:
    """Returns the task's optimizer, or a dict of those that `trainer.optimizers` names; called in strategy scope.

    Args:
      task: The task, whose create_optimizer makes each optimizer.
      options: The section trainer of the config.
      runtime: The section runtime of the config.
    """
    sections = _sections(options)
    if not sections:
        return task.create_optimizer(options.optimizer_config, runtime)
    made = {}
    for name, section in sections.items():
        own = runtime if section.loss_scale is None else runtime.replace(loss_scale=section.loss_scale)
        optimizer = task.create_optimizer(section, own)
        if isinstance(optimizer, Mapping):
            raise UsageError(
                f"{type(task).__name__}.create_optimizer returns several optimizers, and it is called for each of "
                "trainer.optimizers; return one, or remove trainer.optimizers"
            )
        if section.period > 1:
            optimizer = PeriodicOptimizer(optimizer, section.period, section.accumulate)
        made[name] = optimizer
    return made


def built_optimizers(optimizer: Any, options: Any, task: Any, model: Any) -> Any:
    """Creates the slots of an optimizer, or of several, each for its own variables; called in strategy scope.

    Several get variables of their own if the config or the task's `optimizer_variables` says which. Otherwise each
    has slots for all trainable variables, and the task's step decides.

    Args:
      optimizer: The optimizer, a dict of optimizers, or None.
      options: The section trainer of the config.
      task: The task.
      model: The built model.

    Returns:
      The optimizer, or NamedOptimizers in place of a dict.

    Raises:
      UsageError: when an optimizer has no variables, or a variable has two optimizers.
    """
    given = _given(task, model) if optimizer is not None else {}
    if isinstance(optimizer, Mapping) and (given or _sections(options)):
        owned = owned_variables(optimizer, _sections(options), given, model)
        several = NamedOptimizers(optimizer, owned)
        several.build()
        log_ownership(owned, model.trainable_variables)
        return several
    if given:
        raise UsageError(
            f"{type(task).__name__}.optimizer_variables names the variables of {', '.join(given)}, and there is one "
            "optimizer; configure each of them in trainer.optimizers"
        )
    build_optimizers(optimizer, model.trainable_variables)
    return optimizer


def moving_average(options: Any, task: Any, model: Any, trainable: Sequence[Any] = ()) -> MovingAverage | None:
    """Returns the moving average of the weights, or of each of several optimizers' variables; called in strategy scope.

    Args:
      options: The section trainer of the config.
      task: The task.
      model: The built model.
      trainable: The variables that were trainable before some were frozen, for the keys in checkpoints; empty: none
        were.

    Returns:
      The average; None where the config asks for none.
    """
    sections = _sections(options)
    if averaged := {name: one.ema for name, one in sections.items() if one.ema is not None}:
        owned = owned_variables(sections, sections, _given(task, model), model)
        configs = {id(native_variable(variable)): ema for name, ema in averaged.items() for variable in owned[name]}
        variables = averaged_variables(model, EMAConfig(), trainable)
        return MovingAverage(variables, [configs.get(id(native_variable(variable))) for variable in variables])
    return create_average(model, options.optimizer_config.ema, trainable)


def _sections(options: Any) -> dict[str, Any]:
    return dict(getattr(options, "optimizers", None) or {})


def _given(task: Any, model: Any) -> dict[str, Any]:
    method = getattr(task, "optimizer_variables", None)
    return {} if method is None else dict(method(model))
