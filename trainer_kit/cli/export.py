"""Writes the model of a run as a SavedModel, a .keras file, or for LiteRT or ONNX Runtime."""

from __future__ import annotations

import argparse

from trainer_kit.cli.config_arguments import add_import_argument
from trainer_kit.errors import ExitCode

EXAMPLE = "trainer-kit export runs/digits --format=saved_model,litert --output=exported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its checkpoint, the formats and the new folder."""
    add_run_arguments(parser)
    parser.add_argument(
        "--format",
        default="saved_model",
        help="saved_model, keras, litert, litert_int8, onnx, by commas. Default: saved_model.",
    )
    parser.add_argument(
        "--output", help="The new folder. Default: export/<step> in the folder of the run."
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        help="The largest difference, as a part of the largest output. Default: 1e-5 in float32.",
    )


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the run, its checkpoint and the kind of weights."""
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="The folder of a run.")
    parser.add_argument(
        "--checkpoint",
        default="best",
        help="Which weights: best, best:NAME, latest, a step, or a path. Default: best.",
    )
    parser.add_argument(
        "--weights",
        default="",
        help="average, weights, or one of ema.more_decays. Default: those that the run evaluates.",
    )
    add_import_argument(parser, " none: does not import the modules that the run names.")


def run(arguments: argparse.Namespace) -> int:
    """Writes the formats, and prints how far each is from the model.

    Raises:
      UsageError: when the run, the checkpoint or a format does not exist, the folder exists
        already, or a format cannot contain the model.
      StorageError: when a file cannot be read or written.
    """
    # This imports TensorFlow, which other verbs do not need.
    from trainer_kit.serving.model_export import export

    export(
        arguments.model_dir,
        arguments.output,
        arguments.format,
        which=arguments.checkpoint,
        import_modules=arguments.import_module,
        weights=arguments.weights,
        tolerance=arguments.tolerance,
    )
    return ExitCode.DONE
