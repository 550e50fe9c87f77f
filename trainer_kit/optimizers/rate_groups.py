"""Learning rates for groups of variables, with any optimizer of Keras 3.

The rate that `update_step` gets for a variable is multiplied, not the gradient: Adam and its
relatives divide by the size of gradients, so that a factor of a gradient cancels out. Weight decay
is multiplied too, because it is a share of the learning rate; so a group trains as with an
optimizer of its own at that rate. Clipping looks at all variables together, as without groups.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras

from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.optimizers.per_variable import PerVariable, similar_paths, variable_path
from trainer_kit.optimizers.weight_decay import DecayRuleMixin, apply_weight_decay
from trainer_kit.runtime.keras_internals import uses_weight_decay

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class RateGroups:
    """The factors of learning rates, by patterns of paths. Of each list the first pattern that is found counts.

    Attributes:
      multipliers: Patterns and factors.
      layers: Patterns of layers and their factors; a variable that is in both lists has the product
        of both.
    """

    multipliers: tuple[tuple[str, float], ...] = ()
    layers: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_config(cls, config: OptimizationConfig) -> RateGroups:
        """Returns the groups that the config describes."""
        multipliers = tuple(
            (one.variables, one.multiplier) for one in config.learning_rate_multipliers
        )
        chosen = config.layer_decay
        if chosen is None:
            return cls(multipliers)
        last = len(chosen.layers) - 1
        return cls(
            multipliers,
            tuple((name, chosen.decay ** (last - i)) for i, name in enumerate(chosen.layers)),
        )

    @property
    def is_active(self) -> bool:
        """Whether there is any group."""
        return bool(self.multipliers or self.layers)

    def factor(self, path: str) -> float:
        """Returns the factor of the learning rate of the variable at `path`."""
        return (
            _find_first_match(self.multipliers, path)[1] * _find_first_match(self.layers, path)[1]
        )

    def warn_about_unused_patterns(self, paths: Sequence[str]) -> None:
        """Logs a warning for each pattern that counts for none of `paths`; most likely it is misspelt."""
        for patterns in (self.multipliers, self.layers):
            counting = {_find_first_match(patterns, path)[0] for path in paths}
            for pattern, _ in patterns:
                if pattern not in counting:
                    _warn(pattern, paths)


def apply_rate_groups(optimizer: keras.Optimizer, groups: RateGroups) -> keras.Optimizer:
    """Gives groups of variables learning rates of their own, in an optimizer that is not built yet.

    Returns:
      The same object. With groups, it gets a new class: a subclass of the one it had, with another
      `build` and `update_step`.
    """
    if groups.is_active:
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_RateGroupsMixin, kind), {})
        optimizer.rate_groups = groups
    return optimizer


class _RateGroupsMixin:
    """Replaces the learning rate of each variable, and applies the weight decay that Keras would apply at one rate."""

    built: bool
    weight_decay: float | None
    rate_groups: RateGroups

    def build(self, variables: Sequence[Any]) -> None:
        if self.built:
            return
        by_keras = 0.0 if isinstance(self, DecayRuleMixin) else self.weight_decay or 0.0
        decays = [
            by_keras if by_keras and uses_weight_decay(self, one) else 0.0 for one in variables
        ]
        if by_keras:
            self.exclude_from_weight_decay(var_list=list(variables))  # type: ignore[attr-defined]
        super().build(variables)  # type: ignore[misc]
        paths = [variable_path(variable) for variable in variables]
        factors = [self.rate_groups.factor(path) for path in paths]
        self.applied_decay_rates = PerVariable(tuple(decays))
        self.rate_factors = PerVariable(tuple(factors))
        self.rate_groups.warn_about_unused_patterns(paths)
        counts = [
            f"{factor:g} times for {count}" for factor, count in sorted(Counter(factors).items())
        ]
        _log.info("learning rates: %s of %s variables", ", ".join(counts), len(paths))

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        factor = self.rate_factors.get_value(self, variable)
        if factor == 0.0:
            return  # not even slots change; and FTRL divides by the learning rate
        if factor != 1.0:
            learning_rate = learning_rate * factor
        apply_weight_decay(
            variable, self.applied_decay_rates.get_value(self, variable), learning_rate
        )
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


def _find_first_match(patterns: Sequence[tuple[str, float]], path: str) -> tuple[str | None, float]:
    """Returns the first pattern that is found in `path`, with its factor; without one the factor is 1."""
    return next((one for one in patterns if re.search(one[0], path)), (None, 1.0))


def _warn(pattern: str, paths: Sequence[str]) -> None:
    if any(re.search(pattern, path) for path in paths):
        _log.warning(
            "learning rates: all variables of the pattern %r are those of patterns before it",
            pattern,
        )
    else:
        near = ", ".join(similar_paths(pattern, paths))
        _log.warning(
            "learning rates: the pattern %r matches no variable; there are: %s", pattern, near
        )
