"""The config of a fit: what the arguments of `Model.fit` and the settings of `compile` are for the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_kit.compat.keras.data.training_data import TrainingData
from trainer_kit.compat.keras.fitting.arguments import check_frequency
from trainer_kit.compat.keras.fitting.callbacks import schedule
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig, TrainerConfig
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.evals.best.criterion import comparison_by_name
from trainer_kit.process.run_directory import RunDirectory

_LOG = logging.getLogger(__name__)
_COMPARISONS = {"min": "lower", "max": "higher"}
_LENGTH = "trainer.steps_per_epoch"


@dataclass(frozen=True)
class Evaluations:
    """The arguments of a fit about evaluations.

    Attributes:
      names: The names of the single numbers that an evaluation gives; None if there is no validation data.
      steps: The argument validation_steps.
      frequency: The argument validation_freq.
      best: The argument best.
      best_mode: The argument best_mode.

    Raises:
      UsageError: when the frequency cannot be used.
    """

    names: Sequence[str] | None
    steps: int | None
    frequency: int | Sequence[int]
    best: str | bool | None
    best_mode: str

    def __post_init__(self) -> None:
        check_frequency(self.frequency)

    @property
    def validates(self) -> Callable[[int], bool]:
        """A function that returns whether the logs of an epoch, counted from 0, have an evaluation."""
        return schedule(self.frequency)[0]

    def fields(self, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the fields of TrainerConfig."""
        return {
            "validation_steps": self.steps or -1,
            "validation_interval": steps_per_epoch * schedule(self.frequency)[1],
            **best_fields(self.best, self.best_mode, self.names),
        }


def task_config(kind: type[TaskConfig], batch_size: int) -> TaskConfig:
    """Returns the section of a task of this class; a full batch has `batch_size` examples."""
    return kind(
        train_data=DataConfig(global_batch_size=batch_size, is_training=True),
        validation_data=DataConfig(drop_remainder=False, is_training=False),
    )


def run_config(
    model: Any, task: TaskConfig, data: TrainingData, epochs: int, evaluations: Evaluations, options: dict[str, Any]
) -> ExperimentConfig:
    """Returns the config of a fit, and takes the options out of `options` that are fields of it.

    Args:
      model: The model.
      task: The section of the task.
      data: The training data.
      epochs: The number of epochs, from the first one on.
      evaluations: The arguments about evaluations.
      options: The further arguments of `fit`. `trainer`, `runtime` and the named fields of TrainerConfig replace what
        follows from the other arguments.

    Raises:
      UsageError: when an argument cannot be used.
      ConfigError: when a field has a wrong name or value.
    """
    trainer = {**evaluations.fields(data.steps_per_epoch), **_named_fields(options)}
    runtime = options.pop("runtime", None) or {}
    steps, eager = data.steps_per_epoch, bool(model.run_eagerly)
    every = trainer.get("checkpoint_interval", steps)
    found: dict[str, Any] = {
        "train_steps": epochs * steps,
        "steps_per_epoch": steps,
        "steps_per_loop": min(steps, every) if isinstance(every, int) else steps,
        "checkpoint_interval": every,
        "recovery_max_trials": -1,  # Keras goes on with a loss that is not finite
        **({"train_tf_function": False, "train_tf_while_loop": False, "eval_tf_function": False} if eager else {}),
    }
    compiles = bool(model.jit_compile) and model.distribute_strategy.num_replicas_in_sync == 1
    runtime = {"enable_xla": compiles and trainer.get("fuse_steps", 1) == 1, **runtime}
    return ExperimentConfig(
        task=task,
        trainer=TrainerConfig(**{**found, **trainer}),
        runtime=RuntimeConfig(**runtime),
    )


def check_epoch_length(config: ExperimentConfig, model_dir: str, allowed: Iterable[str]) -> None:
    """Refuses to go on with a run whose epochs have another number of steps: epochs are counted by their steps.

    Args:
      config: The config of the fit.
      model_dir: The folder of the run.
      allowed: The argument `allow_config_change` of fit.

    Raises:
      UsageError: when the numbers differ.
    """
    before, now = RunDirectory(model_dir, config.trainer).steps_per_epoch(), config.trainer.steps_per_epoch
    if before is None or before == now or _LENGTH in allowed:
        return
    raise UsageError(
        f"model_dir={model_dir!r}: an epoch of this run has {before} steps, and of this x, batch_size and "
        f"steps_per_epoch it has {now}; give the data of the run, or steps_per_epoch={before} if x has enough batches, "
        f"or another model_dir. allow_config_change=[{_LENGTH!r}] goes on at the step of the newest checkpoint, which "
        "need not be where an epoch of the new length begins"
    )


def best_fields(best: str | bool | None, mode: str, names: Sequence[str] | None) -> dict[str, str]:
    """Returns the fields of TrainerConfig for the best checkpoint; none if no best is kept.

    Args:
      best: The argument `best` of fit.
      mode: The argument `best_mode` of fit.
      names: See Evaluations.

    Raises:
      UsageError: when there is no such log, or its name does not tell which values are better.
    """
    known = [f"val_{name}" for name in names or ()]
    if best is None and names is not None and "val_loss" not in known:
        _LOG.info("no best weights are kept, since an evaluation gives no loss; best= may name another of its logs")
    name = ("val_loss" if "val_loss" in known else "") if best is None else best
    if not name:
        return {}
    if names is None:
        raise UsageError(
            f"best={best!r}: there is no validation data, and the best weights are those of an evaluation; give it, or "
            "best=False to keep no best weights"
        )
    if not isinstance(name, str) or name not in known:
        raise UsageError(
            f"best={best!r}: an evaluation gives no such number. best=False keeps no best weights, and what a callback "
            "adds to the logs is for keras.callbacks.ModelCheckpoint(monitor=...); "
            f"{suggestion(str(name), known)}"
        )
    name = name.removeprefix("val_")
    if mode not in ("auto", *_COMPARISONS):
        raise UsageError(f"best_mode={mode!r}: give 'min', 'max' or 'auto'")
    comparison = comparison_by_name(name) if mode == "auto" else _COMPARISONS[mode]
    if comparison is None:
        raise UsageError(
            f"best={best!r}: the name does not tell whether a lower or a higher value is better; give "
            "best_mode='min' or best_mode='max'"
        )
    metric = "validation_loss" if name == "loss" else name
    return {"best_checkpoint_eval_metric": metric, "best_checkpoint_metric_comp": comparison}


def _named_fields(options: dict[str, Any]) -> Mapping[str, Any]:
    """Takes the fields of TrainerConfig out of the options of fit."""
    named = {name: options.pop(name, None) for name in ("checkpoint_interval", "fuse_steps")}
    return {**(options.pop("trainer", None) or {}), **{name: one for name, one in named.items() if one is not None}}
