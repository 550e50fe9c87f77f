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

if TYPE_CHECKING:
    import tensorflow as tf

# The limits of the measurement of the whole, and of each stage.
_SECONDS = 5.0
_STAGE_ELEMENTS = 500
_STAGE_SECONDS = 1.5
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
        help="Saves images of a batch as a picture, such as sample.png.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the speed and the values of the training data.

    Raises:
      UsageError: when the config is wrong, or the picture cannot be drawn.
      DataError: when the data cannot be read, is empty, or has values that are not finite.
    """
    if arguments.batches < 1:
        raise UsageError(f"--batches={arguments.batches}: give a number of at least 1")
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
        stages = {}
        if hasattr(data, "stages"):
            stages = data.stages(0)
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
      DataError: when the data is empty, or has values that are not finite.
    """
    from trainer_kit.inputs import data_examination

    # The speed of the whole, as a run reads it.
    batches = arguments.batches
    first_seconds, seconds = data_examination.measure_speed(dataset, batches, _SECONDS)
    first_batch = next(iter(dataset))
    named_tensors = data_examination.iterate_tensors(first_batch)
    tensors = dict(named_tensors)
    sizes = [tensor.shape[0] for tensor in tensors.values() if tensor.shape.rank]
    batch_size = max(sizes, default=1)
    rate = batch_size / seconds
    milliseconds = 1000 * seconds
    print(
        f"without a model: {rate:.0f} examples/s,"
        f" a batch of {batch_size} every {milliseconds:.3g} ms;"
        f" the first batch came after {first_seconds:.3g} s"
    )

    # The stages, one after another.
    title = "milliseconds of each stage for a batch, on one thread:"
    print(title if stages else _HINT)
    seconds_by_stage = data_examination.measure_stages(stages, _STAGE_ELEMENTS, _STAGE_SECONDS)
    slowest_seconds = max(seconds_by_stage.values(), default=0.0)
    for name, stage_seconds in seconds_by_stage.items():
        is_slowest = stage_seconds == slowest_seconds
        mark = "  <- the slowest" if is_slowest else ""
        milliseconds = 1000 * stage_seconds
        print(f"{milliseconds:10.2f}  {name}{mark}")

    # The values.
    print(f"values in the first {batches} batches:")
    summaries = data_examination.summarize_batches(dataset, batches)
    problems = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        line = f"    {name}: {tensor.dtype.name} {shape}"
        summary = summaries.get(name)
        if summary is None:
            print(line)
            continue
        print(f"{line}, from {summary.lowest:.4g} to {summary.highest:.4g}")
        if summary.first_place is None:
            continue

        # What a Source knows of the example.
        batch, row = summary.first_place
        place = f"row {row} of batch {batch}"
        order = stages.get(data_examination.ORDER)
        if order is not None:
            position = batch * batch_size + row
            index = data_examination.find_example(order, position)
            place = f"example {index}, {place}"
        problems.append(
            f"{name} has {summary.num_not_finite} NaN or infinite values, the first in {place}"
        )

    if arguments.picture:
        _save_sample(tensors.values(), arguments.picture)
    if problems:
        raise DataError("; ".join(problems))


def _save_sample(tensors: Iterable[tf.Tensor], path: str) -> None:
    """Saves the first images of a batch as a picture.

    Raises:
      UsageError: when no tensor looks like images.
      StorageError: when the picture cannot be written.
    """
    import numpy as np
    import tensorflow as tf

    from trainer_kit.callbacks.sample_pictures import image_grid

    for tensor in tensors:
        if tensor.shape.rank == 3:
            tensor = tensor[..., tf.newaxis]
        if tensor.shape.rank == 4 and tensor.shape[3] in (1, 3):
            break
    else:
        raise UsageError("--picture: no tensor of the batch looks like images; leave it out")

    numbers = tensor[:_IMAGES].numpy().astype(np.float64)
    images = np.nan_to_num(numbers)
    images -= images.min()
    images /= images.max() or 1.0
    picture = image_grid(2.0 * images - 1.0)
    png = tf.io.encode_png(picture)
    write_bytes(path, png.numpy())
    print(f"images of the first batch are in {path}")
