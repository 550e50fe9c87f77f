"""Trains an experiment with many values of its config: a grid, or values that Optuna draws.

Each trial is a run in a folder of its own. The same command continues a sweep that was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import Sequence

from trainer_kit.cli.config_arguments import add_config_arguments
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.config_files import read_config_file
from trainer_kit.errors import ExitCode, UsageError, get_install_command
from trainer_kit.files import follow_links
from trainer_kit.process.run_lock import RunLock
from trainer_kit.run.flags import build_request, parse_flags
from trainer_kit.run.preflight import check_request
from trainer_kit.sweeps.sweep_config import SearchRange, SweepConfig, format_override

EXAMPLE = "trainer-kit sweep digits --grid=learning_rate=1e-4,1e-3,1e-2 --sweep_dir=runs/rates"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, what is tried, the folder, and the number of processes."""
    add_config_arguments(parser)
    grid_help = "Values to try. May be repeated: all combinations are tried."
    parser.add_argument("--grid", action="append", default=[], metavar="PATH=V1,V2", help=grid_help)
    optuna_help = "A YAML file with the search space, the sampler and the pruner."
    parser.add_argument("--optuna", metavar="FILE", help=optuna_help)
    folder_help = "The folder of the sweep. Trial 3 is the run DIR/trial_0003."
    parser.add_argument("--sweep_dir", required=True, metavar="DIR", help=folder_help)
    jobs_help = "The number of trials at a time, which share the CPU cores. Default: 1."
    parser.add_argument("--jobs", type=int, default=1, help=jobs_help)


def run(arguments: argparse.Namespace) -> int:
    """Runs the trials that are left, and prints the command that shows all.

    Returns:
      DONE if all trials have succeeded or were pruned, else BUG.

    Raises:
      UsageError: when Optuna is missing, or the arguments or a value are wrong.
      ModelDirInUseError: when the sweep runs already.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UsageError(f"trainer-kit sweep needs Optuna: {get_install_command('sweep')}")
    if arguments.jobs < 1:
        raise UsageError(f"--jobs={arguments.jobs}: give a number above 0")
    sweep_config = read_sweep_config(arguments)
    folder = follow_links(arguments.sweep_dir)
    flags = build_flags(arguments)
    base_config = check_values([*flags, f"--model_dir={folder}"], sweep_config)
    if not base_config.trainer.best_checkpoint_eval_metric:
        raise UsageError("a sweep needs a metric; set trainer.best_checkpoint_eval_metric")

    # Optuna takes a second to import.
    from trainer_kit.sweeps.sweep import Sweep

    with RunLock(folder, names=("sweep.lock", "sweep.json")):
        sweep = Sweep(folder, flags, sweep_config, base_config)
        has_succeeded = sweep.run(arguments.jobs)
    print(f"to compare the trials: trainer-kit compare {shlex.quote(folder)}")
    return ExitCode.DONE if has_succeeded else ExitCode.BUG


def read_sweep_config(arguments: argparse.Namespace) -> SweepConfig:
    """Returns what the arguments --grid or --optuna ask for.

    Raises:
      UsageError: when there is none or both of them, or with the mistakes in them.
    """
    if bool(arguments.grid) == bool(arguments.optuna):
        raise UsageError("give either --grid=PATH=V1,V2 or --optuna=FILE")
    if arguments.optuna:
        layer = read_config_file(arguments.optuna)
        resolved = apply_layers(SweepConfig(), [layer])
        if not resolved.config.space:
            raise UsageError(f"{arguments.optuna}: space is missing; give a range for each path")
        return resolved.config

    space: dict[str, SearchRange] = {}
    for text in arguments.grid:
        path, _, values = text.partition("=")
        parsed = yaml_loader.parse(f"[{values}]", "--grid")
        if path in space or not parsed.values:
            raise UsageError(f"--grid={text}: give PATH=V1,V2, and each path once")
        space[path] = SearchRange(choices=tuple(parsed.values))
    return SweepConfig(sampler="grid", space=space)


def build_flags(arguments: argparse.Namespace) -> list[str]:
    """Returns the flags of each run, without its model_dir and the values that are tried."""
    flags = [f"--experiment={arguments.experiment}", "--mode=train_and_eval"]
    for name in ("import_module", "config_file", "gin_file", "gin_params", "params_override"):
        values = getattr(arguments, name)
        flags += [f"--{name}={value}" for value in values]
    return flags


def check_values(flags: Sequence[str], sweep_config: SweepConfig) -> ExperimentConfig:
    """Checks each value that is tried, and returns the config without any of them.

    Raises:
      UsageError: with the mistakes in the config, or in the first wrong value.
    """
    overrides = [""]
    for path, search_range in sweep_config.space.items():
        values = search_range.choices or (search_range.low, search_range.high)
        overrides += [format_override(path, value) for value in values]

    configs: list[ExperimentConfig] = []
    for override in overrides:
        run_flags = parse_flags(["train", *flags, f"--params_override={override}"])
        request = build_request(run_flags)
        config = check_request(request).config
        configs.append(config)

        base_config = configs[0]
        runtime = config.runtime.replace(random_seed=base_config.runtime.random_seed)
        if runtime != base_config.runtime:
            raise UsageError(
                f"{override}: the trials of a sweep share a runtime; start a sweep for each value"
            )
    return configs[0]
