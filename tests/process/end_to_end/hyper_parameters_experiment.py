"""An experiment of test_callbacks.py: hyper-parameters that can be changed, and a hand that edits
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

import trainer_kit
from tests.process.end_to_end.killed_experiment import KilledConfig, KilledTask, build_killed


@trainer_kit.configclass
class ChangedConfig(KilledConfig):
    """The killed task."""


@trainer_kit.register_task(ChangedConfig)
class ChangedTask(KilledTask):
    """The killed task with a weight of the loss that can be changed."""

    def build_model(self) -> Any:
        """Returns the model."""
        self.loss_weight = tf.Variable(1.0, trainable=False)
        return super().build_model()

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        """Returns the weighted loss."""
        return self.loss_weight * super().build_losses(labels, model_outputs, aux_losses)

    def hyper_parameters(self) -> dict[str, tf.Variable]:
        """Returns the weight."""
        return {"loss_weight": self.loss_weight}


class Hand(trainer_kit.Callback):
    """Edits hyper_parameters.yaml at the end of the loop that ends at `step`, before set_from_file
    reads it.
    """

    def __init__(self, step: int, text: str) -> None:
        self._step = step
        self._text = text

    def loop_end(self, run: Any, logs: Any) -> None:
        """Writes the file."""
        if run.step == self._step:
            Path(run.directory, "hyper_parameters.yaml").write_text(self._text)


def rate(step: int) -> float:
    """Returns the rate of the other optimizer at a step."""
    return 0.01 / (1 + step // 20)


@trainer_kit.register_experiment("changed")
def build_changed() -> Any:
    """The killed experiment with two optimizers, and evaluations between the checkpoints."""
    sgd = {"type": "sgd", "sgd": {"momentum": 0.9}}
    variables = {"head": ("kernel",), "rest": (".",)}
    rates = {
        "head": {"type": "constant", "constant": {"learning_rate": 0.01}},
        "rest": {"type": "cosine", "cosine": {"initial_learning_rate": 0.01, "decay_steps": 100}},
    }
    optimizers = {
        name: {"optimizer": sgd, "learning_rate": rates[name], "variables": variables[name]}
        for name in variables
    }
    none = {"optimizer": {"type": None}, "learning_rate": {"type": None}}
    trainer = {
        "optimizer_config": none,
        "optimizers": optimizers,
        "checkpoint_interval": 15,
        "validation_interval": 10,
    }
    return build_killed().replace(task=ChangedConfig(), trainer=trainer)
