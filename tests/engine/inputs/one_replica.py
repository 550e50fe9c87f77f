"""Training data of a function, opened for one replica without a trainer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.inputs.worker_pipeline import DataSection, WorkerPipeline


class OneReplica:
    """Inputs that open the dataset of a pipeline as it is."""

    def distribute(self, pipeline: WorkerPipeline) -> tf.data.Dataset:
        """Returns the dataset of the pipeline."""
        return pipeline(None)


def section_of(build: Callable[..., Any], params: Any) -> DataSection:
    """Returns the section of the training data of a task whose build_inputs is `build`."""
    return DataSection("train_data", params, SimpleNamespace(build_inputs=build), RuntimeConfig())
