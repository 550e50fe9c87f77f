"""train_loop: the functions of a loop by hand on trainer_kit's engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.data.dataset_passes import DatasetPasses, needs_new_iterators
from trainer_kit.compat.keras.data.training_data import TrainingData, training_data
from trainer_kit.compat.keras.fitting.arguments import check_dataset, check_options
from trainer_kit.compat.keras.fitting.run_config import Evaluations, run_config, task_config
from trainer_kit.compat.keras.fitting.run_fit import run_fit
from trainer_kit.compat.keras.loop.steps import LoopSteps
from trainer_kit.compat.keras.loop.task import LoopTask, LoopTaskConfig
from trainer_kit.errors import UsageError
from trainer_kit.files import follow_links
from trainer_kit.inputs.sources.base import Source


def train_loop(
    train_step: Callable[..., Any], train_ds: Any, *, epochs: int, model: Any, optimizer: Any,
    metrics: Sequence[Any] | None = None, test_step: Callable[..., Any] | None = None, val_dataset: Any = None,
    val_metrics: Sequence[Any] | None = None, model_dir: str,
    steps_per_epoch: int | None = None, validation_steps: int | None = None, validation_freq: int | Sequence[int] = 1,
    callbacks: Any = None, verbose: str | int = "auto",
    best: str | bool | None = None, best_mode: str = "auto", **options: Any,
) -> Any:  # fmt: skip
    """Does what `for epoch ...: for batch in train_ds: train_step(*batch)` does, in a folder from which it resumes.

    Runs eagerly, on the host. The functions run in graph, decorated with tf.function or not, with the parts of a batch
    as their arguments. They use model, optimizer, loss and metrics that are around them, which are trained themselves.

    Args:
      train_step: Trains on a batch and returns its loss, `(loss, ...)`, or a dict of scalars to report with "loss".
      train_ds: A tf.data.Dataset of batches, read from its start in each epoch, also with steps_per_epoch; or what else
        `fit` takes as x.
      epochs: The total number of epochs, also of those before a restart.
      model: The model that train_step trains: a Keras model.
      optimizer: The optimizer that train_step applies; a dict of optimizers by name if there are several.
      metrics: The metrics that train_step updates. They are reset where an epoch begins.
      test_step: Evaluates a batch; it may return the same.
      val_dataset: A tf.data.Dataset of batches for test_step, read once at the end of each epoch.
      val_metrics: The metrics that test_step updates. They are reset before each evaluation.
      model_dir: The folder of the run.
      steps_per_epoch, validation_steps, validation_freq, callbacks, verbose, best_mode, **options: See `fit`.
      best: See `fit`. None: "val_loss" if test_step returns a loss.

    Returns:
      A History with `loss`, the metrics by name, and `val_` before those of the evaluation, for all epochs of the run.
      `loss` and other scalars are means over the examples of the epoch.

    Raises:
      UsageError: when an argument cannot be used.
      PreemptedError, InterruptedRunError: when SIGTERM or Ctrl-C stopped the run, after it saved.
    """
    check_options(train_loop, options)
    model_dir = follow_links(model_dir)
    check_dataset(train_ds, options)
    if (test_step is None) != (val_dataset is None):
        missing = "val_dataset" if val_dataset is None else "test_step"
        raise UsageError(f"{missing} is missing: an evaluation needs test_step and val_dataset; give both or none")
    strategy = _one_replica(model)
    data = _epochs(train_ds, steps_per_epoch)
    steps = LoopSteps(train_step, test_step, model, optimizer, tuple(metrics or ()), tuple(val_metrics or ()))
    with strategy.scope():
        steps.trace(_spec(data.batches), None if val_dataset is None else _spec(val_dataset))
        find = lambda params: data.batches if params.is_training else val_dataset  # noqa: E731
        params = task_config(LoopTaskConfig, data.batch_size)
        task = LoopTask(params, model_dir, steps=steps, data=find)
    names = None if val_dataset is None else steps.evaluation_names
    evaluations = Evaluations(names, validation_steps, validation_freq, best, best_mode)
    options["runtime"] = {"enable_xla": False, **(options.get("runtime") or {})}
    config = run_config(model, params, data, epochs, evaluations, options)
    if callbacks and getattr(model, "optimizer", None) is None and not _has_average(optimizer):
        model.optimizer = optimizer  # where callbacks look for the learning rate
    return run_fit(
        task, config, model, model_dir, callbacks=callbacks, verbose=verbose,
        evaluates=val_dataset is not None, validates=evaluations.validates, **options,
    )  # fmt: skip


def _one_replica(model: Any) -> tf.distribute.Strategy:
    """Returns the strategy of the model.

    Raises:
      UsageError: when it is no Keras model, or has several replicas: a function that was written for one does not
        divide its loss by their number, and would train with a multiple of the gradient.
    """
    if not hasattr(model, "distribute_strategy"):
        raise UsageError(
            f"model is a {type(model).__name__}; train_loop takes a Keras model. Make it one, by subclassing "
            "keras.Model; or write a trainer_kit.Task, which trains a tf.Module, too"
        )
    strategy: tf.distribute.Strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"the model is on {strategy.num_replicas_in_sync} replicas; train_loop runs the functions of a loop by "
            "hand on one. Make the model outside of the strategy's scope; or override train_step of the model and call "
            "fit, which divides the loss by the number of replicas"
        )
    return strategy


def _has_average(optimizer: Any) -> bool:
    """Whether weights would become averages at the end of the training, as in `fit` and not in a loop by hand."""
    return isinstance(optimizer, Mapping) or bool(getattr(optimizer, "use_ema", False))


def _epochs(train_ds: Any, steps_per_epoch: int | None) -> TrainingData:
    """Returns the epochs of a loop by hand over the data.

    A loop makes one iterator in each epoch, `Model.fit` two, so that fit reads every second order of a shuffle. A loop
    that leaves an epoch after some steps begins the next one at the start of the data. Data without end goes on.
    """
    data = training_data(train_ds, steps_per_epoch=steps_per_epoch)
    if not isinstance(train_ds, tf.data.Dataset):
        return data
    ends = int(train_ds.cardinality()) != tf.data.INFINITE_CARDINALITY
    epoch = train_ds.take(steps_per_epoch) if steps_per_epoch and ends else train_ds
    if ends and needs_new_iterators(epoch):
        return dataclasses.replace(data, batches=DatasetPasses(epoch, data.steps_per_epoch, given=train_ds))
    return dataclasses.replace(data, batches=epoch.repeat())


def _spec(batches: Any) -> Any:
    return (batches.at(0) if isinstance(batches, Source) else batches).element_spec
