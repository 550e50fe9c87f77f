"""Actions that need what a run is made of: made when it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_kit.run import build
from trainer_kit.run.controller import Controller


def actions_of(
    train_actions: Callable[..., Any] | None, eval_actions: Callable[..., Any] | None, params: Any, model_dir: str
) -> type[Controller]:
    """Returns a Controller that adds the actions of two factories to those it is given.

    Args:
      train_actions: called with params, trainer, model_dir and checkpoint_manager, all by name; None: no more actions.
      eval_actions: called with params, evaluator and model_dir; None: no more actions.
      params: for the factories.
      model_dir: for the factories.
    """
    if train_actions is None and eval_actions is None:
        return Controller

    class WithActions(Controller):
        """Drives a run, with the actions of the factories."""

        def __init__(self, **parts: Any) -> None:
            trainer, evaluator = parts["trainer"], parts["evaluator"]
            if trainer is not None and train_actions is not None:
                manager = parts["checkpoint_manager"]
                made = train_actions(params=params, trainer=trainer, model_dir=model_dir, checkpoint_manager=manager)
                build.keep_states(trainer, made, "made action")
                parts["train_actions"] = [*(parts["train_actions"] or []), *made]
            if evaluator is not None and eval_actions is not None:
                parts["eval_actions"] = [*(parts["eval_actions"] or []), *eval_actions(params, evaluator, model_dir)]
            super().__init__(**parts)

    return WithActions
