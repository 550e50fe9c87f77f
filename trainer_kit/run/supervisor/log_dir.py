"""Finds the folder of a supervisor's attempts.jsonl; each process that shares a model_dir has a separate one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from trainer_kit.config.modes import lookup_mode
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.distribution.tf_config import worker_number
from trainer_kit.errors import ExitCode
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run.preflight import Request

WORKERS = "workers"


def log_dir_of(request: Request, config: ExperimentConfig) -> str:
    """Returns the supervisor's folder: model_dir for the process that trains there, or for the first of its workers.

    A process that only evaluates gets model_dir/evals/<name>/. Any other worker gets workers/<number>/ in the folder of
    the first one. Imports no TensorFlow.

    Args:
      request: The requested run, already checked.
      config: The config of the requested run.

    Raises:
      ConfigError: when TF_CONFIG is wrong.
    """
    trains = lookup_mode(str(request.mode)).trains
    sidecar = "" if trains else "eval" if request.mode == "eval" else request.eval_name
    folder = RunDirectory(str(request.model_dir), config.trainer, sidecar).own
    number = worker_number(config.runtime.worker_hosts, config.runtime.task_index)
    return os.path.join(folder, WORKERS, str(number)) if number else folder


def tell(log_dir: str) -> None:
    """Prints `log_dir` as the last line, which `ask_log_dir` reads; users' modules may print other lines before."""
    print("", json.dumps(log_dir), sep="\n")


def ask_log_dir(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command that calls `tell` at its end, and returns the folder that it prints.

    The command reads the config in a separate process. Users' modules may import TensorFlow, which would take the
    device memory that the run needs.

    Returns:
      (0, the folder), or (the command's exit code, "") when it failed; its output is then printed.
    """
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if asked.returncode == 0:
        return 0, str(json.loads(asked.stdout.splitlines()[-1]))
    print(asked.stdout, end="")
    print(asked.stderr, end="", file=sys.stderr)
    return (asked.returncode if asked.returncode > 0 else ExitCode.BUG), ""
