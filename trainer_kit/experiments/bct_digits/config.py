"""The experiment `bct_digits`, as a config. Imports no TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

import trainer_kit
from trainer_kit import (
    DataConfig,
    ExperimentConfig,
    OptimizationConfig,
    RuntimeConfig,
    TrainerConfig,
)

LOOP = 100
FIVE_DIGITS = (0, 1, 2, 3, 4)
Digits = tuple[Annotated[int, Field(ge=0, le=9)], ...]
Size = Annotated[int, Field(ge=1)]


@trainer_kit.configclass
class EmbeddingNetConfig(trainer_kit.Config):
    """A convolutional net that embeds an image, and a dense classifier of embeddings.

    Attributes:
      width: The number of filters of the first convolution; the other two have twice as many.
      digits: The digits that the classifier tells apart, and that the net is trained on.
    """

    width: Size = 8
    digits: Digits = FIVE_DIGITS

    def rules(self) -> Iterator[tuple[str, str]]:
        """Checks that there are classes to tell apart."""
        if len(set(self.digits)) != len(self.digits) or len(self.digits) < 2:
            yield "digits", f"is {list(self.digits)}; give two or more digits, each once"


@trainer_kit.configclass
class OldModelConfig(trainer_kit.Config):
    """The model that the new one has to be compatible with.

    Attributes:
      run: The folder of its run. Empty: there is no old model.
      net: Its net, as that run has it in task.net.
      influence_weight: The weight of the influence loss; 0 trains the new model on its own.
    """

    run: str = ""
    net: EmbeddingNetConfig = EmbeddingNetConfig()
    influence_weight: Annotated[float, Field(ge=0)] = 1.0


@trainer_kit.configclass
class BctDigitsConfig(trainer_kit.TaskConfig):
    """Embeddings of 8 x 8 images of digits, by which images of the same digit are found.

    Attributes:
      net: The net that is trained.
      embedding_size: The number of values in an embedding. Old and new embeddings are compared, so
        both have it.
      old_model: The model whose embeddings are already in the gallery.
    """

    net: EmbeddingNetConfig = EmbeddingNetConfig()
    embedding_size: Size = 32
    old_model: OldModelConfig = OldModelConfig()
    train_data: DataConfig = DataConfig(global_batch_size=64, is_training=True, seed=1)
    validation_data: DataConfig = DataConfig(global_batch_size=360, drop_remainder=False)


trainer_kit.register_task(BctDigitsConfig, "trainer_kit.experiments.bct_digits.task:BctDigitsTask")


@trainer_kit.register_experiment("bct_digits")
def bct_digits(
    learning_rate: float = 3e-3, train_steps: int = 600, seed: int = 0
) -> ExperimentConfig:
    """Returns the config of `bct_digits`.

    Adam, with a cosine from `learning_rate` to a hundredth of it.
    """
    cosine = {"initial_learning_rate": learning_rate, "decay_steps": train_steps, "alpha": 0.01}
    return ExperimentConfig(
        task=BctDigitsConfig(),
        runtime=RuntimeConfig(random_seed=seed),
        trainer=TrainerConfig().replace(
            train_steps=train_steps,
            steps_per_loop=LOOP,
            summary_interval=LOOP,
            validation_interval=2 * LOOP,
            checkpoint_interval=2 * LOOP,
            best_checkpoint_eval_metric="retrieval",
            optimizer_config=OptimizationConfig().replace(
                optimizer={"type": "adam"},
                learning_rate={"type": "cosine", "cosine": cosine},
            ),
        ),
    )
