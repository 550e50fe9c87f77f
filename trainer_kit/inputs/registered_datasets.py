"""Opens the dataset that a config names: `task.train_data.dataset: {type: NAME, NAME: {...}}`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trainer_kit.config.schema.experiment import DatasetConfig


def get_build_inputs(task: Any, params: Any) -> Callable[..., Any]:
    """Returns the function that makes the data of `params`: a registered one if the config names one, or the task's.

    Args:
      task: The task; its `build_inputs` makes the data where the config names no dataset.
      params: The data's section of the config.
    """
    chosen = getattr(params, "dataset", None)
    if not isinstance(chosen, DatasetConfig) or chosen.type is None:
        return task.build_inputs
    build = DatasetConfig.registry.lookup(chosen.type).build
    takes_context = "input_context" in inspect.signature(build).parameters

    def build_inputs(params: Any, input_context: Any = None) -> Any:
        return build(
            chosen.get(), params, **({"input_context": input_context} if takes_context else {})
        )

    build_inputs.__qualname__ = f"the registered dataset {chosen.type!r}"
    return build_inputs
