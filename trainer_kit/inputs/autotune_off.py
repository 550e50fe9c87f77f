"""Switches tf.data's tuner off in pipelines where it has nothing to tune.

The tuner measures the time of every element of every transformation. Where each example is an
element, as between from_tensor_slices and batch, that took a fifth to a third of the pipeline's
time (TensorFlow 2.20, 2 cores). In addition, its pauses of up to a minute delay the end of an
iterator.
"""

from __future__ import annotations

from typing import TypeVar

import tensorflow as tf

from trainer_kit.inputs.dataset_structure import get_transformation_kind, iterate_transformations

Data = TypeVar("Data")

# These have neither a number of threads to choose nor functions, which tf.data may spread over
# threads if it may tune.
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


def disable_idle_autotune(dataset: Data) -> Data:
    """Returns `dataset` with the tuner turned off if none of its transformations can be tuned.

    The elements and their order stay the same, and so does what the user has set in
    options.autotune. Only a pipeline that ends in a prefetch is changed. To any other pipeline
    tf.data adds a prefetch, but only while it may tune. Runs on the host.

    Args:
      dataset: A tf.data.Dataset. Any other object, such as a distributed dataset, is returned
        unchanged.
    """
    if not isinstance(dataset, tf.data.Dataset):
        return dataset
    if dataset.options().autotune.enabled is not None:
        return dataset

    kinds = [get_transformation_kind(part) for part in iterate_transformations(dataset)]
    last_kind = next(kind for kind in [*kinds, ""] if kind != "Options")
    if last_kind != "Prefetch" or not _NOTHING_TO_TUNE.issuperset(kinds):
        return dataset

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)
