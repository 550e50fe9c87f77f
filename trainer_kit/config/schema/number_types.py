"""The kinds of numbers in config classes, and messages about patterns and batch sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitFloat = Annotated[float, Field(ge=0, le=1)]
# A decay of 1 would never change the moving average.
Decay = Annotated[float, Field(ge=0, lt=1)]
PositiveUnitFloat = Annotated[float, Field(gt=0, le=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(ge=1)]
IntFromMinusOne = Annotated[int, Field(ge=-1)]


def find_broken_patterns(field: str, patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the problem of each of a field's patterns that is not a regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            advice = f"to match it as it is, use {re.escape(pattern)!r}"
            yield field, f"{pattern!r} is not a regular expression ({error}); {advice}"


def describe_uneven_batch(batch: int, replicas: int, reason: str = "") -> str:
    """Returns what is wrong with a batch that replicas cannot share equally.

    The text also gives the nearest sizes that can be shared equally.

    Args:
      batch: The number of examples in a global batch.
      replicas: The number of replicas.
      reason: Where the number of replicas comes from, in parentheses after a space.
    """
    rest = batch % replicas
    lower_size = batch - rest
    upper_size = lower_size + replicas
    nearest = [str(size) for size in (lower_size, upper_size) if size]
    problem = f"batch {batch} on {replicas} replicas{reason} leaves {rest} over"
    return f"{problem}; the nearest that can be shared equally: {' or '.join(nearest)}"
