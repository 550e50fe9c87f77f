"""Writes the outputs of a run's model for the rows of some data to a file."""

from __future__ import annotations

import argparse

from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ExitCode, UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its checkpoint, the data and the file."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--output",
        required=True,
        help="The file: .parquet, .jsonl, .csv or .npz. A prediction that was killed continues.",
    )
    parser.add_argument(
        "--input",
        help=(
            "A .npz, .csv or .parquet file, TFRecord files (a pattern), or a folder of"
            " images. Default: the validation data of the run."
        ),
    )
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="best, best:NAME, latest, a step, or a path. Default: best.",
    )
    parser.add_argument(
        "--weights",
        default="",
        help="average, weights, or one of ema.more_decays. Default: those that the run evaluates.",
    )
    parser.add_argument("--batch_size", type=int, default=32, help="Rows in a batch. Default: 32.")
    parser.add_argument(
        "--worker",
        default="0/1",
        metavar="NUMBER/COUNT",
        help="This worker's number, from 0, and the number of workers. Default: 0/1.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the file, with all replicas of this machine.

    Raises:
      UsageError: when the run, the checkpoint or the data does not exist, or does not fit.
      StorageError: when a file cannot be read or written.
    """
    # This imports TensorFlow, which other verbs do not need.
    from trainer_kit.runtime.strategy import create_strategy
    from trainer_kit.serving.prediction import predict

    number, _, count = arguments.worker.partition("/")
    if not (number.isdigit() and count.isdigit()):
        raise UsageError(f"--worker: {arguments.worker!r} is no NUMBER/COUNT, such as 0/2")
    predict(
        arguments.model_dir,
        arguments.input,
        arguments.output,
        which=arguments.checkpoint,
        import_modules=arguments.import_module != ["none"] and arguments.import_module,
        weights=arguments.weights,
        batch_size=arguments.batch_size,
        strategy=create_strategy(RuntimeConfig(distribution_strategy="mirrored")),
        worker=int(number),
        workers=int(count),
        verbose=True,
    )
    return ExitCode.DONE
