"""The experiment `char_lm`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

import trainer_kit
from trainer_kit import DataConfig, ExperimentConfig, OptimizationConfig, TrainerConfig

LOOP = 100
WARMUP = 100

PositiveInt = Annotated[int, Field(ge=1)]


@trainer_kit.configclass
class CharLmModelConfig(trainer_kit.Config):
    """The transformer.

    Attributes:
      context: The number of characters that the model sees at most, and that a window of text
        predicts.
      convolution: How many characters, the last one included, are joined into the first features of
        a position.
      layers: The number of blocks of attention and feed-forward.
      width: The number of features of a position.
      heads: The number of attention heads; width has to be a multiple of it.
    """

    context: PositiveInt = 128
    convolution: PositiveInt = 4
    layers: PositiveInt = 2
    width: PositiveInt = 128
    heads: PositiveInt = 4

    def rules(self) -> Iterator[tuple[str, str]]:
        """Heads share the width equally."""
        if self.width % self.heads:
            yield (
                "heads",
                f"{self.heads} heads cannot share a width of {self.width} equally; change one of"
                " them",
            )


@trainer_kit.configclass
class CharLmConfig(trainer_kit.TaskConfig):
    """Prediction of the next character of Python sources.

    Attributes:
      folder: The folder of the .py files; empty means the standard library of the Python that runs
        this.
      evaluated_windows: The number of windows of held-out text in an evaluation, evenly spread and
        always the same; 0 means all of them.
    """

    folder: str = ""
    evaluated_windows: Annotated[int, Field(ge=0)] = 1024
    model: CharLmModelConfig = CharLmModelConfig()
    train_data: DataConfig = DataConfig(global_batch_size=16, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=64, drop_remainder=False)


trainer_kit.register_task(CharLmConfig, "trainer_kit.experiments.char_lm.task:CharLmTask")


@trainer_kit.register_experiment("char_lm")
def char_lm(
    learning_rate: float = 4e-3,
    train_steps: int = 4000,
    layers: int = 2,
    width: int = 128,
    heads: int = 4,
) -> ExperimentConfig:
    """Returns the config of `char_lm`.

    AdamW, with a short warm-up and a cosine from `learning_rate` to a tenth of it.
    """
    cosine = {"initial_learning_rate": learning_rate, "decay_steps": train_steps, "alpha": 0.1}
    return ExperimentConfig(
        task=CharLmConfig(model=CharLmModelConfig(layers=layers, width=width, heads=heads)),
        trainer=TrainerConfig(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=5 * LOOP,
            checkpoint_interval=5 * LOOP,
            best_checkpoint_eval_metric="bits_per_character",
            best_checkpoint_metric_comp="lower",
            optimizer_config=OptimizationConfig().replace(
                optimizer={"type": "adamw", "adamw": {"gradient_clip_norm": 1.0}},
                learning_rate={"type": "cosine", "cosine": cosine},
                warmup={"type": "linear", "linear": {"warmup_steps": WARMUP}},
            ),
        ),
    )
