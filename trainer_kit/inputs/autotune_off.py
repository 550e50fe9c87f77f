"""Switches tf.data's tuner off in pipelines where it has nothing to tune.

The tuner measures the time of every element of every transformation. Where each example is an
element, as between from_tensor_slices and batch, that was a fifth to a third of the pipeline's time
(TensorFlow 2.20, 2 cores). Besides, its pauses, up to a minute, hold up the end of an iterator.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.inputs.dataset_structure import get_transformation_kind, iterate_transformations

# They have no number of threads to choose, nor functions, which tf.data may spread over threads if
# it may tune.
_NOTHING_TO_TUNE = {
    "AssertCardinality",
    "Batch",
    "Cache",
    "Concatenate",
    "Options",
    "PaddedBatch",
    "Prefetch",
    "Range",
    "Rebatch",
    "Repeat",
    "Shard",
    "Shuffle",
    "Skip",
    "Take",
    "Tensor",
    "TensorSlice",
    "Unbatch",
    "Window",
    "Zip",
}


def disable_idle_autotune(dataset: Any) -> Any:
    """Returns `dataset` with the tuner turned off if none of its transformations can be tuned; runs on the host.

    The elements and their order stay the same, and so does what the user has set in
    options.autotune. Only a pipeline that ends in a prefetch is changed: to any other pipeline
    tf.data adds a prefetch, but only while it may tune.

    Args:
      dataset: A tf.data.Dataset; any other object, such as a distributed dataset, is returned
        unchanged.
    """
    if not isinstance(dataset, tf.data.Dataset) or dataset.options().autotune.enabled is not None:
        return dataset
    parts = [get_transformation_kind(part) for part in iterate_transformations(dataset)]
    if (
        not _NOTHING_TO_TUNE.issuperset(parts)
        or next(kind for kind in [*parts, ""] if kind != "Options") != "Prefetch"
    ):
        return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
