"""Writes the outputs of a run's model for the rows of some data to a file."""

from __future__ import annotations

import argparse

from trainer_kit.cli.export import add_run_arguments
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import ExitCode

EXAMPLE = "trainer-kit predict runs/digits --input=images.npz --output=digits.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its checkpoint, the data and the file."""
    add_run_arguments(parser)
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
    parser.add_argument("--batch_size", type=int, default=32, help="Rows in a batch. Default: 32.")
    parser.add_argument(
        "--worker", type=int, default=0, help="The number of this worker, from 0. Default: 0."
    )
    parser.add_argument("--workers", type=int, default=1, help="The number of workers. Default: 1.")
    parser.add_argument(
        "--evaluate",
        action="store_true",
        help="Also writes the scores of each class, the confusion matrix and the worst rows.",
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

    predict(
        arguments.model_dir,
        arguments.input,
        arguments.output,
        which=arguments.checkpoint,
        import_modules=arguments.import_module,
        weights=arguments.weights,
        batch_size=arguments.batch_size,
        strategy=create_strategy(RuntimeConfig(distribution_strategy="mirrored")),
        worker=arguments.worker,
        workers=arguments.workers,
        evaluate=arguments.evaluate,
    )
    return ExitCode.DONE
