"""Configs of learning rates for groups of variables: multipliers by patterns, and layer-wise decay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.number_types import PositiveFraction, Rate


@configclass
class RateMultiplierConfig(Config):
    """A learning rate for some variables, as a multiple of the learning rate.

    Attributes:
      variables: A regular expression that is searched in the path of a variable, such as encoder/layer_0/kernel.
      multiplier: The factor of the learning rate of these variables; 0 leaves them and their slots as they are.
    """

    variables: str
    multiplier: Rate

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that `variables` is a regular expression."""
        yield from broken_patterns("variables", [self.variables])


@configclass
class LayerDecayConfig(Config):
    """Learning rates that become smaller from the output of a model to its input (layer-wise decay).

    A variable of layers[i] of n layers has the learning rate times decay ** (n - 1 - i).

    Attributes:
      decay: The factor of the learning rate from one layer to the layer before it.
      layers: Regular expressions of the variables of each layer, ordered from input to output. Each is searched in the
        path of a variable, and the first one that is found counts; variables of no layer keep their learning rate.
    """

    decay: PositiveFraction
    layers: tuple[str, ...]

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are layers, and that they are regular expressions."""
        if not self.layers:
            yield "layers", "is empty; list the patterns of the layers from input to output"
        yield from broken_patterns("layers", self.layers)


def broken_patterns(field: str, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the problem of each of a field's patterns that is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            advice = f"to match it as it is, use {re.escape(pattern)!r}"
            yield field, f"{pattern!r} is not a regular expression ({error}); {advice}"
