"""Reads the data of your experiment without a model, and shows its speed and its values.

It prints examples a second, the milliseconds of each stage, shapes, dtypes and ranges, and values
that are not finite. No files of a run are read or written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_task
from trainer_kit.cli.view.pictures import check_picture, save_picture
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.config.schema.evaluation import get_training_sets, get_validation_sets
from trainer_kit.config.schema.multitask import MultiTaskConfig
from trainer_kit.errors import DataError, ExitCode, UsageError, suggest_names
from trainer_kit.telemetry.report_lines import format_number
from trainer_kit.telemetry.time_ledger import percent

if TYPE_CHECKING:
    import tensorflow as tf

    from trainer_kit.inputs.data_examination import TensorSummary

# The limits of the measurement of the whole and of each stage.
_SECONDS = 5.0
_STAGE_ELEMENTS = 500
_STAGE_SECONDS = 1.5
# The number of images in a row of the picture.
_COLUMNS = 4
_HINT = (
    "this is a tf.data.Dataset, whose stages cannot be measured one by one; to see them, return a"
    " Source from build_inputs, such as TFRecordSource, or trace steps with --profile"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, the data and the picture."""
    add_config_arguments(parser)
    parser.add_argument(
        "--section",
        default="task.train_data",
        help="The data in the config, such as task.validation_data. Default: task.train_data.",
    )
    parser.add_argument(
        "--batches", type=int, default=100, help="The number of batches to look at. Default: 100."
    )
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="Saves some images of the first batch as a picture, such as sample.png.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the speed and the values of the data.

    Raises:
      UsageError: when the config is wrong, it has no such data, or the picture cannot be drawn.
      DataError: when the data cannot be read, is empty, or has values that are not finite.
    """
    if arguments.batches < 1:
        raise UsageError(f"--batches={arguments.batches}: give a number of at least 1")
    if arguments.picture:
        check_picture(arguments.picture)
    config, task_type = resolve_task(arguments)
    if isinstance(config.task, MultiTaskConfig):
        raise UsageError("the experiment has several tasks; give an experiment of one of them")
    sections = get_training_sets(config.task)
    for name, section in get_validation_sets(config.task).items():
        # A single set is called "".
        path = f"task.validation_data.{name}".rstrip(".")
        sections[path] = section
    path = arguments.section
    params = sections.get(path)
    if params is None:
        advice = suggest_names(path, list(sections))
        raise UsageError(f"--section={path}: the experiment has no such data; {advice}")

    # These import TensorFlow, after mistakes in the arguments were reported.
    from trainer_kit.inputs.registered_datasets import get_build_inputs
    from trainer_kit.inputs.sources.source_protocol import Source, call_build_inputs
    from trainer_kit.inputs.sources.tfrecords import explain_read_errors
    from trainer_kit.run.launcher import prepare_runtime
    from trainer_kit.runtime.datasets import with_private_threadpool

    with tempfile.TemporaryDirectory() as folder, prepare_runtime(config).scope():
        task = task_type(config.task, logging_dir=folder)
        data = call_build_inputs(get_build_inputs(task, params), params)
        dataset = data.at(0) if isinstance(data, Source) else data
        dataset = with_private_threadpool(dataset, config.runtime)
        get_stages = getattr(data, "stages", None)
        stages = get_stages(0) if callable(get_stages) else {}
        print(f"{path}: {type(data).__name__}")
        with explain_read_errors(lambda: (data, dataset), lambda: None):
            _examine(dataset, stages, arguments)
    return ExitCode.DONE


def _examine(
    dataset: tf.data.Dataset, stages: dict[str, tf.data.Dataset], arguments: argparse.Namespace
) -> None:
    """Prints the tables and saves the picture.

    Raises:
      DataError: when the data is empty, or has values that are not finite.
    """
    from trainer_kit.inputs import data_examination

    # The speed of the whole, as a run reads it.
    batch = next(iter(dataset), None)
    if batch is None:
        raise DataError("the data has no batch")
    tensors = dict(data_examination.iterate_tensors(batch))
    first_shape = next(iter(tensors.values())).shape
    batch_size = int(first_shape[0]) if first_shape.rank else 1
    speed = data_examination.measure_speed(dataset, arguments.batches, _SECONDS)
    print(f"the first batch came after {format_number(speed.first_seconds, 3)} s")
    if speed.seconds is not None:
        rate = batch_size / speed.seconds
        rate_text = format_number(round(rate) if rate >= 10 else rate, 3)
        milliseconds = format_number(1000 * speed.seconds, 3)
        print(
            f"{rate_text} examples/s without a model: a batch of {batch_size} every {milliseconds} ms\n"
        )

    # The stages, one after another.
    if stages:
        seconds_by_stage = data_examination.measure_stages(
            stages, batch_size, _STAGE_ELEMENTS, _STAGE_SECONDS
        )
        total = sum(seconds_by_stage.values()) or 1.0
        rows = []
        for name, seconds in seconds_by_stage.items():
            rows.append([name, format_number(1000 * seconds, 3), percent(seconds / total)])
        title = "stages of a batch on one thread"
        headers = ["stage", "ms", "share"]
        print_tables([Table(title, headers, rows, left_aligned=frozenset({"stage"}))], sys.stdout)
        slowest = max(seconds_by_stage, key=seconds_by_stage.__getitem__)
        print(f"the slowest is {slowest}\n")
    else:
        print(f"{_HINT}\n")

    # The values.
    summaries, batches = data_examination.summarize_batches(dataset, arguments.batches)
    rows = []
    for summary in summaries:
        lowest = format_metric(summary.lowest)
        highest = format_metric(summary.highest)
        shape = " x ".join(map(str, summary.shape))
        counts = [str(summary.num_nan), str(summary.num_infinite)]
        rows.append([summary.name, summary.dtype, shape, lowest, highest, *counts])
    title = f"values in the first {batches} batches"
    headers = ["tensor", "dtype", "shape", "lowest", "highest", "NaN", "Inf"]
    words = frozenset({"tensor", "dtype", "shape"})
    print_tables([Table(title, headers, rows, left_aligned=words)], sys.stdout)
    if arguments.picture:
        _save_sample(tensors, arguments.picture)

    order = stages.get(data_examination.ORDER)
    problems = [
        _describe_places(summary, order, batch_size)
        for summary in summaries
        if not summary.is_finite
    ]
    if problems:
        raise DataError("; ".join(problems))


def _describe_places(summary: TensorSummary, order: tf.data.Dataset | None, batch_size: int) -> str:
    """Returns where a tensor has values that are not finite."""
    from trainer_kit.inputs.data_examination import find_example

    places = []
    for batch, row in summary.places:
        place = f"row {row} of batch {batch}"
        index = None if order is None else find_example(order, batch_size, (batch, row))
        places.append(place if index is None else f"example {index} ({place})")
    return (
        f"{summary.name} has {summary.num_nan} NaN and {summary.num_infinite} infinite values, the"
        f" first in {', '.join(places)}"
    )


def _save_sample(tensors: dict[str, Any], path: str) -> None:
    """Saves the first images of a batch as a picture.

    Raises:
      UsageError: when the batch has no tensor that looks like images, or the picture cannot be
        written.
    """
    import numpy as np
    from matplotlib.figure import Figure

    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        has_channels = len(shape) == 4 and shape[3] in (1, 3, 4)
        if has_channels or (len(shape) == 3 and min(shape[1:]) > 3):
            break
    else:
        raise UsageError("--picture: no tensor looks like images; leave it out")

    images = tensor.numpy().astype(np.float64)[: _COLUMNS * _COLUMNS]
    lowest = np.nanmin(images)
    height = np.nanmax(images) - lowest or 1.0
    figure = Figure(figsize=(6, 6), layout="constrained")
    for number, image in enumerate((images - lowest) / height, 1):
        axes = figure.add_subplot(_COLUMNS, _COLUMNS, number)
        axes.imshow(np.squeeze(image), cmap="gray", vmin=0.0, vmax=1.0)
        axes.set_axis_off()
    save_picture(figure, path)
    print(f"{len(images)} images of {name} are in {path}")
