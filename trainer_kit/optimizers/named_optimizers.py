"""NamedOptimizers: several optimizers, each of which updates separate variables."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.config.schema.optimization import NamedOptimizerConfig
from trainer_kit.errors import UsageError, find_similar_names
from trainer_kit.optimizers import gradients as updates
from trainer_kit.optimizers.gradients import Pair
from trainer_kit.optimizers.per_variable import (
    matches_any,
    similar_paths,
    variable_path,
)
from trainer_kit.runtime.replica_values import native_variable
from trainer_kit.typing import Model, Optimizer, Variable

_LOG = logging.getLogger(__name__)


class NamedOptimizers(Mapping[str, Any]):
    """Optimizers by name. Each gets the gradients of the variables that it owns.

    `apply_gradients` distributes the gradients. A training step may also call one optimizer:
    `trainer_kit.apply_gradients(optimizer["generator"], pairs)`. Created in the scope of the
    strategy. Each optimizer has slots for its own variables only.

    Args:
      optimizers: The optimizers, of Keras 3, not built yet.
      variables_by_optimizer: The variables of each optimizer, by its name.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        variables_by_optimizer: Mapping[str, Sequence[Variable]],
    ) -> None:
        self._optimizers = dict(optimizers)
        self._variables_by_optimizer = {
            name: list(variables_by_optimizer[name]) for name in optimizers
        }
        self._optimizer_names: dict[int, str] = {}
        for name, variables in self._variables_by_optimizer.items():
            for variable in variables:
                self._optimizer_names[_key(variable)] = name

    def __getitem__(self, name: str) -> Any:
        return self._optimizers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def build(self) -> None:
        """Creates the slots of each optimizer for the variables that it owns.

        Runs eagerly, in strategy scope.

        Raises:
          UsageError: when an optimizer is not of Keras 3.
        """
        # Optimizers of tf_keras do not work on models of Keras 3.
        for name, optimizer in self._optimizers.items():
            if not isinstance(optimizer, keras.Optimizer):
                optimizer_class = type(optimizer)
                kind = f"{optimizer_class.__module__}.{optimizer_class.__name__}"
                raise UsageError(
                    f"the optimizer {name!r} is a {kind}; several optimizers with variables of"
                    " their own have to be of Keras 3"
                )
            if not optimizer.built:
                optimizer.build(self._variables_by_optimizer[name])

    def with_optimizers(self, optimizers: Mapping[str, Optimizer]) -> NamedOptimizers:
        """Returns other optimizers for the same variables, such as GradientAccumulators."""
        return NamedOptimizers(optimizers, self._variables_by_optimizer)

    @tf.autograph.experimental.do_not_convert
    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Returns the loss times the smallest loss scale, for a loss that all optimizers lower."""
        scale = self._get_smallest_loss_scale()
        if scale is None:
            return loss
        return tf.cast(loss, tf.float32) * scale

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Sequence[Pair]) -> None:
        """Gives each optimizer the gradients of its variables; runs in a replica.

        Use `trainer_kit.apply_gradients`.
        """
        common_scale = self._get_smallest_loss_scale()

        pairs_by_optimizer: dict[str, list[Pair]] = {}
        for gradient, variable in grads_and_vars:
            owner = self._optimizer_names.get(_key(variable))
            if owner is not None:
                pairs_by_optimizer.setdefault(owner, []).append((gradient, variable))

        for name, pairs in pairs_by_optimizer.items():
            # The loss has the smallest scale, and each optimizer divides by its own scale.
            optimizer = self._optimizers[name]
            if common_scale is not None:
                own_scale = _scale(optimizer)
                factor = (1.0 if own_scale is None else own_scale) / common_scale
                scaled_pairs: list[Pair] = []
                for gradient, variable in pairs:
                    if gradient is not None:
                        gradient = updates.scale_gradient(gradient, factor)
                    scaled_pairs.append((gradient, variable))
                pairs = scaled_pairs
            updates.apply_gradients(optimizer, pairs)

    def _get_smallest_loss_scale(self) -> tf.Tensor | None:
        scales = []
        for optimizer in self._optimizers.values():
            scale = _scale(optimizer)
            if scale is not None:
                scales.append(scale)
        return tf.reduce_min(tf.stack(scales)) if scales else None


def partition_variables(
    names: Iterable[str],
    sections: Mapping[str, NamedOptimizerConfig],
    task_variables: Mapping[str, Sequence[Variable]],
    model: Model,
) -> dict[str, list[Variable]]:
    """Returns the variables that each of several optimizers updates, by its name; runs eagerly.

    The optimizers choose in the order of `names`. Patterns of a section choose among the trainable
    variables that no optimizer before it has. An optimizer without patterns has the variables that
    the task returned for it. Variables that no optimizer has are not trained.

    Args:
      names: The names of the optimizers.
      sections: Their configs by name, with patterns in `variables`. An optimizer that the task
        created has no config here.
      task_variables: The variables that `task.optimizer_variables(model)` returned, by the name of
        the optimizer.
      model: The built model.

    Raises:
      UsageError: when an optimizer has no variables, or a variable has two optimizers.
    """
    names = list(names)
    unknown = sorted(task_variables.keys() - set(names))
    if unknown:
        free_names = [name for name in names if name not in task_variables]
        renames = []
        for name in unknown:
            similar_names = find_similar_names(name, free_names)
            if similar_names:
                renames.append(f"rename {similar_names[0]} to {name}")
        advice = " and ".join(renames) or f"the optimizers are: {', '.join(names)}"
        raise UsageError(
            f"the task's optimizer_variables names {', '.join(unknown)}, which trainer.optimizers"
            f" lacks; {advice}"
        )

    # The variables that no optimizer has yet, and the paths of all, by key.
    free: dict[int, Variable] = {}
    paths: dict[int, str] = {}
    for variable in model.trainable_variables:
        key = _key(variable)
        free[key] = variable
        paths[key] = variable_path(variable)

    owned: dict[str, list[Variable]] = {}
    for name in names:
        patterns = sections[name].variables if name in sections else ()
        if patterns:
            owned[name] = []
            for key, variable in free.items():
                if matches_any(paths[key], patterns):
                    owned[name].append(variable)
        else:
            owned[name] = list(task_variables.get(name, ()))

        if not owned[name]:
            raise UsageError(_describe_missing_variables(name, patterns, paths, owned, model))

        for variable in owned[name]:
            if free.pop(_key(variable), None) is None:
                raise UsageError(_describe_ownership_conflict(name, variable, owned))
    return owned


def log_ownership(
    variables_by_optimizer: Mapping[str, Sequence[Variable]], trainable: Sequence[Variable]
) -> None:
    """Logs how many variables each optimizer updates.

    Warns of trainable variables that no optimizer updates.
    """
    owned_keys: set[int] = set()
    for variables in variables_by_optimizer.values():
        owned_keys.update(_key(variable) for variable in variables)

    unowned = []
    for variable in trainable:
        if _key(variable) not in owned_keys:
            unowned.append(variable_path(variable))
    if unowned:
        _LOG.warning(
            "no optimizer updates these trainable variables, which keep their values: %s",
            ", ".join(unowned),
        )

    counts = []
    for name, variables in variables_by_optimizer.items():
        counts.append(f"{name} {len(variables)}")
    _LOG.info("variables of each optimizer: %s", ", ".join(counts))


def _describe_missing_variables(
    name: str,
    patterns: Sequence[str],
    paths: Mapping[int, str],
    variables_by_optimizer: Mapping[str, Sequence[Variable]],
    model: Model,
) -> str:
    """Returns why an optimizer has no variables, and what to do.

    `paths` are those of the trainable variables.
    """
    section = f"trainer.optimizers.{name}"
    if not patterns:
        return (
            f"{section} has no variables: set {section}.variables to regular expressions of their"
            " paths, or return them from the task's method optimizer_variables"
        )

    matched_keys: set[int] = set()
    for key, path in paths.items():
        if matches_any(path, patterns):
            matched_keys.add(key)
    if matched_keys:
        owners = []
        for owner, variables in variables_by_optimizer.items():
            if any(_key(variable) in matched_keys for variable in variables):
                owners.append(owner)
        verb = "comes" if len(owners) == 1 else "come"
        return (
            f"{section}.variables: {', '.join(owners)}, which {verb} first, already updates all"
            f" variables that match {', '.join(patterns)};"
            f" put {name} before, or change the patterns"
        )

    trainable_paths = list(paths.values())
    near = ", ".join(similar_paths(patterns[0], trainable_paths))
    # A variable that is not trainable is not among `paths`.
    all_paths = [variable_path(variable) for variable in model.variables]
    hint = ""
    if any(matches_any(path, patterns) for path in all_paths):
        hint = " (variables that match are not trainable: see trainer.freeze)"
    return (
        f"{section}.variables: no variable matches {', '.join(patterns)}; similar ones are:"
        f" {near}{hint}"
    )


def _describe_ownership_conflict(
    name: str, variable: Variable, variables_by_optimizer: Mapping[str, Sequence[Variable]]
) -> str:
    key = _key(variable)
    owners = []
    for owner, variables in variables_by_optimizer.items():
        owned_keys = [_key(candidate) for candidate in variables]
        if owner != name and key in owned_keys:
            owners.append(owner)
    path = variable_path(variable)
    if owners:
        return f"two optimizers would update {path}: {owners[0]} and {name}; give it to one of them"
    return (
        f"the variable {path} of the optimizer {name} is none of the model's trainable variables,"
        " or is named twice"
    )


def _scale(optimizer: Optimizer) -> tf.Tensor | None:
    scale = getattr(optimizer, "dynamic_scale", None)
    return None if scale is None else tf.convert_to_tensor(scale)


def _key(variable: Variable) -> int:
    return id(native_variable(variable))
