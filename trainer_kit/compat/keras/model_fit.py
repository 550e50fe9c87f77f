"""fit: `Model.fit` on trainer_kit's engine, with the same arguments and the same History."""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict

import keras
import tensorflow as tf

from trainer_kit.compat.keras.keras_callbacks import FitCallbacks, split_callbacks
from trainer_kit.compat.keras.keras_task import FitTask
from trainer_kit.compat.keras.keras_types import Callbacks, ClassWeight, CompiledModel, History
from trainer_kit.compat.keras.step_preparation import is_overridden
from trainer_kit.compat.keras.training_data import build_training_data, build_validation_data
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.evals.best.criterion import guess_comparison
from trainer_kit.files import follow_links
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import is_op_determinism_enabled
from trainer_kit.runtime.keras_internals import is_keras_2_model, train_validation_split

_LOG = logging.getLogger(__name__)
_OPTIONS = ("trainer", "runtime")

# The fields of TrainerConfig that are arguments of `fit`, too.
_FIELDS = ("checkpoint_interval", "fuse_steps")

# The arguments of run_experiment that a caller of `fit` cannot pass on.
_EXCLUDED_RUN_ARGUMENTS = {"trainer", "callbacks", "console", "checkpoint", "eval_name"}

_COMPARISONS = {"min": "lower", "max": "higher"}
_EPOCH_LENGTH_FIELD = "trainer.steps_per_epoch"


def fit(
    model: CompiledModel,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: str | int = "auto",
    callbacks: Callbacks = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: ClassWeight | None = None,
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
) -> History:
    """Trains a compiled model as `model.fit` does, in a folder from which a stopped run resumes.

    The arguments before `model_dir` are those of `Model.fit`, with the same meaning, except for
    two. `epochs` is a total: a program that is started again trains the remaining epochs.
    `verbose` shows a line for each epoch. The model and its optimizers are trained in place, in
    the strategy in whose scope the model was created.

    Runs eagerly, on the host.

    Args:
      model: A compiled model of Keras 3 or tf_keras.
      x, y, batch_size, epochs, verbose: See `Model.fit`.
      callbacks: Callbacks of Keras and of trainer_kit.
      validation_split, validation_data, shuffle, class_weight, sample_weight: See `Model.fit`.
      initial_epoch: Has to be 0. The newest checkpoint in `model_dir` determines the epoch.
      steps_per_epoch, validation_steps, validation_batch_size: See `Model.fit`.
      validation_freq: See `Model.fit`.
      model_dir: The folder of the run.
      best: The log that decides which weights `model_dir/best_ckpt` keeps, such as
        "val_accuracy". None: "val_loss" if an evaluation gives it. False: none are kept.
      best_mode: Whether a lower value of `best` is better ("min") or a higher one ("max"). With
        "auto" its name decides.
      **options: `trainer` and `runtime`, which are dicts of fields of TrainerConfig and
        RuntimeConfig. `checkpoint_interval` and `fuse_steps`, which are fields of TrainerConfig,
        too. Further arguments of `run_experiment`, such as allow_config_change. A checkpoint is
        saved after each epoch by default.

    Returns:
      The History, with all epochs of the run, including those before a restart.

    Raises:
      UsageError: When an argument cannot be used, or when epochs of the run in `model_dir` have
        another length.
      ValueError: For data that Keras cannot read, with Keras's message.
      PreemptedError, InterruptedRunError: When SIGTERM or Ctrl-C stopped the run, after it saved.
    """
    # A model of tf_keras does not say whether it is compiled.
    if not getattr(model, "compiled", True):
        raise UsageError(
            f"the model {model.name!r} is not compiled; call model.compile(optimizer, loss)"
            " before fit"
        )
    if getattr(model, "optimizer", None) is None and not is_overridden(model, "train_step"):
        raise UsageError(
            f"the model {model.name!r} is compiled without an optimizer, so that it can only"
            ' evaluate and predict; give one to train it: model.compile(optimizer="adam", ...)'
        )
    if initial_epoch:
        raise UsageError(
            f"initial_epoch={initial_epoch}: a run begins with the epoch after its newest"
            " checkpoint; leave it out"
        )
    if keras.config.max_epochs() or keras.config.max_steps_per_epoch():
        raise UsageError(
            "keras.config limits the epochs or their steps; give fit epochs and steps_per_epoch"
            " instead"
        )
    check_arguments(fit, x, epochs, options)

    if validation_split and validation_data is None:
        (x, y, sample_weight), validation_data = train_validation_split(
            (x, y, sample_weight), validation_split
        )

    with model.distribute_strategy.scope():
        data = build_training_data(
            x,
            y,
            sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
            is_keras_2=is_keras_2_model(model),
        )
        validation = None
        if validation_data is not None:
            validation = build_validation_data(
                validation_data, validation_batch_size or batch_size, validation_steps
            )
    return run_fit(
        FitTask(model, data, validation, model_dir),
        epochs,
        validation_steps=validation_steps,
        validation_freq=validation_freq,
        callbacks=callbacks,
        verbose=verbose,
        best=best,
        best_mode=best_mode,
        **options,
    )


