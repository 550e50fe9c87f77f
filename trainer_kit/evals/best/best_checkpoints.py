"""BestCheckpoints: the owner of the best checkpoints of a run.

These are the primary one and the named ones of the config.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import tensorflow as tf

from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.evals.ledger import Evaluation
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.typing import CheckpointExporter, ExperimentLike


class EvaluatedTrainer(Protocol):
    """What an export needs of the trainer that has evaluated. See Evaluator."""

    @property
    def config(self) -> ExperimentLike:
        """The config of the run."""

    @property
    def global_step(self) -> tf.Variable:
        """The step of the evaluated weights."""

    @property
    def validation_set_names(self) -> tuple[str, ...]:
        """The names of all validation sets."""

    def use_metric_weights(self, metric: str) -> AbstractContextManager[tf.train.Checkpoint]:
        """Yields the checkpoint of the weights that had this value of `metric`."""

    def locate_metric(self, metric: str) -> tuple[list[str], str]:
        """Returns the groups of the logs that lead to `metric`, and its name in the last one."""


class BestCheckpoints:
    """Exports the best of a trainer's evaluations.

    It follows the ledger of the run and reports the primary best. Iterating yields the exporters
    that follow the ledger. Runs eagerly, on the host, on every worker.

    Args:
      primary: The exporter of best_checkpoint_eval_metric, or None if there is none. It may be an
        object of the caller that only has `maybe_export_checkpoint` and `best_ckpt_logs`, as Model
        Garden's has.
      named_exporters: The exporters of best_checkpoints, by name.
    """

    def __init__(
        self,
        primary: CheckpointExporter | None,
        named_exporters: Mapping[str, BestWeightsExporter],
    ) -> None:
        self.primary = primary
        self.named_exporters = dict(named_exporters)

    @classmethod
    def from_exporter(
        cls, exporter: BestCheckpoints | CheckpointExporter | None
    ) -> BestCheckpoints:
        """Returns the owner of a trainer's `checkpoint_exporter`, which may be one already."""
        if isinstance(exporter, cls):
            return exporter
        return cls(exporter, {})

    def __iter__(self) -> Iterator[BestWeightsExporter]:
        if isinstance(self.primary, BestWeightsExporter):
            yield self.primary
        yield from self.named_exporters.values()

    @property
    def best_ckpt_logs(self) -> Mapping[str, Any] | None:
        """The metrics of the primary best so far.

        None before the first, and if there is no primary one.
        """
        return self.primary.best_ckpt_logs if self.primary is not None else None

    @property
    def best(self) -> tuple[str, float, int] | None:
        """(metric, value, step) of the primary best so far."""
        return getattr(self.primary, "best", None)

    def resume(self, step: int | None, evaluations: Iterable[Evaluation]) -> None:
        """Selects the weights to keep by the recorded evaluations. See BestWeightsExporter."""
        records = list(evaluations)
        for exporter in self:
            exporter.resume(step, records)

    def rewind(self, step: int, evaluations: Iterable[Evaluation]) -> None:
        """Goes back to `step` permanently. See BestWeightsExporter."""
        records = list(evaluations)
        for exporter in self:
            exporter.rewind(step, records)

    def export(
        self, trainer: EvaluatedTrainer, logs: Mapping[str, object], sets: Collection[str]
    ) -> None:
        """Exports the weights that a trainer has evaluated, if they are among the best.

        They are exported for each metric by which they are.

        Args:
          trainer: An Evaluator.
          logs: The logs of the evaluation. With several validation sets, those of the evaluated
            sets by name.
          sets: The names of the evaluated sets. A single one is called "". By metrics of others
            nothing is exported.
        """
        step = int(trainer.global_step.numpy())
        unevaluated_sets = set(trainer.validation_set_names) - set(sets)
        for exporter in (self.primary, *self.named_exporters.values()):
            if exporter is None:
                continue
            # The first part of a metric of several sets is the name of its set.
            metric = _get_metric_name(exporter, trainer)
            set_name = metric.partition("|")[0]
            if set_name not in unevaluated_sets:
                with trainer.use_metric_weights(metric) as weights:
                    exporter.maybe_export_checkpoint(weights, logs, step)

    def maybe_export_checkpoint(
        self, checkpoint: tf.train.Checkpoint, eval_logs: Mapping[str, object], step: int
    ) -> None:
        """Offers `checkpoint` to each exporter.

        It is for a trainer that calls this itself, such as Model Garden's.
        """
        for exporter in self:
            exporter.maybe_export_checkpoint(checkpoint, eval_logs, step)

    def add_best(self, trainer: EvaluatedTrainer, logs: dict[str, Any]) -> None:
        """Adds the primary best value so far to the logs of an evaluation, as `best_<metric>`.

        Logs without the metric's group are unchanged.

        Args:
          trainer: The trainer that has evaluated.
          logs: The logs, which may lack those of some validation sets.
        """
        # The config may name the metric, and an own subclass of BaseTrainer need not have one.
        if self.primary is None or not hasattr(trainer, "config"):
            return

        metric = _get_metric_name(self.primary, trainer)
        value = flatten_scalars(self.best_ckpt_logs or {}, "|").get(metric)
        groups, name = trainer.locate_metric(metric)
        # The logs of the group that contains the metric
        group_logs: Any = logs
        for group in groups:
            group_logs = group_logs.get(group, {})
        if value is not None and group_logs:
            group_logs[f"best_{name}"] = value


def _get_metric_name(exporter: CheckpointExporter, trainer: EvaluatedTrainer) -> str:
    """Returns the metric that decides, which is the one of the config if the exporter has none."""
    if hasattr(exporter, "metric_name"):
        return str(exporter.metric_name)
    return str(trainer.config.trainer.best_checkpoint_eval_metric)
