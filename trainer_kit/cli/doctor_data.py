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
from trainer_kit.cli.view.pictures import check_picture, save_picture
from trainer_kit.errors import DataError, ExitCode, UsageError

if TYPE_CHECKING:
    import tensorflow as tf

# The limits of the measurement of the whole, and of each stage.
_SECONDS = 5.0
_STAGE_ELEMENTS = 500
_STAGE_SECONDS = 0.5
# The number of rows and columns of the picture.
_SIDE = 4
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
    if arguments.picture:
        check_picture(arguments.picture)
    config, task_type = resolve_task(arguments)

    # These import TensorFlow, after mistakes in the arguments were reported.
    from trainer_kit.inputs.registered_datasets import get_build_inputs
    from trainer_kit.inputs.sources.source_protocol import Source, call_build_inputs
    from trainer_kit.inputs.sources.tfrecords import explain_read_errors
    from trainer_kit.run.launcher import prepare_runtime
    from trainer_kit.runtime.datasets import with_private_threadpool

    with tempfile.TemporaryDirectory() as folder, prepare_runtime(config).scope():
        task = task_type(config.task, logging_dir=folder)
        params = getattr(config.task, "train_data", None)
        data = call_build_inputs(get_build_inputs(task, params), params)
        dataset = data.at(0) if isinstance(data, Source) else data
        dataset = with_private_threadpool(dataset, config.runtime)
        stages = data.stages(0) if hasattr(data, "stages") else {}
        with explain_read_errors(lambda: (data, dataset), lambda: None):
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
    first_seconds, seconds = data_examination.measure_speed(dataset, arguments.batches, _SECONDS)
    tensors = dict(data_examination.iterate_tensors(next(iter(dataset))))
    batch_size = max((len(tensor) for tensor in tensors.values() if tensor.shape.rank), default=1)
    print(
        f"without a model: {batch_size / seconds:.0f} examples/s, a batch of {batch_size} every"
        f" {1000 * seconds:.3g} ms; the first batch came after {first_seconds:.3g} s"
    )

    # The stages, one after another.
    print("milliseconds of each stage for a batch, on one thread:" if stages else _HINT)
    seconds_by_stage = data_examination.measure_stages(stages, _STAGE_ELEMENTS, _STAGE_SECONDS)
    slowest_seconds = max(seconds_by_stage.values(), default=0.0)
    for name, stage_seconds in seconds_by_stage.items():
        mark = "  <- the slowest" if stage_seconds == slowest_seconds else ""
        print(f"{1000 * stage_seconds:10.2f}  {name}{mark}")

    # The values.
    print(f"values in the first {arguments.batches} batches:")
    summaries = data_examination.summarize_batches(dataset, arguments.batches)
    problems = []
    for name, tensor in tensors.items():
        line = f"{name}: {tensor.dtype.name} {tuple(tensor.shape)}"
        summary = summaries.get(name)
        if summary is None:
            print(f"    {line}")
            continue
        print(f"    {line}, from {summary.lowest:.4g} to {summary.highest:.4g}")
        if summary.first_place is not None:
            batch, row = summary.first_place
            place = f"row {row} of batch {batch}"
            if data_examination.ORDER in stages:
                order = stages[data_examination.ORDER]
                index = data_examination.find_example(order, batch * batch_size + row)
                place = f"example {index}, {place}"
            count = summary.num_not_finite
            problems.append(f"{name} has {count} NaN or infinite values, the first in {place}")

    if arguments.picture:
        _save_sample(tensors.values(), arguments.picture)
    if problems:
        raise DataError("; ".join(problems))


def _save_sample(tensors: Iterable[Any], path: str) -> None:
    """Saves the first images of a batch as a picture.

    Raises:
      UsageError: when no tensor looks like images, or the picture cannot be written.
    """
    import numpy as np
    from matplotlib.figure import Figure

    for tensor in tensors:
        has_channels = len(tensor.shape) == 4 and tensor.shape[3] in (1, 3, 4)
        if has_channels or len(tensor.shape) == 3:
            break
    else:
        raise UsageError("--picture: no tensor of the batch looks like images; leave it out")

    images = tensor.numpy().astype(np.float64)
    lowest = np.nanmin(images)
    height = np.nanmax(images) - lowest or 1.0
    figure = Figure(figsize=(6, 6), layout="constrained")
    for number, image in enumerate(images[: _SIDE**2], 1):
        axes = figure.add_subplot(_SIDE, _SIDE, number)
        axes.imshow(np.squeeze((image - lowest) / height), cmap="gray", vmin=0.0, vmax=1.0)
        axes.set_axis_off()
    save_picture(figure, path)
    print(f"images of the first batch are in {path}")
