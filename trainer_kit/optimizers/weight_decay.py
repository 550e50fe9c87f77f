"""Weight decay of the variables whose paths match regular expressions.

Keras matches only the last part of a Keras 3 variable's path ("kernel"), so that a pattern like
"layer_norm" finds nothing. Here patterns are searched in the whole path
("encoder/layer_norm/gamma"), or in the name of a tf.Variable.

Keras decays all variables at the learning rate of the optimizer. Here a variable is decayed in its
`update_step`, at the learning rate of that call: the groups of rate_groups.py have separate rates.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Sequence
from typing import Any, TypedDict

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.gradients import Gradient
from trainer_kit.optimizers.per_variable import PerVariable, is_found, matches_any, variable_path
from trainer_kit.typing import FloatLike, Variable

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecayRule:
    """Which variables decay.

    Attributes:
      include: Regular expressions. A variable that any of these matches is decayed, even if
        excluded.
      exclude: Regular expressions. A variable that any of these matches is not decayed.
      rest: Whether a variable that no pattern matches is decayed.

    Raises:
      UsageError: when a pattern is not a regular expression.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rest: bool = True

    def __post_init__(self) -> None:
        for pattern in (*self.include, *self.exclude):
            try:
                re.compile(pattern)
            except re.error as error:
                raise UsageError(
                    f"weight decay: {pattern!r} is not a regular expression ({error}); to match it"
                    f" as it is, use {re.escape(pattern)!r}"
                ) from error

    def applies_to(self, path: str) -> bool:
        """Whether the variable at `path` is decayed."""
        if matches_any(path, self.include):
            return True
        return self.rest and not matches_any(path, self.exclude)

    def warn_about_unused_patterns(
        self, paths: Sequence[str], subject: str = "weight decay"
    ) -> None:
        """Logs a warning for each pattern that matches none of `paths`; it may be misspelt."""
        for pattern in (*self.include, *self.exclude):
            if not is_found(pattern, paths):
                _LOG.warning(
                    "%s: the pattern %r matches none of the variables %s",
                    subject,
                    pattern,
                    ", ".join(paths[:8]),
                )


class DecayRuleFields(TypedDict, total=False):
    """A DecayRule in the form of `get_config`."""

    include: tuple[str, ...]
    exclude: tuple[str, ...]
    rest: bool


class DecayRuleMixin:
    """A base of optimizers that decides which variables decay, and by how much.

    Keras itself decays none of the variables.

    Args:
      *args: Arguments of the Keras class.
      decay_rule: The rule for which variables decay. Also as a dict, in the form of `get_config`.
      **kwargs: Keyword arguments of the Keras class.
    """

    def __init__(
        self, *args: Any, decay_rule: DecayRule | DecayRuleFields | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(decay_rule, DecayRule):
            decay_rule = DecayRule(**(decay_rule or {}))
        self.decay_rule = decay_rule

    def build(self, variables: Sequence[Variable]) -> None:
        """Creates the optimizer's variables for `variables`; called in strategy scope."""
        if self.built:  # type: ignore[attr-defined]
            return

        # Keras excludes variables only before it has built them.
        self.exclude_from_weight_decay(var_list=list(variables))  # type: ignore[attr-defined]
        super().build(variables)  # type: ignore[misc]

        paths = [variable_path(variable) for variable in variables]
        all_rates = []
        rates = []
        for index, path in enumerate(paths):
            rate = self.get_decay_rate(index)
            all_rates.append(rate)
            rates.append(rate if self.decay_rule.applies_to(path) else 0.0)
        self.decay_rates = PerVariable(tuple(rates))

        # Without weight decay the patterns mean nothing.
        if any(all_rates):
            self.decay_rule.warn_about_unused_patterns(paths)

    def get_decay_rate(self, index: int) -> float:
        """Returns the weight decay of the variable at `index`, if the rule says that it decays.

        Called after `build`.
        """
        return float(self.weight_decay or 0.0)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        decay_rule = dataclasses.asdict(self.decay_rule)
        return {**super().get_config(), "decay_rule": decay_rule}  # type: ignore[misc]


class DecoupledDecayMixin(DecayRuleMixin):
    """A base of optimizers that decays a weight before its update.

    The decay is weight decay * learning rate * weight.
    """

    def update_step(self, gradient: Gradient, variable: Variable, learning_rate: FloatLike) -> None:
        """Decays and updates one variable.

        Runs on each replica, with gradients that are summed over replicas.
        """
        rate = self.decay_rates.get_value(self, variable)
        apply_weight_decay(variable, rate, learning_rate)
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


def apply_weight_decay(variable: Variable, rate: float, learning_rate: FloatLike) -> None:
    """Subtracts rate * learning_rate * weight from a weight; with a rate of 0 it does nothing."""
    if rate:
        dtype = variable.dtype
        decayed = variable * tf.cast(rate, dtype)
        variable.assign_sub(decayed * tf.cast(learning_rate, dtype))
