"""Config of the alarm for gradient norms."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.number_types import PositiveFraction, SomeSteps


@configclass
class GradientSpikeAlarmConfig(Config):
    """Counts gradient norms above `factor` times the `quantile` of the norms of the last updates as spikes.

    A norm that is not finite is a spike too. On several replicas each update sums the gradients over replicas once more
    for it, unless a processor or a bound does so anyway.

    Attributes:
      quantile: The quantile of the norms of the last `window` updates; 1 is the largest of them.
      factor: A norm above this multiple of the quantile is a spike.
      window: The number of updates whose norms are kept.
      warmup: The number of updates before the first one that can be a spike.
    """

    quantile: PositiveFraction = 0.99
    factor: Annotated[float, Field(ge=1)] = 3.0
    window: SomeSteps = 1000
    warmup: SomeSteps = 100
