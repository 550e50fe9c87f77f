"""Checks train_actions and eval_actions before a run begins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer_kit.errors import UsageError

INSTEAD = {
    "EarlyStopping": "set trainer.early_stopping",
    "ModelCheckpoint": "set trainer.checkpoint_interval and trainer.best_checkpoint_eval_metric",
    "BackupAndRestore": "leave it out: a run resumes by itself from its newest checkpoint",
    "TensorBoard": "leave it out: summaries are written to model_dir; --profile traces steps",
    "CSVLogger": "leave it out: model_dir/metrics.jsonl has the metrics of each loop and evaluation",
    "TerminateOnNaN": "leave it out: a run ends when it diverges; see trainer.recovery_max_trials",
    "LearningRateScheduler": "set trainer.optimizer_config.learning_rate, or the callback set_by_function",
    "ReduceLROnPlateau": "name the callback reduce_on_plateau in trainer.callbacks",
    "ProgbarLogger": "leave it out: a run shows its progress",
}


def checked_actions(train_actions: Any, eval_actions: Any) -> tuple[list[Any], list[Any]]:
    """Returns both arguments as lists, even if they were iterators; None becomes an empty list.

    Raises:
      UsageError: for a Keras callback, naming what to use instead; for an action that cannot be called; for an
        argument that is not iterable.
    """
    return _listed("train_actions", train_actions), _listed("eval_actions", eval_actions)


def _listed(name: str, actions: Any) -> list[Any]:
    if actions is None:
        return []
    if isinstance(actions, (str, Mapping)) or not isinstance(actions, Iterable):
        raise UsageError(f"{name}: {type(actions).__name__} is not a list; give a list of functions that take the logs")
    listed = list(actions)
    for action in listed:
        if kind := keras_callback(action):
            instead = INSTEAD.get(kind, "give a function that takes the logs of each loop or evaluation")
            raise UsageError(f"{name}: {kind} is a Keras callback, and Keras callbacks are not supported; {instead}")
        if not callable(action):
            raise UsageError(f"{name}: {action!r:.60} cannot be called; an action is a function that takes the logs")
    return listed


def keras_callback(action: Any) -> str:
    """Returns the name of the Keras callback that `action`, an object or a class, is; "" if it is not one."""
    kind = action if isinstance(action, type) else type(action)
    for one in kind.__mro__:
        if one.__name__ == "Callback" and one.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow"):
            known = (base.__name__ for base in kind.__mro__ if base.__name__ in INSTEAD)
            return next(known, kind.__name__)
    return ""
