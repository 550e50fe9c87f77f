"""fit: `Model.fit` on trainer_kit's engine, with the same arguments and the same History."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import keras

from trainer_kit.compat.keras.experiments import KerasTaskConfig
from trainer_kit.compat.keras.fit_run import check_arguments, number_of_epochs, run_fit, task_config
from trainer_kit.compat.keras.preparation import is_overridden
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.compat.keras.task import KerasTask
from trainer_kit.compat.keras.training_data import training_data, validation_dataset
from trainer_kit.errors import UsageError
from trainer_kit.runtime.keras_internals import of_keras_2, train_validation_split


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | Sequence[int] = 1,
    *,
    model_dir: str,
    best: str | bool | None = None,
    best_mode: str = "auto",
    **options: Any,
) -> Any:
    """Trains a compiled model as `model.fit` does, in a folder from which a stopped run resumes.

    Runs eagerly, on the host.

    The arguments before `model_dir` are those of `Model.fit`, and mean the same, but for two: `epochs` is a total, so
    that a program that is started again trains the epochs that are left; and `verbose` shows a line for each epoch.
    The model and its optimizers are trained themselves, in the strategy in whose scope the model was made.

    Args:
      model: A compiled model of Keras 3 or tf_keras.
      x, y, batch_size, epochs, verbose, validation_split, validation_data, shuffle, class_weight, sample_weight,
        steps_per_epoch, validation_steps, validation_batch_size, validation_freq: See `Model.fit`.
      callbacks: Callbacks of Keras and of trainer_kit.
      initial_epoch: Has to be 0: the newest checkpoint in `model_dir` tells the epoch.
      model_dir: The folder of the run.
      best: The log that decides which weights `model_dir/best_ckpt` keeps, such as "val_accuracy". None: "val_loss" if
        an evaluation gives it. False: none are kept.
      best_mode: Whether a lower value of `best` is better ("min") or a higher one ("max"); "auto": its name tells.
      **options: `trainer` and `runtime`, dicts of fields of TrainerConfig and RuntimeConfig; `checkpoint_interval` and
        `fuse_steps`, which are fields of TrainerConfig, too; and further arguments of `run_experiment`, such as
        allow_config_change. A checkpoint is saved after each epoch by default.

    Returns:
      The History, with all epochs of the run, also those before a restart.

    Raises:
      UsageError: when an argument cannot be used, or epochs of the run in `model_dir` have another length.
      ValueError: for data that Keras cannot read, with Keras's message.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the run, after it saved.
    """
    if not getattr(model, "compiled", True):  # tf_keras does not tell
        raise UsageError(f"the model {model.name!r} is not compiled; call model.compile(optimizer, loss) before fit")
    if getattr(model, "optimizer", None) is None and not is_overridden(model, "train_step"):
        raise UsageError(
            f"the model {model.name!r} is compiled without an optimizer, so that it can only evaluate and predict; "
            'give one to train it: model.compile(optimizer="adam", ...)'
        )
    if initial_epoch:
        raise UsageError(
            f"initial_epoch={initial_epoch}: a run begins with the epoch after its newest checkpoint; leave it out"
        )
    if keras.config.max_epochs() or keras.config.max_steps_per_epoch():
        raise UsageError("keras.config limits the epochs or their steps; give fit epochs and steps_per_epoch instead")
    check_arguments(fit, x, options)
    number_of_epochs(epochs)
    random_state = random.getstate()
    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = train_validation_split((x, y, sample_weight), validation_split)

    with model.distribute_strategy.scope():
        data = training_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            random_state=random_state,
            keras_2=of_keras_2(model),
        )
        validation = None
        if validation_data is not None:
            validation = validation_dataset(validation_data, validation_batch_size or batch_size, validation_steps)
        task = KerasTask(
            task_config(KerasTaskConfig, data.batch_size),
            model_dir,
            build=lambda: model,
            data=lambda params: data.batches if params.is_training else validation,
            ordered=data.batches if isinstance(data.batches, PyDatasetEpochs) else None,
        )
        evaluation_names = None if validation is None else task.evaluation_names(model)
    return run_fit(
        task,
        model,
        data,
        epochs,
        model_dir,
        evaluation_names=evaluation_names,
        validation_steps=validation_steps,
        validation_freq=validation_freq,
        callbacks=callbacks,
        verbose=verbose,
        best=best,
        best_mode=best_mode,
        **options,
    )
