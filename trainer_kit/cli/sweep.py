"""Trains an experiment with many hyper-parameters: a grid of values, or those that Optuna draws.

Each trial is a run in a folder of its own. The same command continues a sweep that was stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer_kit.cli.config_arguments import add_config_arguments, build_sources
from trainer_kit.cli.view.tables import Table, format_metric, print_tables
from trainer_kit.config import discovery
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.config_files import read_config_file
from trainer_kit.errors import ConfigError, ExitCode, UsageError
from trainer_kit.files import follow_links
from trainer_kit.process.run_lock import RunLock
from trainer_kit.sweeps.sweep_config import SweepConfig

if TYPE_CHECKING:
    from trainer_kit.sweeps.sweep_study import SweepStudy


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the experiment, what is tried, where, and by how many processes."""
    add_config_arguments(parser)
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="PATH=V1,V2,...",
        help="Values to try for a config value. Repeated: all combinations are tried.",
    )
    parser.add_argument(
        "--optuna", metavar="FILE", help="A YAML file with search space, sampler and pruner."
    )
    parser.add_argument(
        "--sweep_dir",
        dest="output",
        required=True,
        metavar="SWEEP_DIR",
        help="The folder of the sweep. Trial 3 is the run SWEEP_DIR/trial_0003.",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="The trials at a time, which share the cores. Default: 1.",
    )
    parser.add_argument(
        "--trials_per_process",
        type=int,
        default=20,
        help="The trials that a process runs before a new one takes its place. Default: 20.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the trials that are left, and prints a table of all.

    Returns:
      The exit code of the first trial that has failed, 0 if none has.

    Raises:
      UsageError: when Optuna is missing, or the arguments, a value to try or the folder are wrong.
      ModelDirInUseError: when the sweep runs already.
    """
    if importlib.util.find_spec("optuna") is None:
        raise UsageError("trainer-kit sweep needs optuna: pip install 'trainer_kit[sweep]'")
    if arguments.jobs < 1 or arguments.trials_per_process < 1:
        raise UsageError("--jobs and --trials_per_process: give whole numbers above 0")
    sweep_config = read_sweep_config(arguments)
    discovery.import_experiment(arguments.experiment, arguments.import_module)
    sources = build_sources(arguments)
    if sweep_config.metric:
        objective = f"trainer.best_checkpoint_eval_metric={sweep_config.metric}"
        sources = replace(sources, params_overrides=(*sources.params_overrides, objective))
    if sweep_config.direction:
        objective = f"trainer.best_checkpoint_metric_comp={sweep_config.direction}"
        sources = replace(sources, params_overrides=(*sources.params_overrides, objective))
    options = check_values(arguments.experiment, sources, sweep_config).trainer
    metric = options.best_checkpoint_eval_metric
    if not metric:
        raise UsageError(
            "a sweep needs the metric that decides; give"
            " --params_override=trainer.best_checkpoint_eval_metric=NAME, or metric in the file of"
            " --optuna"
        )

    # Optuna takes a second to import.
    from trainer_kit.sweeps.sweep import Sweep
    from trainer_kit.sweeps.sweep_study import SweepStudy

    folder = follow_links(arguments.output)
    interval = options.validation_interval
    command = {
        "experiment": arguments.experiment,
        "config_file": list(sources.config_files),
        "gin_file": list(sources.gin_files),
        "gin_params": list(sources.gin_params),
        "params_override": list(sources.params_overrides),
        "space": sweep_config.as_dict()["space"],
    }
    with RunLock(folder, names=("sweep.lock", "sweep.json")):
        study = SweepStudy(
            folder,
            sweep_config,
            options.best_checkpoint_metric_comp,
            command,
            interval if isinstance(interval, int) and interval > 0 else 1,
        )
        sweep = Sweep(
            study,
            arguments.experiment,
            sources,
            arguments.import_module,
            folder,
            metric,
            arguments.trials_per_process,
        )
        sweep.run(arguments.jobs)
    print_tables([build_table(study, metric)], sys.stdout)
    failed = [trial for trial in study.trials if trial.state.name == "FAIL"]
    return failed[0].user_attrs["exit_code"] if failed else ExitCode.DONE


def read_sweep_config(arguments: argparse.Namespace) -> SweepConfig:
    """Returns what the arguments --grid or --optuna ask for.

    Raises:
      UsageError: when there is none or both of them, or with the mistakes in them.
    """
    if bool(arguments.grid) == bool(arguments.optuna):
        raise UsageError("give either --grid=PATH=V1,V2,... or --optuna=FILE")
    if arguments.optuna:
        return apply_layers(SweepConfig(), [read_config_file(arguments.optuna)]).config

    space = {}
    for text in arguments.grid:
        path, _, values = text.partition("=")
        choices = yaml_loader.parse(f"[{values}]", "--grid").values
        if path in space or not path or not choices:
            raise UsageError(f"--grid={text}: give PATH=V1,V2,..., and each path once")
        space[path] = {"choices": choices}
    return SweepConfig(sampler="grid", space=space)


def check_values(
    experiment: str, sources: ConfigSources, sweep_config: SweepConfig
) -> ExperimentConfig:
    """Returns the config of the experiment, after it was tried with each value to try.

    Raises:
      ConfigError: with the mistakes in the config and in the values.
    """
    config = resolve_config(experiment, sources).config
    mistakes = {}
    for path, values in sweep_config.space.items():
        for value in values.choices or (values.low, values.high):
            override = f"{path}={json.dumps(value)}"
            all_overrides = (*sources.params_overrides, override)
            try:
                resolve_config(experiment, replace(sources, params_overrides=all_overrides))
            except ConfigError as error:
                mistakes.update({str(mistake): mistake for mistake in error.mistakes})
    if mistakes:
        raise ConfigError(mistakes.values())
    return config


def build_table(study: SweepStudy, metric: str) -> Table:
    """Returns a table of the trials in the order of their numbers."""
    paths = sorted({path for trial in study.trials for path in trial.params})
    rows = []
    for trial in study.trials:
        is_best = study.best is not None and study.best.number == trial.number
        state = "best" if is_best else trial.state.name.lower()
        note = trial.user_attrs.get("error", "")
        values = [str(trial.params.get(path, "")) for path in paths]
        rows.append([str(trial.number), state, format_metric(trial.value), *values, note])
    headers = ["trial", "state", metric, *paths, "error"]
    return Table("trials", headers, rows, left_aligned=frozenset({"state", "error"}))
