"""The kinds of numbers in the sections of optimizers, schedules and warm-ups."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Rate = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a moving average, which 1 would never change
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
Above0 = Annotated[float, Field(gt=0)]
Steps = Annotated[int, Field(ge=0)]
SomeSteps = Annotated[int, Field(ge=1)]
