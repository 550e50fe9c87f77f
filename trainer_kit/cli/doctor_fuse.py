"""Measures whether fused steps train your experiment faster, and prints the trainer.fuse_steps to set.

The experiment trains for some seconds on its own data, with separate steps and with fused steps in turn. No files of a
run are read or written.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import TYPE_CHECKING, Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_task
from trainer_kit.cli.view.tables import rate
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.process.gc_freeze import gc_frozen

if TYPE_CHECKING:
    from trainer_kit.training.fuse_timing import FuseTimer, FuseTiming

_GAIN = 1.05  # a smaller gain may be noise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, and the numbers of steps to try."""
    add_config_arguments(parser)
    parser.add_argument(
        "--fuse_steps", action="append", type=int, default=[], metavar="N",
        help="A number of steps to try; it may be repeated. Default: the largest divisor of steps_per_loop up to 100.",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Prints the step rates with and without fused steps, or why the steps cannot be fused.

    Raises:
      UsageError: when the config is wrong, or --fuse_steps does not fit trainer.steps_per_loop.
      DataError: when the training data is empty or ends.
    """
    config, task_type = resolve_task(arguments)
    _check_fuse_steps(arguments.fuse_steps, config)
    with gc_frozen():
        from trainer_kit.run.launcher import prepare
    with tempfile.TemporaryDirectory() as folder, prepare(config).scope():
        _measure(config, task_type, arguments.fuse_steps, folder)
    return ExitCode.DONE


def _check_fuse_steps(given: list[int], config: ExperimentConfig) -> None:
    longest = config.trainer.steps_per_loop
    for steps in given:
        if isinstance(longest, int) and not 2 <= steps <= longest:
            raise UsageError(f"--fuse_steps: must be from 2 to {longest} (trainer.steps_per_loop), not {steps}")


def _measure(config: ExperimentConfig, task_type: Any, given: list[int], folder: str) -> None:
    import tensorflow as tf

    from trainer_kit.run.durations import create_trial_trainer
    from trainer_kit.training.fuse_timing import CannotFuseError, FuseTimer

    def create(fuse_steps: int) -> Any:
        task = task_type(config.task, logging_dir=folder)
        return create_trial_trainer(config.replace(trainer={"fuse_steps": fuse_steps}), task)

    # Without a writer, a training step would skip its tf.summary calls, which XLA refuses: the fault would go unseen.
    with tf.summary.create_file_writer(folder).as_default():
        try:
            _print_timings(FuseTimer(create), given)
        except CannotFuseError as error:
            print(f"{_setting(1)}the steps cannot be fused: {error}")


def _print_timings(timer: FuseTimer, given: list[int]) -> None:
    timings = []
    for steps in given or [timer.candidate()]:
        timings.append(timer.time(steps))
        print(_line(timings[-1]), flush=True)
    best = max(timings, key=lambda timing: timing.gain)
    if best.gain < _GAIN:
        print(f"{_setting(1)}fusing steps does not make training faster here")
    print("Both forms were trained in turn on the experiment's own data; the rates include the waits for batches.")


def _line(timing: FuseTiming) -> str:
    rates = f"{rate(timing.fused_rate)} against {rate(timing.separate_rate)} steps/s"
    return f"{_setting(timing.fuse_steps)}{timing.gain:.2g} times the rate of separate steps ({rates})"


def _setting(fuse_steps: int) -> str:
    return f"trainer.fuse_steps={fuse_steps:<6}"
