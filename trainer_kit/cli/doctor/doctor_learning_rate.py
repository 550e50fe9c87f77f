"""Trains your experiment while the learning rate rises, and suggests a learning rate.

It also prints the curve of the loss. It is the range test of Smith,
https://arxiv.org/abs/1506.01186. A new model trains on the experiment's own data. No files of a run
are read or written.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from typing import TYPE_CHECKING

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_task
from trainer_kit.cli.view.pictures import require_matplotlib, save_picture
from trainer_kit.errors import ExitCode, UsageError

EXAMPLE = "trainer-kit doctor learning_rate digits --steps=100"

if TYPE_CHECKING:
    from trainer_kit.training.rate_range import RateRange

# The size of the printed curve.
_LINES = 25
_WIDTH = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, the rates and the picture."""
    add_config_arguments(parser)
    parser.add_argument(
        "--lowest", type=float, default=1e-6, help="The rate of the first step. Default: 1e-6."
    )
    parser.add_argument(
        "--highest", type=float, default=10.0, help="The rate of the last step. Default: 10."
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="The number of training steps. Default: 200."
    )
    parser.add_argument(
        "--picture", metavar="FILE", help="Saves the curve as a picture, such as rates.png."
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the curve and the suggested rate.

    Raises:
      UsageError: when the config or the rates are wrong, the picture cannot be drawn, or the task
        does not use the rate of the config.
      DataError: when the training data is empty or ends at once.
      DivergedError: when training diverges at the lowest rates.
    """
    _check(arguments)
    config, task_type = resolve_task(arguments)

    # These import TensorFlow, after mistakes in the arguments were reported.
    from trainer_kit.run.launcher import prepare_runtime
    from trainer_kit.run.lengths import resolve_lengths
    from trainer_kit.training.rate_range import range_test_config, run_range_test
    from trainer_kit.training.trainer_creation import choose_optimizer, create_trainer

    config = choose_optimizer(config, task_type)
    lowest = arguments.lowest
    steps = arguments.steps
    test_config = range_test_config(config, lowest, arguments.highest, steps)
    with tempfile.TemporaryDirectory() as folder, prepare_runtime(test_config).scope():
        task = task_type(test_config.task, logging_dir=folder)
        resolved, _ = resolve_lengths(test_config, task)
        trainer = create_trainer(resolved, task, evaluate=False)
        rate_range = run_range_test(trainer, lowest, steps)

    _print(rate_range)
    if arguments.picture:
        _save_picture(rate_range, arguments.picture)
    return ExitCode.DONE


def _check(arguments: argparse.Namespace) -> None:
    if not 0 < arguments.lowest < arguments.highest < math.inf:
        raise UsageError(
            f"--lowest={arguments.lowest:g} and --highest={arguments.highest:g}: the first has to"
            " be above 0 and below the second, and the second finite"
        )
    if arguments.picture:
        require_matplotlib("--picture")


def _print(rate_range: RateRange) -> None:
    losses = rate_range.smoothed_losses
    low = losses.min()
    high = losses.max()
    print(f"{'learning_rate':>13}  {'loss':>8}")
    # The losses may all be equal.
    height = high - low or 1.0
    interval = math.ceil(len(losses) / _LINES)
    for step in range(0, len(losses), interval):
        rate = rate_range.rates[step]
        loss = losses[step]
        share = float((loss - low) / height)
        bar_width = round(_WIDTH * share)
        bar = "#" * bar_width
        line = f"{rate:>13.2g}  {loss:>8.4g}  {bar}"
        print(line.rstrip())

    last_rate = f"{rate_range.rates[-1]:.2g}"
    if rate_range.ended_by:
        print(f"stopped after {len(losses)} steps, at the rate {last_rate}: {rate_range.ended_by}")
    if rate_range.is_still_falling:
        remedy = "try higher ones (--highest)"
        if rate_range.ended_by:
            # Fewer steps reach the highest rate before the data ends.
            remedy = f"give --steps={len(losses)}, or more data"
        print(
            f"no suggestion: the loss still falls at the highest of these rates, {last_rate};"
            f" {remedy}"
        )
        return
    if rate_range.suggestion is None:
        print(
            "no suggestion: the loss does not fall by more than its noise; try other rates"
            " (--lowest, --highest) or more steps (--steps)"
        )
        return
    print(
        f"suggested learning rate: {rate_range.suggestion:.2g}, a tenth of the rate where the loss"
        " is lowest"
    )
    print(
        f"upper bound: {rate_range.lowest_loss_rate:.2g}, where the loss is lowest; a schedule such"
        " as one_cycle may rise that far"
    )


def _save_picture(rate_range: RateRange, path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        title="The loss while the learning rate rises",
        xscale="log",
        xlabel="learning rate",
        ylabel="training loss",
    )
    axes.plot(rate_range.rates, rate_range.losses, color="lightgray", label="each step")
    axes.plot(rate_range.rates, rate_range.smoothed_losses, label="smoothed")
    if rate_range.suggestion is not None:
        axes.axvline(
            rate_range.suggestion, linestyle="--", label=f"suggested: {rate_range.suggestion:.2g}"
        )
    axes.legend()
    # The loss explodes at the end, which would flatten the rest of the curve.
    first_loss = rate_range.smoothed_losses[0]
    lowest_loss = min(rate_range.smoothed_losses)
    fall = first_loss - lowest_loss
    if fall > 0:
        axes.set_ylim(lowest_loss - fall / 10, first_loss + fall / 2)
    save_picture(figure, "--picture", path)
