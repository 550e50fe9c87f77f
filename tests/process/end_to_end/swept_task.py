"""The task of swept_experiment.py, and a callback that waits, so that a trial can be killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import keras

import trainer_kit
from trainer_kit.testing.tiny_task import tiny_arrays


class SweptTask(trainer_kit.Task):
    """A classification of points. The experiment names it."""

    def build_model(self) -> Any:
        """Returns the model."""
        if self.task_config.kind == "unlucky":
            raise RuntimeError("no luck")
        hidden = keras.layers.Dense(self.task_config.width, "relu")
        return keras.Sequential([keras.Input((8,)), hidden, keras.layers.Dense(3)])

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        """Returns the points."""
        return trainer_kit.ArraySource(tiny_arrays(bool(params.is_training), 40), params)

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        """Returns the loss."""
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        offset = 1000.0 if self.task_config.kind == "bad" else 0.0
        return loss(labels, model_outputs) + offset


@trainer_kit.register_callback("tests_pause")
class Pause(trainer_kit.Callback):
    """Waits after step 10 as long as there is a file `pause` beside the folder of the run."""

    def boundary_end(self, run: Any) -> None:
        """Waits."""
        pause = Path(f"{run.directory}.pause")
        if run.step == 10 and pause.exists():
            pause.write_text(str(os.getpid()))
            while pause.exists():
                time.sleep(0.01)
