"""The folder of mode continuous_train_and_eval.

It contains a run for each checkpoint of another run, and the metrics of each.

`finetune-<step>/` is the run that began with the other run's checkpoint of that step.
`metrics-<step>.json` contains its final metrics and is written when it is finished. Imports no
TensorFlow.
"""

from __future__ import annotations

import os
import re

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import Mistake
from trainer_kit.process.run_directory import FINETUNE


def get_finetune_dir(model_dir: str, step: int) -> str:
    """Returns the folder of the run that begins with the checkpoint of `step`."""
    name = f"{FINETUNE}{step}"
    return os.path.join(model_dir, name)


def get_metrics_path(model_dir: str, step: int) -> str:
    """Returns the path of the metrics of `step`, which is finished when the file exists."""
    name = f"metrics-{step}.json"
    return os.path.join(model_dir, name)


def list_finished_steps(model_dir: str) -> list[int]:
    """Returns the steps whose metrics are written, in order."""
    return _steps(model_dir, r"metrics-(\d+)\.json")


def list_unfinished_steps(model_dir: str) -> list[int]:
    """Returns the steps whose runs have saved a checkpoint and are not finished, in order."""
    started_steps = _steps(model_dir, rf"{FINETUNE}(\d+)")
    finished_steps = list_finished_steps(model_dir)
    remaining_steps = set(started_steps) - set(finished_steps)

    unfinished_steps = []
    for step in sorted(remaining_steps):
        folder = get_finetune_dir(model_dir, step)
        if complete_checkpoints(folder):
            unfinished_steps.append(step)
    return unfinished_steps


def _steps(model_dir: str, pattern: str) -> list[int]:
    if not os.path.isdir(model_dir):
        return []
    steps = []
    for name in os.listdir(model_dir):
        match = re.fullmatch(pattern, name)
        if match:
            steps.append(int(match[1]))
    return sorted(steps)


def find_pretraining_mistakes(config: ExperimentConfig, model_dir: str) -> list[Mistake]:
    """Returns the mistakes in task.init_checkpoint.

    It has to name the folder of the run to fine-tune from.
    """
    folder = config.task.init_checkpoint
    problem = ""
    if not folder or not isinstance(folder, str):
        problem = "mode continuous_train_and_eval needs one folder here"
    elif files.is_remote(folder):
        problem = f"{folder!r} is a remote folder"
    elif os.path.isfile(folder) or os.path.isfile(f"{folder}.index"):
        problem = f"{folder!r} is not a folder"
    elif os.path.realpath(folder) == os.path.realpath(model_dir):
        problem = f"{folder!r} is --model_dir itself"
    if not problem:
        return []

    advice = (
        "give the folder of the run whose checkpoints are to be fine-tuned; it need not exist yet"
    )
    return [Mistake("task.init_checkpoint", problem, advice)]
