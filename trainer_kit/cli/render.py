"""Renders a run for Kubeflow Pipelines, Kubernetes, Slurm or Docker, with the exit codes mapped to restarts.

The command of a run is taken from its records. Paths in a command, such as those of config files, have to exist where
the job runs. Nothing is submitted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from trainer_kit import files
from trainer_kit.cli.config_arguments import add_source_arguments, resolve_arguments, sources
from trainer_kit.cli.manifests import docker, job_commands, kfp, kubernetes, slurm
from trainer_kit.cli.manifests.job import Job, check_model_dir, check_name, dns_label
from trainer_kit.cli.manifests.job_commands import Commands
from trainer_kit.cli.view.run_status import holds_run, open_run
from trainer_kit.config import discovery
from trainer_kit.config.modes import MODES
from trainer_kit.errors import ExitCode, UsageError, path_suggestion

TARGETS: dict[str, Callable[[Job], str]] = {
    "kfp": kfp.render,
    "kubernetes": kubernetes.render,
    "slurm": slurm.render,
    "docker": docker.render,
}
CHECKPOINTS = "checkpoints"  # the folder of the run in the job_dir of compat.pipelines.Training
_CONFIG_FILES = (".yaml", ".yml", ".json")
_TRAINING = [name for name in MODES if "train" in name]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds arguments for the target, the run, and what the job needs."""
    parser.add_argument("target", choices=list(TARGETS), help="The system that runs the job.")
    what = "The folder of a run, a config file, or the name of an experiment."
    parser.add_argument("what", metavar="RUN|CONFIG", help=what)
    of_file = "The experiment of a config file. Default: the name of the file."
    parser.add_argument("--experiment", default="", metavar="NAME", help=of_file)
    add_source_arguments(parser)
    mode = "What the job does. Default: as the run did; of an experiment, train_and_eval."
    parser.add_argument("--mode", choices=_TRAINING, metavar="MODE", help=mode)
    sidecar = "Adds a continuous_eval sidecar; it may be repeated. Default: those that the run has."
    parser.add_argument("--sidecar", action="append", default=[], metavar="NAME", help=sidecar)
    name = "The name of the job. Default: that of the run or of the experiment."
    parser.add_argument("--name", default="", help=name)
    folder = "The folder of the run where the job runs. Default: /runs/NAME; with Slurm the run's own folder."
    parser.add_argument("--model_dir", default="", metavar="FOLDER", help=folder)
    parser.add_argument("--image", default="", help="The container image. Default: NAME:latest.")
    volume = "The volume, or the volume claim, that holds the parent of model_dir. Default: runs."
    parser.add_argument("--volume", default="runs", help=volume)
    parser.add_argument("--cpus", type=_whole(1), default=2, metavar="N", help="The number of CPU cores. Default: 2.")
    parser.add_argument("--memory", type=_whole(1), default=4, metavar="GIB", help="The GiB of memory. Default: 4.")
    parser.add_argument("--gpus", type=_whole(0), default=0, metavar="N", help="The number of GPUs. Default: 0.")
    retries = "The number of restarts after crashes. Default: 4."
    parser.add_argument("--retries", type=_whole(0), default=4, metavar="N", help=retries)
    parser.add_argument("--output", default="", metavar="FILE", help="The file to write. Default: standard output.")


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the manifest.

    Raises:
      UsageError: when there is no such run, config file or experiment, or an argument cannot be used.
      StorageError: when the output cannot be written.
    """
    text = TARGETS[arguments.target](_job(arguments))
    if arguments.output:
        files.write_text(arguments.output, text)
    else:
        print(text, end="")
    return ExitCode.DONE


def _job(arguments: argparse.Namespace) -> Job:
    in_container, job_dir = arguments.target != "slurm", arguments.what
    if files.is_remote(job_dir):
        raise UsageError(f"RUN|CONFIG: {job_dir!r} is a remote folder; give the path that it is mounted at")
    is_folder = os.path.isdir(job_dir)
    if not is_folder:
        _find_experiment(arguments)
    name = arguments.name or dns_label(
        os.path.basename(os.path.abspath(job_dir)) if is_folder else arguments.experiment
    )
    own = job_dir if is_folder else f"runs/{name}"
    model_dir = check_model_dir(arguments.model_dir or (f"/runs/{name}" if in_container else own), in_container)
    commands = (_of_run if is_folder else _of_experiment)(arguments, model_dir)
    return Job(
        name=check_name(name),
        command=commands.train,
        model_dir=model_dir,
        run_dir=commands.run_dir,
        sidecars=commands.sidecars,
        evaluate=commands.evaluate,
        grace_seconds=commands.grace_seconds,
        image=arguments.image or f"{name}:latest",
        volume=arguments.volume,
        cpus=arguments.cpus,
        memory=arguments.memory,
        gpus=arguments.gpus,
        retries=arguments.retries,
    )


def _of_experiment(arguments: argparse.Namespace, model_dir: str) -> Commands:
    trainer = resolve_arguments(arguments).config.trainer
    return job_commands.of_experiment(
        arguments.experiment, sources(arguments), arguments.import_module, trainer,
        arguments.mode or "train_and_eval", model_dir, arguments.sidecar,
    )  # fmt: skip


def _of_run(arguments: argparse.Namespace, model_dir: str) -> Commands:
    """Returns the commands of the run in the folder that was given, or in its folder of checkpoints.

    Raises:
      UsageError: when there is no run, or the arguments would change its config.
    """
    given = [name for name, values in vars(sources(arguments)).items() if isinstance(values, tuple) and values]
    if given or arguments.experiment:
        advice = "to change it give the name of its experiment instead"
        raise UsageError(f"{arguments.what} is a run, which has a config; {advice}")
    folder, checkpoints = Path(arguments.what), Path(arguments.what, CHECKPOINTS)
    inside = not holds_run(folder) and checkpoints.is_dir() and holds_run(checkpoints)
    found = open_run(str(checkpoints if inside else folder))
    return job_commands.of_run(found, arguments.what, model_dir, arguments.mode, arguments.sidecar)


def _find_experiment(arguments: argparse.Namespace) -> None:
    """Sets `arguments.experiment`, and adds a config file that was given instead of a name to the sources.

    Raises:
      UsageError: when there is no such file, or no experiment of its name.
    """
    path = Path(arguments.what)
    if path.suffix not in _CONFIG_FILES:
        arguments.experiment = arguments.experiment or arguments.what
        return
    if not path.is_file():
        there = [one.name for one in path.parent.glob("*") if one.suffix in _CONFIG_FILES]
        raise UsageError(f"RUN|CONFIG: there is no file {path}; {path_suggestion(path, there, 'config files')}")
    arguments.config_file = [arguments.what, *arguments.config_file]
    if not arguments.experiment:
        try:
            discovery.find_experiment(path.stem, arguments.import_module)
        except UsageError:
            raise UsageError(
                f"{path}: no experiment is called {path.stem!r}; name its experiment with --experiment"
            ) from None
        arguments.experiment = path.stem


def _whole(least: int) -> Callable[[str], int]:
    """Returns a function that turns the value of a flag into a whole number of `least` or more."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return number
