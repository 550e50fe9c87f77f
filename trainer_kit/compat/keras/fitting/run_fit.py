"""run_fit: runs a task of this door with callbacks of Keras and of trainer_kit, and returns the History."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_kit.compat.keras.fitting.callbacks import FitCallbacks, console_of, split_callbacks, with_history
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.run.runner import run_experiment


def run_fit(
    task: Any, config: ExperimentConfig, model: Any, model_dir: str,
    *, callbacks: Any, verbose: str | int, evaluates: bool, validates: Callable[[int], bool], **options: Any,
) -> Any:  # fmt: skip
    """Trains up to the end of the config's last epoch and returns the History of all epochs. Runs eagerly, on the host.

    Args:
      task: The task, created in the scope of the model's strategy.
      config: The config of the run; trainer.steps_per_epoch is set.
      model: The model that is trained.
      model_dir: The folder of the run.
      callbacks: Callbacks of Keras and of trainer_kit, as `Model.fit` takes them.
      verbose: 0 shows nothing on the console.
      evaluates: Whether there is validation data.
      validates: A function that returns whether the logs of an epoch, counted from 0, have an evaluation.
      **options: Further arguments of `run_experiment`.
    """
    native, of_keras = split_callbacks(callbacks)
    trainer = config.trainer
    steps = trainer.steps_per_epoch
    assert steps is not None  # run_config sets it
    data = task.build_inputs(config.task.train_data)
    around = FitCallbacks(with_history(of_keras, model), trainer.train_steps // steps, steps, verbose, validates, data)
    run_experiment(
        model.distribute_strategy, task, "train_and_eval" if evaluates else "train", config, model_dir,
        callbacks=[around, *native], console=console_of(of_keras, verbose), **options,
    )  # fmt: skip
    return around.finished_history(model, model_dir)