def check_arguments(
    function: Callable[..., object],
    x: object,
    epochs: SupportsIndex,
    options: Mapping[str, Any],
) -> None:
    """Checks the arguments of `fit` or `train_loop`.

    Errors use the names of Keras. Runs eagerly, on the host.

    Args:
      function: The function that was called.
      x: The training data.
      epochs: The number of epochs, an integer of any kind.
      options: The further arguments: those of `run_fit` and of `run_experiment`, or settings of
        the run.

    Raises:
      UsageError: For a name that no argument has, for a number of epochs that is not an integer,
        or for a dataset that cannot be used.
    """
    # The arguments of run_experiment without a default are those that `run_fit` gives it.
    names = [*inspect.signature(function).parameters, *_OPTIONS, *_FIELDS]
    for parameter in inspect.signature(run_experiment).parameters.values():
        is_optional = parameter.default is not parameter.empty
        if is_optional and parameter.name not in _EXCLUDED_RUN_ARGUMENTS:
            names.append(parameter.name)
    names.remove("options")
    for name in options:
        if name not in names:
            advice = suggest_names(name, names, max_listed=len(names))
            raise UsageError(f"{function.__name__} has no argument {name!r}; {advice}")

    try:
        operator.index(epochs)
    except TypeError:
        raise UsageError(f"epochs={epochs!r} is not a whole number; give one, such as 10") from None

    if not isinstance(x, tf.data.Dataset):
        return
    runtime = options.get("runtime") or {}
    if runtime.get("deterministic_ops") and not is_op_determinism_enabled():
        raise UsageError(
            "runtime deterministic_ops comes too late for the dataset, which has been made without"
            " it; call tf.config.experimental.enable_op_determinism() at the start of the program"
        )
    for spec in tf.nest.flatten(x.element_spec):
        if isinstance(spec, tf.TensorSpec) and spec.shape.rank == 0:
            raise UsageError(
                "x is a dataset of single examples: a part of an element has the shape (); give"
                " batches, such as x.batch(32)"
            )


