"""The entry function of each mode, which drives the controller of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.evals.continuous_eval import Sidecar
from trainer_kit.evals.run_history import RunHistory


@dataclass(frozen=True)
class BuiltRun:
    """The parts of a run that a mode's entry uses. In modes that train, the newest checkpoint is restored.

    Attributes:
      config: The experiment's config.
      controller: A Controller or an OrbitController.
      checkpoint: The path that mode eval evaluates; "" for the weights as the task initializes them.
      history: The history of the run.
      sidecar: The view of the training run in mode continuous_eval; None in other modes.
    """

    config: ExperimentConfig
    controller: Any
    checkpoint: str
    history: RunHistory
    sidecar: Sidecar | None = None


def _train(run: BuiltRun) -> dict[str, Any]:
    run.controller.train(steps=run.config.trainer.train_steps)
    return {}


def _eval(run: BuiltRun) -> dict[str, Any]:
    if run.checkpoint:
        run.controller.restore_checkpoint(run.checkpoint)
    else:
        run.controller.evaluator.initialize()
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _train_and_eval(run: BuiltRun) -> dict[str, Any]:
    options, controller = run.config.trainer, run.controller
    logs = controller.train_and_evaluate(
        train_steps=options.train_steps,
        eval_steps=options.validation_steps,
        eval_interval=options.validation_interval,
    )
    if controller.stopping:
        return dict(logs)
    recorded = run.history.metrics_at(controller.run.step)  # evaluated before a restart
    sets = run.history.ledger.sets
    if logs or sets:  # the record may have the validation sets of an earlier config
        recorded = {name: metrics for name, metrics in recorded.items() if name in sets}
    if recorded:
        controller.evaluator.add_best(recorded)
    return {**recorded, **logs}


def _train_and_post_eval(run: BuiltRun) -> dict[str, Any]:
    _train(run)
    if run.controller.stopping:
        return {}
    return dict(run.controller.evaluate(steps=run.config.trainer.validation_steps))


def _continuous_eval(run: BuiltRun) -> dict[str, Any]:
    options, sidecar = run.config.trainer, run.sidecar
    assert sidecar is not None
    sidecar.begin()
    logs = run.controller.evaluate_continuously(
        steps=options.validation_steps,
        timeout=options.continuous_eval_timeout,
        timeout_fn=sidecar.finished,
        watched=sidecar,
        newest_only=options.continuous_eval.policy == "latest",
    )
    return dict(logs or sidecar.last_metrics())


MODE_ENTRIES: dict[str, Callable[[BuiltRun], dict[str, Any]]] = {
    "train": _train,
    "eval": _eval,
    "train_and_eval": _train_and_eval,
    "train_and_post_eval": _train_and_post_eval,
    "continuous_eval": _continuous_eval,
}
