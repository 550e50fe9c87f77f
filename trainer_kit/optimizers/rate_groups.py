"""Learning rates for groups of variables, with any optimizer of Keras 3.

The rate that `update_step` gets for a variable is multiplied, not the gradient: Adam and its
relatives divide by the size of gradients, so that a factor of a gradient cancels out. Weight decay
is multiplied too, because it is a share of the learning rate. So a group trains as with a separate
optimizer at that rate. Clipping looks at all variables together, as without groups.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Sequence

import keras

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.per_variable import (
    PerVariable,
    is_found,
    similar_paths,
    variable_path,
)
from trainer_kit.optimizers.weight_decay import DecayRuleMixin, apply_weight_decay
from trainer_kit.runtime.keras_internals import uses_weight_decay
from trainer_kit.typing import FloatLike, Variable

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RateGroups:
    """The factors of learning rates, by patterns of paths.

    Of each list the first pattern that matches counts.

    Attributes:
      multipliers: Patterns and factors.
      layers: Patterns of layers and their factors. A variable that is in both lists has the product
        of both.
    """

    multipliers: tuple[tuple[str, float], ...] = ()
    layers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_config(cls, config: OptimizationConfig) -> RateGroups:
        """Returns the groups that the config describes."""
        multipliers = tuple(
            (section.variables, section.multiplier) for section in config.learning_rate_multipliers
        )
        layer_decay = config.layer_decay
        if layer_decay is None:
            return cls(multipliers)

        # The last layer has the full rate.
        layers = []
        last = len(layer_decay.layers) - 1
        for index, name in enumerate(layer_decay.layers):
            distance = last - index
            layers.append((name, layer_decay.decay**distance))
        return cls(multipliers, tuple(layers))

    @property
    def is_active(self) -> bool:
        """Whether any group is configured."""
        return bool(self.multipliers or self.layers)

    def factor(self, path: str) -> float:
        """Returns the factor of the learning rate of the variable at `path`."""
        _, multiplier = _find_first_match(self.multipliers, path)
        _, layer_factor = _find_first_match(self.layers, path)
        return multiplier * layer_factor

    def warn_about_unused_patterns(self, paths: Sequence[str]) -> None:
        """Logs a warning for each pattern that counts for none of `paths`; it may be misspelt."""
        for patterns in (self.multipliers, self.layers):
            used_patterns = set()
            for path in paths:
                used_pattern, _ = _find_first_match(patterns, path)
                used_patterns.add(used_pattern)
            for pattern, _ in patterns:
                if pattern not in used_patterns:
                    _warn(pattern, paths)


def apply_rate_groups(optimizer: keras.Optimizer, groups: RateGroups) -> keras.Optimizer:
    """Gives groups of variables separate learning rates, in an optimizer that is not built yet.

    Returns:
      The same object. With groups, it gets a new class: a subclass of the one it had, with another
      `build` and `update_step`.
    """
    if groups.is_active:
        base = type(optimizer)
        # The optimizer may be of any class, also of one that a user has registered.
        optimizer.__class__ = type(base.__name__, (_RateGroupsMixin, base), {})
        optimizer.rate_groups = groups
    return optimizer


class _RateGroupsMixin:
    """Replaces the learning rate of each variable, for its update and its weight decay.

    Keras would apply the weight decay of all variables at one rate.
    """

    built: bool
    weight_decay: float | None
    rate_groups: RateGroups

    def build(self, variables: Sequence[Variable]) -> None:
        if self.built:
            return

        # Keras decays the variables unless a DecayRuleMixin does. Its decay is applied here.
        keras_decay = 0.0 if isinstance(self, DecayRuleMixin) else self.weight_decay or 0.0
        decay_rates = []
        for variable in variables:
            is_decayed = keras_decay and uses_weight_decay(self, variable)
            decay_rates.append(keras_decay if is_decayed else 0.0)
        if keras_decay:
            self.exclude_from_weight_decay(var_list=list(variables))  # type: ignore[attr-defined]
        super().build(variables)  # type: ignore[misc]

        paths = [variable_path(variable) for variable in variables]
        factors = [self.rate_groups.factor(path) for path in paths]
        self.applied_decay_rates = PerVariable(tuple(decay_rates))
        self.rate_factors = PerVariable(tuple(factors))

        self.rate_groups.warn_about_unused_patterns(paths)
        factor_counts = sorted(Counter(factors).items())
        counts = [f"{factor:g} times for {count}" for factor, count in factor_counts]
        text = ", ".join(counts)
        _LOG.info("learning rates: %s of %s variables", text, len(paths))

    def update_step(self, gradient: Gradient, variable: Variable, learning_rate: FloatLike) -> None:
        factor = self.rate_factors.get_value(self, variable)
        # Not even slots change. FTRL divides by the learning rate.
        if factor == 0.0:
            return
        if factor != 1.0:
            learning_rate = learning_rate * factor

        decay_rate = self.applied_decay_rates.get_value(self, variable)
        apply_weight_decay(variable, decay_rate, learning_rate)
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


def _find_first_match(patterns: Sequence[tuple[str, float]], path: str) -> tuple[str | None, float]:
    """Returns the first pattern that matches `path`, with its factor; else None and 1."""
    for pattern, factor in patterns:
        if re.search(pattern, path):
            return pattern, factor
    return None, 1.0


def _warn(pattern: str, paths: Sequence[str]) -> None:
    if is_found(pattern, paths):
        _LOG.warning(
            "learning rates: all variables of the pattern %r are those of patterns before it",
            pattern,
        )
    else:
        near = ", ".join(similar_paths(pattern, paths))
        _LOG.warning(
            "learning rates: the pattern %r matches no variable; there are: %s", pattern, near
        )