def run_fit(
    task: FitTask,
    epochs: int,
    *,
    validation_steps: int | None,
    validation_freq: int | Sequence[int],
    callbacks: Callbacks,
    verbose: str | int,
    best: str | bool | None,
    best_mode: str,
    **options: Any,
) -> History:
    """Trains up to the end of the last epoch and returns the History of all epochs.

    Runs eagerly, on the host.

    Args:
      task: The task, with model, data and folder of the run.
      epochs: The number of epochs, counted from the first one of the run.
      validation_steps, validation_freq, callbacks, verbose, best, best_mode: See `fit`.
      **options: See `fit`. `trainer`, `runtime` and the named fields of TrainerConfig replace what
        follows from the other arguments.

    Raises:
      UsageError: When an argument cannot be used, or when epochs of the run in the folder have
        another length.
      ConfigError: When a field has a wrong name or value.
    """
    model = task.model
    steps = task.data.steps_per_epoch
    frequencies = [validation_freq] if isinstance(validation_freq, int) else list(validation_freq)
    if not frequencies or min(frequencies) < 1:
        raise UsageError(
            f"validation_freq={validation_freq!r}: give the number of epochs from one evaluation to"
            " the next, at least 1, or a list of the epochs to evaluate after, such as [1, 5, 10]"
        )

    evaluation_names = None
    if task.validation is not None:
        with model.distribute_strategy.scope():
            evaluation_names = task.get_evaluation_metric_names()

    # The engine evaluates at a fixed interval. The greatest common divisor of a list of epochs
    # meets all of them, and epochs in between are evaluated, too.
    validation_interval = steps * math.gcd(*frequencies)
    fields: dict[str, Any] = {
        "train_steps": operator.index(epochs) * steps,
        "steps_per_epoch": steps,
        "checkpoint_interval": steps,
        "validation_steps": validation_steps or -1,
        "validation_interval": validation_interval,
        "recovery_max_trials": -1,  # Keras continues with a loss that is not finite
        **_best_fields(best, best_mode, evaluation_names),
    }
    if model.run_eagerly:
        fields |= {
            "train_tf_function": False,
            "train_tf_while_loop": False,
            "eval_tf_function": False,
        }
    fields |= options.pop("trainer", None) or {}
    for name in _FIELDS:
        if options.get(name) is not None:
            fields[name] = options.pop(name)

    interval = fields["checkpoint_interval"]
    steps_per_loop = steps
    if isinstance(interval, int):
        steps_per_loop = min(steps, interval)
    fields.setdefault("steps_per_loop", steps_per_loop)

    replicas = model.distribute_strategy.num_replicas_in_sync
    compiles = bool(model.jit_compile) and replicas == 1
    runtime = {
        "enable_xla": compiles and fields.get("fuse_steps", 1) == 1,
        **(options.pop("runtime", None) or {}),
    }
    config = ExperimentConfig(
        task=task.task_config,
        trainer=TrainerConfig(**fields),
        runtime=RuntimeConfig(**runtime),
    )

    model_dir = follow_links(task.logging_dir)
    recorded_length = RunDirectory(model_dir, config.trainer).read_steps_per_epoch()
    epoch_length = config.trainer.steps_per_epoch
    length_differs = recorded_length not in (None, epoch_length)
    if length_differs and _EPOCH_LENGTH_FIELD not in options.get("allow_config_change", ()):
        raise UsageError(
            f"model_dir={model_dir!r}: an epoch of this run has {recorded_length} steps, and of"
            f" this x, batch_size and steps_per_epoch it has {epoch_length}; give the data of the"
            f" run, or steps_per_epoch={recorded_length} if x has enough batches, or another"
            f" model_dir. allow_config_change=[{_EPOCH_LENGTH_FIELD!r}] goes on at the step of the"
            " newest checkpoint, which need not be where an epoch of the new length begins"
        )

    native_callbacks, keras_callbacks = split_callbacks(callbacks)
    total_epochs = config.trainer.train_steps // (config.trainer.steps_per_epoch or steps)
    params = {"epochs": total_epochs, "steps": steps, "verbose": verbose}
    fit_callbacks = FitCallbacks(keras_callbacks, model, params, validation_freq, task.data.batches)
    run_experiment(
        model.distribute_strategy,
        task,
        "train" if task.validation is None else "train_and_eval",
        config,
        model_dir,
        callbacks=[fit_callbacks, *native_callbacks],
        console=fit_callbacks.console,
        **options,
    )
    return fit_callbacks.finish(model, model_dir)


class BestFields(TypedDict, total=False):
    """The fields of TrainerConfig for the best checkpoint."""

    best_checkpoint_eval_metric: str
    best_checkpoint_metric_comp: str


def _best_fields(best: str | bool | None, mode: str, names: Sequence[str] | None) -> BestFields:
    """Returns the fields of TrainerConfig for the best checkpoint, or none if no best is kept.

    Args:
      best: The argument `best` of fit.
      mode: The argument `best_mode` of fit.
      names: The names of the single numbers that an evaluation gives. None if there is no
        validation data.

    Raises:
      UsageError: When there is no such log, or its name does not say which values are better.
    """
    logs = [f"val_{name}" for name in names or ()]
    if best is None and names is not None and "val_loss" not in logs:
        _LOG.info(
            "no best weights are kept, since an evaluation gives no loss; best= may name another of"
            " its logs"
        )
    if best is None and "val_loss" in logs:
        best = "val_loss"
    if not best:
        return {}

    if names is None:
        raise UsageError(
            f"best={best!r}: there is no validation data, and the best weights are those of an"
            " evaluation; give it, or best=False to keep no best weights"
        )
    if not isinstance(best, str) or best not in logs:
        raise UsageError(
            f"best={best!r}: an evaluation gives no such number. best=False keeps no best weights,"
            " and what a callback adds to the logs is for"
            f" keras.callbacks.ModelCheckpoint(monitor=...); {suggest_names(str(best), logs)}"
        )
    if mode not in ("auto", *_COMPARISONS):
        raise UsageError(f"best_mode={mode!r}: give 'min', 'max' or 'auto'")

    name = best.removeprefix("val_")
    comparison = guess_comparison(name) if mode == "auto" else _COMPARISONS[mode]
    if comparison is None:
        raise UsageError(
            f"best={best!r}: the name does not tell whether a lower or a higher value is better;"
            " give best_mode='min' or best_mode='max'"
        )
    metric = "validation_loss" if name == "loss" else name
    return {"best_checkpoint_eval_metric": metric, "best_checkpoint_metric_comp": comparison}
