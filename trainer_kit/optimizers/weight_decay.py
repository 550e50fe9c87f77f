"""Weight decay of the variables whose paths match regular expressions.

Keras matches only the last part of a Keras 3 variable's path ("kernel"), so that a pattern like "layer_norm" finds
nothing. Here patterns are searched in the whole path ("encoder/layer_norm/gamma"), or in the name of a tf.Variable.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from trainer_kit.errors import UsageError

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
                    f"weight decay: {pattern!r} is not a regular expression ({error}); to match it as it is, use "
                    f"{re.escape(pattern)!r}"
                ) from error

    def decays(self, path: str) -> bool:
        """Whether the variable at `path` is decayed."""
        if any(re.search(pattern, path) for pattern in self.include):
            return True
        return self.rest and not any(re.search(pattern, path) for pattern in self.exclude)

    def warn_of_idle_patterns(self, paths: Sequence[str]) -> None:
        """Logs a warning for each pattern that finds none of `paths`; most likely it is misspelt."""
        for pattern in (*self.include, *self.exclude):
            if not any(re.search(pattern, path) for path in paths):
                shown = ", ".join(paths[:8])
                _log.warning("weight decay: the pattern %r matches none of the variables %s", pattern, shown)


def variable_path(variable: Any) -> str:
    """Returns the path of a Keras 3 variable, or the name of a tf.Variable without its ":0"."""
    return str(getattr(variable, "path", None) or variable.name.split(":")[0])


class _DecaysByRule:
    """Applies a DecayRule when the optimizer learns which variables it has.

    Args:
      *args: Arguments of the Keras class.
      decay_rule: The rule for which variables decay; also as a dict, in the form of `get_config`.
      **kwargs: Keyword arguments of the Keras class.
    """

    def __init__(self, *args: Any, decay_rule: DecayRule | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given = decay_rule or {}
        self.decay_rule = given if isinstance(given, DecayRule) else DecayRule(**given)

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables for `variables`; in strategy scope."""
        if not self.built:  # type: ignore[attr-defined]
            paths = [variable_path(variable) for variable in variables]
            decaying = set(filter(self.decay_rule.decays, paths)) if self.weight_decay else set()  # type: ignore[attr-defined]
            kept = [variable for variable, path in zip(variables, paths, strict=True) if path not in decaying]
            self.exclude_from_weight_decay(var_list=kept)  # type: ignore[attr-defined]
            if self.weight_decay:  # type: ignore[attr-defined]
                self.decay_rule.warn_of_idle_patterns(paths)
        super().build(variables)  # type: ignore[misc]

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments."""
        return {**super().get_config(), "decay_rule": dataclasses.asdict(self.decay_rule)}  # type: ignore[misc]


@keras.saving.register_keras_serializable("trainer_kit")
class AdamW(_DecaysByRule, keras.optimizers.AdamW):
    """Keras' AdamW with a rule for which variables decay."""


@keras.saving.register_keras_serializable("trainer_kit")
class Lamb(_DecaysByRule, keras.optimizers.Lamb):
    """Keras' Lamb with a rule for which variables decay.

    Keras decays a weight beside the update; the paper (arXiv 1904.00962) and Model Garden inside it, before the trust
    ratio. They are equal without weight decay.
    """


@keras.saving.register_keras_serializable("trainer_kit")
class Adafactor(_DecaysByRule, keras.optimizers.Adafactor):
    """Keras' Adafactor with a rule for which variables decay, and for variables of tf_keras models too."""

    def build(self, variables: Sequence[Any]) -> None:
        """Creates the optimizer's variables for `variables`; in strategy scope."""
        super().build([_named_for_keras(variable) for variable in variables])


def _named_for_keras(variable: Any) -> Any:
    """Wraps a tf.Variable called "a/b:0", as tf_keras has them: Adafactor names its own after it, and refuses "/"."""
    if isinstance(variable, tf.Variable) and "/" in variable.name:
        return keras.Variable(variable, name=variable_path(variable).replace("/", "_"), trainable=variable.trainable)
    return variable
