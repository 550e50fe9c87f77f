"""The folder of mode continuous_train_and_eval: a run for each checkpoint of another run, and its metrics.

`finetune-<step>/` is the run that began with the other run's checkpoint of that step. `metrics-<step>.json` holds its
final metrics and is written when it is finished. Imports no TensorFlow.
"""

from __future__ import annotations

import os
import re
from typing import Any

from trainer_kit import files
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import Mistake
from trainer_kit.process.run_directory import FINETUNE

_METRICS = re.compile(r"metrics-(\d+)\.json")
_RUN = re.compile(re.escape(FINETUNE) + r"(\d+)")


class FinetuneDirectory:
    """Names, reads and writes the files of the fine-tunings in `model_dir`.

    Args:
      model_dir: A local folder.
    """

    def __init__(self, model_dir: str) -> None:
        self.path = model_dir

    def run(self, step: int) -> str:
        """Returns the folder of the run that begins with the checkpoint of `step`."""
        return os.path.join(self.path, f"{FINETUNE}{step}")

    def done(self) -> set[int]:
        """Returns the steps whose metrics are written."""
        return self._steps(_METRICS)

    def begun(self) -> dict[int, str]:
        """Returns the folders of the runs that have saved a checkpoint and are not done, by step and in that order."""
        steps = sorted(self._steps(_RUN) - self.done())
        return {step: folder for step in steps if complete_checkpoints(folder := self.run(step))}

    def metrics(self, step: int) -> dict[str, Any]:
        """Returns the metrics of `step`; {} when there are none."""
        record = files.read_json(self._metrics_file(step)) or {}
        metrics = record.get("metrics")
        return metrics if isinstance(metrics, dict) else {}

    def write_metrics(self, step: int, record: dict[str, Any]) -> None:
        """Writes metrics-<step>.json, which marks the step as done.

        Raises:
          StorageError: when it cannot be written.
        """
        files.write_json(self._metrics_file(step), record, point="metrics")

    def _metrics_file(self, step: int) -> str:
        return os.path.join(self.path, f"metrics-{step}.json")

    def _steps(self, names: re.Pattern[str]) -> set[int]:
        there = os.listdir(self.path) if os.path.isdir(self.path) else []
        return {int(match.group(1)) for name in there if (match := names.fullmatch(name))}


def pretraining_mistakes(config: ExperimentConfig, model_dir: str) -> list[Mistake]:
    """Returns the mistakes in task.init_checkpoint, which has to name the folder of the run to fine-tune from."""
    path, folder = "task.init_checkpoint", config.task.init_checkpoint
    advice = "give the folder of the run whose checkpoints are to be fine-tuned; it need not exist yet"
    if not folder:
        return [Mistake(path, "is needed in mode continuous_train_and_eval", advice)]
    if not isinstance(folder, str):
        return [Mistake(path, "is a list of sections, and mode continuous_train_and_eval takes one folder", advice)]
    if files.is_remote(folder):
        return [Mistake(path, f"{folder!r} is a remote folder", "mount it and give the path of the mount")]
    if os.path.isfile(folder) or (os.path.exists(f"{folder}.index") and not os.path.isdir(folder)):
        advice += "; to fine-tune a single checkpoint, use mode train_and_eval"
        return [Mistake(path, f"{folder!r} is not a folder", advice)]
    if os.path.realpath(folder) == os.path.realpath(model_dir):
        return [Mistake(path, f"{folder!r} is --model_dir itself", "give another --model_dir to the fine-tuning")]
    return []
