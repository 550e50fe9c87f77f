"""load, evaluate and predict: a compiled model with the weights of a run."""

from __future__ import annotations

import os
import zlib
from typing import Any, TypeVar

import keras
import tensorflow as tf

from trainer_kit.compat.keras.keras_callbacks import KerasCallbacks, split_callbacks
from trainer_kit.compat.keras.keras_task import FitTask
from trainer_kit.compat.keras.keras_types import Callbacks, CompiledModel
from trainer_kit.compat.keras.training_data import TrainingData, build_validation_data
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.info_json import read_info
from trainer_kit.evals.checkpoint_selection import select_checkpoint
from trainer_kit.inputs.sources.source_protocol import get_data_identity
from trainer_kit.run.runner import run_experiment
from trainer_kit.serving.model_loading import load_weights
from trainer_kit.typing import Model

AnyModel = TypeVar("AnyModel", bound=Model)


def load(model: AnyModel, model_dir: str, which: str | int | None = None) -> AnyModel:
    """Puts weights of a run into a built model, and returns the model.

    Runs eagerly, on the host.

    Args:
      model: A built model, as the run has trained it. It need not be compiled.
      model_dir: The folder of the run.
      which: best, latest, a step, or the path of a checkpoint. None: the best weights if the run
        keeps them, or else the latest.

    Raises:
      UsageError: When there is no such checkpoint, or it does not fit the model.
      StorageError: When the files are damaged.
    """
    selector = _resolve_checkpoint(model_dir, which)
    checkpoint = select_checkpoint(model_dir, selector, _best(model_dir))
    load_weights(model, checkpoint)
    return model


def evaluate(
    model: CompiledModel,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: str | int = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Callbacks = None,
    return_dict: bool = False,
    *,
    model_dir: str,
    which: str | int | None = None,
) -> float | list[float] | dict[str, float]:
    """Evaluates a compiled model with weights of a run, as `model.evaluate` does.

    The result is also recorded in `model_dir/evals`, once for each step and data. The model keeps
    the weights. Runs eagerly, on the host.

    Args:
      model: The compiled model.
      x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict: See `Model.evaluate`.
      model_dir: The folder of the run.
      which: See `load`.

    Returns:
      The logs by name if `return_dict`. Otherwise the loss, or a list of the loss and the metrics.

    Raises:
      UsageError: When there is no such checkpoint, or it does not fit the model.
    """
    native_callbacks, callbacks_of_keras = split_callbacks(callbacks)
    strategy = model.distribute_strategy
    with strategy.scope():
        examples = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
        data = build_validation_data(examples, batch_size, steps)
        # By this name records of evaluations distinguish arrays with other contents, and datasets
        # of other forms.
        checksum = zlib.crc32(repr(get_data_identity(data)).encode())
        data_name = f"data {checksum:08x}"
        task = FitTask(model, TrainingData(None, 0), data, model_dir, validation_name=data_name)

    batches = steps
    if not steps:
        # A dataset of unknown or infinite length has a negative cardinality.
        if isinstance(data, tf.data.Dataset):
            batches = int(data.cardinality())
        else:
            batches = data.batches_per_epoch
        if batches is not None and batches <= 0:
            batches = None

    params = {"epochs": 1, "steps": batches, "verbose": verbose}
    keras_callbacks = KerasCallbacks(callbacks_of_keras, params)
    config = ExperimentConfig(
        task=task.task_config, trainer=TrainerConfig(validation_steps=steps or -1)
    )
    _, logs = run_experiment(
        strategy,
        task,
        "eval",
        config,
        model_dir,
        checkpoint=_resolve_checkpoint(model_dir, which),
        callbacks=[keras_callbacks, *native_callbacks],
        console=keras_callbacks.console,
    )

    keras_logs: dict[str, float] = {}
    for name, value in logs.items():
        keras_logs["loss" if name == "validation_loss" else name] = float(value)
    if return_dict:
        return keras_logs

    # The values in the order in which Keras lists them, or the only value.
    names: list[str] = []
    for metric in model.metrics:
        # The compiled metrics of Keras 3 are parts of one metric.
        parts = getattr(metric, "metrics", None) or [metric]
        names += [part.name for part in parts]
    ordered = [name for name in names if name in keras_logs]
    others = sorted(keras_logs.keys() - set(ordered))
    values = [keras_logs[name] for name in [*ordered, *others]]
    if len(values) == 1:
        return values[0]
    return values


def predict(
    model: CompiledModel,
    x: Any,
    batch_size: int | None = None,
    *,
    model_dir: str,
    which: str | int | None = None,
    callbacks: Callbacks = None,
    **options: Any,
) -> Any:
    """Returns `model.predict(x, ...)` with weights of a run.

    The model keeps the weights. Runs eagerly, on the host.

    Args:
      model: A built model.
      x, batch_size, callbacks, **options: See `Model.predict`.
      model_dir: The folder of the run.
      which: See `load`.

    Raises:
      UsageError: When there is no such checkpoint, or it does not fit the model. Also for callbacks
        of trainer_kit.
    """
    native_callbacks, keras_callbacks = split_callbacks(callbacks)
    if native_callbacks:
        names = ", ".join(callback.name for callback in native_callbacks)
        raise UsageError(
            f"callbacks: {names} has no method around predictions; give callbacks of Keras to"
            " predict"
        )

    load(model, model_dir, which)
    return model.predict(x, batch_size=batch_size, callbacks=keras_callbacks, **options)


def _best(model_dir: str) -> str:
    """Returns the folder of the best weights."""
    return os.path.join(model_dir, TrainerConfig().best_checkpoint_export_subdir)


def _resolve_checkpoint(model_dir: str, which: str | int | None) -> str:
    """Returns the argument `checkpoint` of run_experiment for the argument `which` of `load`."""
    if which is not None:
        return str(which)
    best_folder = _best(model_dir)
    if read_info(best_folder) is None:
        return "latest"
    return "best"
