"""Reads the training data of your experiment without a model: its speed and its values.

It prints examples a second, the milliseconds of each stage, shapes, dtypes and ranges, and finds
values that are not finite. No files of a run are read or written.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_task
from trainer_kit.errors import DataError, ExitCode, UsageError
from trainer_kit.files import write_bytes

EXAMPLE = "trainer-kit doctor data digits"

if TYPE_CHECKING:
    import tensorflow as tf

# The limit of each measurement.
_SECONDS = 2.0
# The number of images in the picture.
_IMAGES = 16
_HINT = (
    "the stages of this data cannot be measured one by one; return a Source, such as"
    " TFRecordSource, from build_inputs, or trace some steps of a run with --profile"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, the batches and the picture."""
    add_config_arguments(parser)
    parser.add_argument(
        "--batches", type=int, default=100, help="The number of batches to read. Default: 100."
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="Saves images of a batch as a PNG file, such as sample.png.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the speed and the values of the training data.

    Raises:
      UsageError: when an argument or the config is wrong, or the data has no images.
      DataError: when the data cannot be read, is empty, or has values that are not finite.
    """
    if arguments.batches < 1:
        raise UsageError(f"--batches={arguments.batches}: give a number of at least 1")
    if arguments.picture and not arguments.picture.endswith(".png"):
        raise UsageError(f"--picture={arguments.picture}: give a name that ends with .png")
    config, task_type = resolve_task(arguments)

    # These import TensorFlow, after mistakes in the arguments were reported.
    from trainer_kit.inputs.registered_datasets import get_build_inputs
    from trainer_kit.inputs.sources.source_protocol import Source, call_build_inputs
    from trainer_kit.inputs.sources.tfrecords import explain_read_errors
    from trainer_kit.run.launcher import prepare_runtime
    from trainer_kit.runtime.datasets import with_private_threadpool

    with tempfile.TemporaryDirectory() as folder, prepare_runtime(config).scope():
        task = task_type(config.task, logging_dir=folder)
        params: Any = getattr(config.task, "train_data", None)
        build_inputs = get_build_inputs(task, params)
        data = call_build_inputs(build_inputs, params)
        stages = data.stages(0) if hasattr(data, "stages") else {}
        if isinstance(data, Source):
            data = data.at(0)
        dataset = with_private_threadpool(data, config.runtime)
        with explain_read_errors(lambda: (dataset,), lambda: None):
            _examine(dataset, stages, arguments)
    return ExitCode.DONE


def _examine(
    dataset: tf.data.Dataset, stages: dict[str, tf.data.Dataset], arguments: argparse.Namespace
) -> None:
    """Prints the speed and the values, and saves the picture.

    Raises:
      DataError: when the data is too short, or has values that are not finite.
    """
    import keras

    from trainer_kit.inputs import data_examination

    # The speed of the whole, as a run reads it.
    seconds = data_examination.measure_seconds(dataset, _SECONDS)
    first_batch = next(iter(dataset))
    leaves = keras.tree.flatten(first_batch)
    tensors = [leaf for leaf in leaves if leaf is not None]
    # Interleaved tasks begin with the number of the task, which has no dimension.
    batch_size = tensors[-1].shape[:1].num_elements()
    rate = batch_size / seconds
    milliseconds = 1000 * seconds
    print(
        f"without a model: {rate:.0f} examples/s,"
        f" a batch of {batch_size} every {milliseconds:.3g} ms"
    )
    if arguments.picture:
        _save_sample(tensors, arguments.picture)

    # The stages, one after another.
    title = "milliseconds of each stage for a batch, on one thread:"
    print(title if stages else _HINT)
    seconds_by_stage = data_examination.measure_stages(stages, _SECONDS)
    for name, stage_seconds in seconds_by_stage.items():
        milliseconds = 1000 * stage_seconds
        print(f"{milliseconds:10.2f}  {name}")

    # The values.
    print(f"values in the first {arguments.batches} batches:")
    summaries = data_examination.summarize_batches(dataset, arguments.batches)
    problem = ""
    for name, summary in summaries.items():
        line = f"    {name}: {summary.description}"
        if summary.lowest <= summary.highest:
            line += f", from {summary.lowest:.4g} to {summary.highest:.4g}"
        print(line)
        if summary.bad_place:
            problem = f"{name} has a value that is NaN or infinite in {summary.bad_place}"

    if problem:
        raise DataError(problem)


def _save_sample(tensors: Iterable[tf.Tensor], path: str) -> None:
    """Saves the first images of a batch as a picture.

    Raises:
      UsageError: when no tensor has the shape of images.
      StorageError: when the picture cannot be written.
    """
    import numpy as np
    import tensorflow as tf

    from trainer_kit.callbacks.sample_pictures import image_grid

    candidates = []
    for tensor in tensors:
        channels = tensor.shape[3:]
        if channels in ([1], [3]):
            candidates.append(tensor)
    if not candidates:
        raise UsageError(
            "--picture: no tensor of the batch has the shape of images, [batch, height, width,"
            " 1 or 3]; leave it out"
        )

    images = np.asarray(candidates[0][:_IMAGES], np.float32)
    images = np.where(np.isfinite(images), images, 0.0)
    limits = (images.min(), images.max())
    scaled_images = np.interp(images, limits, (-1.0, 1.0))
    picture = image_grid(scaled_images)
    png = tf.io.encode_png(picture)
    write_bytes(path, png.numpy())
    print(f"images of the first batch are in {path}")
