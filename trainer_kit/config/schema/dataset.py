"""Config of the dataset that a config names."""

from __future__ import annotations

from typing import ClassVar

from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.base import configclass
from trainer_kit.config.schema.open_choice import Branch, OpenOneOfConfig


@configclass
class DatasetConfig(OpenOneOfConfig):
    """Which registered dataset. `trainer_kit.register_dataset` adds one.

    Attributes:
      type: The name of a registered dataset; unset means that the task's build_inputs makes the data.
    """

    registry: ClassVar[Registry[Branch]] = Registry("dataset")

    type: str | None = None
