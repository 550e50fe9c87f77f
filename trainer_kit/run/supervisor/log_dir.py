"""Where the supervisor of a run keeps its attempts.jsonl: one of its own for each process that shares a model_dir."""

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
    """Returns the folder: model_dir itself for the process that trains there, or the first of several that do.

    It is evals/<name>/ in it for an evaluation beside the run, and workers/<number>/ in either for another worker. No
    TensorFlow.

    Args:
      request: checked.
      config: of the run that is asked for.

    Raises:
      ConfigError: when TF_CONFIG is wrong.
    """
    trains = lookup_mode(str(request.mode)).trains
    sidecar = "" if trains else "eval" if request.mode == "eval" else request.eval_name
    folder = RunDirectory(str(request.model_dir), config.trainer, sidecar).own
    number = worker_number(config.runtime.worker_hosts, config.runtime.task_index)
    return os.path.join(folder, WORKERS, str(number)) if number else folder


def tell(log_dir: str) -> None:
    """Prints `log_dir` for `ask_log_dir`; last, for users' modules may print something too."""
    print("", json.dumps(log_dir), sep="\n")


def ask_log_dir(command: Sequence[str]) -> tuple[int, str]:
    """Runs a command that ends with `tell`.

    It reads the config in a process of its own: users' modules may import TensorFlow, and take the memory of its
    devices, which is for the run.

    Returns:
      (0, what it told), or (its exit code, "") when it failed; what it has printed is then passed on.
    """
    asked = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if asked.returncode == 0:
        return 0, str(json.loads(asked.stdout.splitlines()[-1]))
    print(asked.stdout, end="")
    print(asked.stderr, end="", file=sys.stderr)
    return (asked.returncode if asked.returncode > 0 else ExitCode.BUG), ""
