"""MultiTaskEvaluator: evaluates several tasks, with the signature of official.modeling.multitask's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from trainer_kit.compat.model_garden.multitask.base_trainer import sections_of
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask, build_parts
from trainer_kit.compat.model_garden.multitask.evaluation import evaluate_tasks
from trainer_kit.compat.model_garden.training.trainer import Trainer


class MultiTaskEvaluator(Trainer):
    """Evaluates several tasks of Model Garden, and trains none. Made in strategy scope.

    Args:
      eval_tasks: of Model Garden.
      model: a MultiTaskBaseModel, or one model for all tasks.
      global_step: int64 scalar; None: a new one.
      eval_steps: batches in an evaluation by task; all others go by what `evaluate` is asked for.
      checkpoint_exporter: keeps the best checkpoint.
      config: the experiment's, of Model Garden or of trainer_kit; None: all defaults.
      optimizer: which, if it averages the weights, holds what is evaluated.
    """

    def __init__(
        self,
        eval_tasks: Iterable[Any],
        model: Any,
        global_step: Any = None,
        eval_steps: Mapping[str, int | None] | None = None,
        checkpoint_exporter: Any = None,
        *,
        config: Any = None,
        optimizer: Any = None,
    ) -> None:
        self._given_step, self._eval_tasks = global_step, list(eval_tasks)
        tasks = {task.name: task for task in self._eval_tasks}
        build_parts(tasks, model, train=False)
        task = EngineTask(SimpleNamespace(tasks=tasks))
        super().__init__(sections_of(config, tasks), task, model, optimizer, train=False, evaluate=False)
        evaluate_tasks(self, self._eval_tasks, eval_steps, checkpoint_exporter)

    @property
    def tasks(self) -> list[Any]:
        """The tasks that are evaluated."""
        return self._eval_tasks

    @property
    def validation_losses(self) -> dict[str, Any]:
        """The metrics of the validation losses by task."""
        return {one.name: self._metrics_of(one).loss for one in self.validation}

    @property
    def validation_metrics(self) -> Any:
        """The validation metrics by task, without the losses."""
        return {one.name: self._metrics_of(one).metrics for one in self.validation}

    def _new_global_step(self) -> Any:
        return super()._new_global_step() if self._given_step is None else self._given_step
