"""Actions that need what a run is made of: made when it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainer_kit.callbacks.actions import Actions, keep_states
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
            super().__init__(**parts)
            actions = next(one for one in self.callbacks.members if isinstance(one, Actions))
            if self.trainer is not None and train_actions is not None:
                made = train_actions(
                    params=params,
                    trainer=self.trainer,
                    model_dir=model_dir,
                    checkpoint_manager=self.checkpoint_manager,
                )
                keep_states(self.trainer, made, "made action")
                actions.train_actions += made
            if self.evaluator is not None and eval_actions is not None:
                actions.eval_actions += eval_actions(params, self.evaluator, model_dir)

    return WithActions
