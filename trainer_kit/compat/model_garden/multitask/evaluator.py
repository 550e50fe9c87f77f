"""MultiTaskEvaluator: evaluates several tasks; it has the signature of official.modeling.multitask's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from trainer_kit.compat.model_garden.multitask.base_trainer import sections_of
from trainer_kit.compat.model_garden.multitask.engine_task import EngineTask, build_parts
from trainer_kit.compat.model_garden.multitask.evaluation import evaluate_tasks
from trainer_kit.compat.model_garden.training.trainer import Trainer


class MultiTaskEvaluator(Trainer):
    """Evaluates several Model Garden tasks without training. Created in strategy scope.

    Args:
      eval_tasks: Model Garden's tasks.
      model: A MultiTaskBaseModel, or one model for all tasks.
      global_step: An int64 scalar variable; None: a new one.
      eval_steps: A dict from task name to batches per evaluation; for other tasks the argument of `evaluate` counts.
      checkpoint_exporter: An exporter of the best checkpoint.
      config: The experiment's config, Model Garden's or trainer_kit's; None: all defaults.
      optimizer: The optimizer; if it averages the weights, its averages are evaluated.
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
