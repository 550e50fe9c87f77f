"""Weight decay of the variables whose paths match regular expressions.

Keras matches only the last part of a Keras 3 variable's path ("kernel"), so that a pattern like
"layer_norm" finds nothing. Here patterns are searched in the whole path
("encoder/layer_norm/gamma"), or in the name of a tf.Variable.

Keras decays all variables at the learning rate of the optimizer. Here a variable is decayed in its
`update_step`, at the learning rate that this gets: the groups of rate_groups.py have rates of their
own.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.optimizers.per_variable import PerVariable, variable_path

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DecayRule:
    """Which variables decay.

    Attributes:
      include: regular expressions; a variable that one of them finds is decayed, even if excluded.
      exclude: regular expressions; a variable that one of them finds is not decayed.
      rest: whether a variable that none of them finds is decayed.

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
        if any(re.search(pattern, path) for pattern in self.include):
            return True
        return self.rest and not any(re.search(pattern, path) for pattern in self.exclude)

    def warn_about_unused_patterns(
        self, paths: Sequence[str], subject: str = "weight decay"
    ) -> None:
        """Logs a warning for each pattern that finds none of `paths`; most likely it is misspelt."""
        for pattern in (*self.include, *self.exclude):
            if not any(re.search(pattern, path) for path in paths):
                shown = ", ".join(paths[:8])
                _log.warning(
                    "%s: the pattern %r matches none of the variables %s", subject, pattern, shown
                )


class DecayRuleMixin:
    """A base of optimizers that finds out which variables decay, and by how much. Keras itself decays none of them.

    Args:
      *args: Arguments of the Keras class.
      decay_rule: The rule for which variables decay; also as a dict, in the form of `get_config`.
      **kwargs: Keyword arguments of the Keras class.
    """

    def __init__(
        self, *args: Any, decay_rule: DecayRule | Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        given = decay_rule or {}
        self.decay_rule = given if isinstance(given, DecayRule) else DecayRule(**given)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables for `variables`; called in strategy scope."""
        if self.built:  # type: ignore[attr-defined]
            return
        self.exclude_from_weight_decay(var_list=list(variables))  # type: ignore[attr-defined]
        super().build(variables)  # type: ignore[misc]
        paths = [variable_path(variable) for variable in variables]
        rates = [
            self.get_decay_rate(i) if self.decay_rule.applies_to(path) else 0.0
            for i, path in enumerate(paths)
        ]
        self.decay_rates = PerVariable(tuple(rates))
        if any(self.get_decay_rate(i) for i in range(len(paths))):
            self.decay_rule.warn_about_unused_patterns(paths)

    def get_decay_rate(self, index: int) -> float:
        """Returns the weight decay of the variable at `index`, if the rule says that it decays; after `build`."""
        return float(self.weight_decay or 0.0)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "decay_rule": dataclasses.asdict(self.decay_rule)}  # type: ignore[misc]


class DecoupledDecayMixin(DecayRuleMixin):
    """A base of optimizers that subtracts weight decay * learning rate * weight from a weight before its update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Decays and updates one variable; on each replica, with gradients that are summed over them."""
        apply_weight_decay(variable, self.decay_rates.get_value(self, variable), learning_rate)
        super().update_step(gradient, variable, learning_rate)  # type: ignore[misc]


def apply_weight_decay(variable: Any, rate: float, learning_rate: Any) -> None:
    """Subtracts rate * learning_rate * weight from a weight; with a rate of 0 it does nothing."""
    if rate:
        variable.assign_sub(
            variable * tf.cast(rate, variable.dtype) * tf.cast(learning_rate, variable.dtype)
        )
