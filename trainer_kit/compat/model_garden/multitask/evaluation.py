"""How a trainer of ours evaluates several tasks of theirs: each is a validation set with its own steps and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer_kit.compat.model_garden.config.build_errors import TaskSections
from trainer_kit.compat.model_garden.multitask.engine_task import part_for
from trainer_kit.config.schema.evaluation import ValidationSetConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.training.evaluator import Evaluator
from trainer_kit.training.metrics import MetricSet, task_metrics


@dataclass(frozen=True)
class Evaluated:
    """One task that is evaluated.

    Attributes:
      task: of theirs.
      model: or the part of it that is the task's.
      metrics: of the task, with the loss.
      steps: batches in an evaluation; None: as many as are asked for.
    """

    task: Any
    model: Any
    metrics: MetricSet
    steps: int | None


class TaskEvaluation(Evaluator):
    """The methods of a trainer that concern the evaluation of several tasks; without any, nothing is different."""

    _tasks_evaluated: dict[str, Evaluated] | None = None
    _evaluates: bool
    _validation_feed: Any

    def evaluate_tasks(
        self, tasks: Iterable[Any], steps: Mapping[str, int | None] | None = None, checkpoint_exporter: Any = None
    ) -> None:
        """Has evaluations be those of `tasks` from now on, whatever this was made to evaluate; eager.

        Args:
          tasks: of theirs; each evaluates the model's part of its name, on its own validation_data.
          steps: batches in an evaluation by the name of the task; all others go by what `evaluate` is asked for.
          checkpoint_exporter: keeps the best checkpoint by metrics such as `task|metric`.

        Raises:
          UsageError: when two tasks have one name, or the model has no part for one.
        """
        found: dict[str, Evaluated] = {}
        with self._strategy.scope():
            for task in tasks:
                if task.name in found:
                    raise UsageError(f"two tasks to evaluate are called {task.name!r}; give each a name of its own")
                metrics = MetricSet("validation_loss", task_metrics(task, False), exact=True)
                own = (steps or {}).get(task.name) or None
                found[task.name] = Evaluated(task, part_for(self.model, task.name), metrics, own)
            self.init_evaluation([], {name: self._feed_of(name, one.task) for name, one in found.items()})
        self._tasks_evaluated, self._evaluates = found, True
        self._checkpoint_exporter = checkpoint_exporter

    @property
    def evaluated_task(self) -> Any:
        """The task of theirs that is evaluated, of several."""
        return super().evaluated_task if self._current is None else self._current.task

    @property
    def evaluated_model(self) -> Any:
        """The model, or the part of it that is the task's."""
        return super().evaluated_model if self._current is None else self._current.model

    @property
    def evaluated_metrics(self) -> list[Any]:
        """The metrics of the task."""
        return super().evaluated_metrics if self._current is None else self._current.metrics.metrics

    def validation_metric_names(self) -> list[str] | None:
        """Returns the names that `eval_end` will report, as `task|metric`; None if only a run can tell."""
        if self._tasks_evaluated is None:
            return super().validation_metric_names()
        if type(self).eval_end is not Evaluator.eval_end:
            return None
        names: list[str] = []
        for name, one in self._tasks_evaluated.items():
            self._turn_to(name)
            known = None if self._aggregates() else one.metrics.names()
            if known is None:
                return None
            names += [f"{name}|{metric}" for metric in known]
        return names

    def _task_sections(self) -> Any:
        """The sections of the tasks, theirs, by their paths, for messages."""
        trained = self.task.task_config
        trained = trained if isinstance(trained, TaskSections) else {"task": trained}
        others = enumerate(one.task.task_config for one in (self._tasks_evaluated or {}).values())
        known = [id(one) for one in trained.values()]
        more = {f"eval_tasks.{n}.task_config": one for n, one in others if id(one) not in known}
        return TaskSections({**trained, **more})

    @property
    def _current(self) -> Evaluated | None:
        return self._tasks_evaluated.get(self.task.validation_set) if self._tasks_evaluated is not None else None

    def _turn_to(self, name: str) -> None:
        super()._turn_to(name)
        if self._tasks_evaluated is not None:
            self._eval_set = self._tasks_evaluated[name].metrics

    def _own_options(self, name: str) -> Any:
        own = super()._own_options(name)
        steps = self._tasks_evaluated[name].steps if self._tasks_evaluated is not None else None
        if steps is None or (own is not None and own.steps is not None):
            return own
        return (own or ValidationSetConfig()).replace(steps=steps)

    def _feed_of(self, name: str, task: Any) -> DatasetIterator:
        feed: DatasetIterator = self._validation_feed(name, task.task_config.validation_data, None, task.build_inputs)
        return feed


def evaluating(trainer: Any) -> TaskEvaluation:
    """Returns `trainer`, which has to be one of ours.

    Raises:
      UsageError: for one of theirs.
    """
    if not isinstance(trainer, TaskEvaluation):
        kind = type(getattr(trainer, "_inner", trainer))  # of an AdoptedTrainer
        raise UsageError(
            f"{kind.__module__}.{kind.__name__} cannot evaluate several tasks on our engine; give a "
            "trainer of trainer_kit.compat.model_garden, whose arguments are the same, or none"
        )
    return trainer
