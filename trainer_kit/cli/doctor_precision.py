"""Trains your experiment in float32 and in its mixed_precision_dtype, and prints losses and speeds next to each other.

Both models start with the same weights and train on the same batches, in turn. No files of a run are read or written.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from typing import TYPE_CHECKING, Any

from trainer_kit.cli.config_arguments import add_config_arguments, resolve_task
from trainer_kit.cli.view.tables import rate
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import ExitCode, UsageError
from trainer_kit.process.gc_freeze import gc_frozen

if TYPE_CHECKING:
    from trainer_kit.training.precision_comparison import PrecisionComparison

_VARIABLES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, the sources of its config, and the number of steps."""
    add_config_arguments(parser)
    parser.add_argument("--steps", type=int, default=100, help="The number of training steps of each. Default: 100.")


def run(arguments: argparse.Namespace) -> int:
    """Prints both losses, the variables whose updates differ most, and both speeds.

    Raises:
      UsageError: when the config is wrong, or computes in float32 anyway.
      DataError: when the training data is empty or ends.
    """
    if arguments.steps < 1:
        raise UsageError(f"--steps: {arguments.steps} trains nothing; give a number above 0")
    config, task_type = resolve_task(arguments)
    dtype = config.runtime.mixed_precision_dtype
    if dtype in (None, "float32"):
        raise UsageError(
            "runtime.mixed_precision_dtype: the experiment computes in float32; name the dtype to compare it with, "
            "such as --params_override=runtime.mixed_precision_dtype=bfloat16"
        )
    with tempfile.TemporaryDirectory() as folder:
        _print(_compared(config, task_type, arguments.steps, folder), dtype)
    return ExitCode.DONE


def _compared(config: ExperimentConfig, task_type: Any, steps: int, folder: str) -> PrecisionComparison:
    with gc_frozen():
        from trainer_kit.distribution.precision import precision, set_precision
        from trainer_kit.distribution.seeds import seed_everything
        from trainer_kit.run.durations import create_trial_trainer
        from trainer_kit.run.launcher import prepare
        from trainer_kit.training.precision_comparison import compare

    def of_dtype(dtype: str) -> ExperimentConfig:
        scale = config.runtime.loss_scale if dtype != "float32" else None
        return config.replace(runtime={"mixed_precision_dtype": dtype, "loss_scale": scale})

    def create(dtype: str) -> Any:
        changed = of_dtype(dtype)
        seed_everything(changed.runtime.random_seed)
        set_precision(changed.runtime)
        return create_trial_trainer(changed, task_type(changed.task, logging_dir=folder), evaluate=False)

    with prepare(of_dtype("float32")).scope(), precision(config.runtime):
        return compare(create, ("float32", str(config.runtime.mixed_precision_dtype)), steps)


def _print(found: PrecisionComparison, dtype: str) -> None:
    print(f"{'step':>8}  {'float32':>10}  {dtype:>14}  difference")
    for step, first, second in found.losses:
        print(f"{step:>8}  {first:>10.4g}  {second:>14.4g}  {(second - first) / abs(first) if first else 0:+.2%}")
    print("Each loss is the mean over the steps since the line above.")
    print("The updates of these variables differ most:")
    for path, difference in itertools.islice(found.differences.items(), _VARIABLES):
        print(f"{f'{difference:.1%}' if math.isfinite(difference) else 'not finite':>10}  {path}")
    first, second = found.rates
    print(f"{rate(first)} steps/s in float32, {rate(second)} in {dtype} ({second / first:.2f} times as many)")
