"""Opens the dataset that a config names: `task.train_data.dataset: {type: NAME, NAME: {...}}`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_kit.config.schema.experiment import DataConfig, DatasetConfig

if TYPE_CHECKING:
    import tensorflow as tf

    from trainer_kit.typing import TaskLike


def get_build_inputs(task: TaskLike, params: DataConfig) -> Callable[..., Any]:
    """Returns the function that makes the data of `params`.

    It is a registered function if the config names one, else that of the task.

    Args:
      task: The task. Its `build_inputs` makes the data where the config names no dataset.
      params: The data's section of the config.
    """
    dataset_config = getattr(params, "dataset", None)
    if not isinstance(dataset_config, DatasetConfig) or dataset_config.type is None:
        return task.build_inputs

    # A registered function may leave the context out, as a task may.
    build = DatasetConfig.registry.lookup(dataset_config.type).build
    takes_context = "input_context" in inspect.signature(build).parameters

    def build_inputs(
        params: DataConfig, input_context: tf.distribute.InputContext | None = None
    ) -> Any:
        context = {"input_context": input_context} if takes_context else {}
        return build(dataset_config.get(), params, **context)

    build_inputs.__qualname__ = f"the registered dataset {dataset_config.type!r}"
    return build_inputs
