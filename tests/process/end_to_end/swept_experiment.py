"""The experiment that test_sweep.py sweeps; its config needs no TensorFlow."""

from __future__ import annotations

import trainer_kit
from trainer_kit import Config, DataConfig, ExperimentConfig, TrainerConfig


@trainer_kit.configclass
class SweptConfig(trainer_kit.TaskConfig):
    """The tiny task.

    Attributes:
      kind: `good`, `unlucky` for a model that cannot be built, or `bad` for a large loss.
    """

    kind: str = "good"
    width: int = 4
    train_data: DataConfig = DataConfig(is_training=True, global_batch_size=8, seed=7)
    validation_data: DataConfig = DataConfig(is_training=False, global_batch_size=8)


trainer_kit.register_task(SweptConfig, "tests.process.end_to_end.swept_task:SweptTask")


@trainer_kit.register_experiment("swept")
def swept() -> ExperimentConfig:
    """20 steps, saved and evaluated every 5 steps."""
    rate = {"type": "constant", "constant": {"learning_rate": 0.01}}
    optimizer_config = {"optimizer": {"type": "sgd"}, "learning_rate": rate}
    trainer: Config = TrainerConfig(train_steps=20, steps_per_loop=5).replace(
        summary_interval=5,
        checkpoint_interval=5,
        validation_interval=5,
        optimizer_config=optimizer_config,
        callbacks=[{"name": "tests_pause"}],
    )
    return ExperimentConfig(task=SweptConfig(), trainer=trainer)
