"""KerasTrainer: the Trainer of a compiled Keras model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.data.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.data.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.compat.keras.metrics import KerasMetrics
from trainer_kit.distribution.replica_values import put_replica_values, replica_values
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_resume import examine
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_parts.task_inputs import TaskInputs

_LOG = logging.getLogger(__name__)
_NEW_ORDERS = (
    "draws another order in each evaluation, and a resumed run begins with the first one again, which may change "
    "val_loss, and by it what callbacks do; set reshuffle_each_iteration=False"
)


class GlobalBatches(TaskInputs):
    """Opens data in global batches, which the strategy splits among the replicas, as `Model.fit` has them."""

    def opened(self, params: Any, open_data: Callable[..., tf.data.Dataset], build_inputs: Any) -> Any:
        """Returns data distributed over the replicas; the arguments are those of TaskInputs.opened."""
        return self.distributed(open_data(build_inputs, params, None))


class KerasTrainer(Trainer):
    """Trains a KerasTask. Create it in the scope of its strategy; the arguments are those of Trainer.

    If trainer.steps_per_epoch is set, training metrics are those of the epoch so far, as Keras has them: they are reset
    where an epoch begins, and a checkpoint inside an epoch holds them. Otherwise they are those of a training loop.

    Attributes:
      epoch_steps: The steps of an epoch for the metrics; None: trainer.steps_per_epoch.
    """

    inputs_class: Any = GlobalBatches
    epoch_steps: int | None = None

    @classmethod
    def create(cls, config: Any, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizers. Called in strategy scope."""
        model = task.build_model()
        optimizer = task.prepare_training(model) if train else None
        if evaluate:
            task.prepare_evaluation(model)
        return cls(config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter)

    def check_data(self) -> None:
        """Also warns of validation data that are shuffled, if the run trains; see Trainer."""
        super().check_data()
        for data in self.inputs.validation_data.values() if self.trains else ():
            if isinstance(data, tf.data.Dataset) and (orders := examine(data).new_orders):
                text = f"validation_data: {', '.join(orders)} {_NEW_ORDERS}"
                if self.config.trainer.require_exact_resume:
                    raise UsageError(f"trainer.require_exact_resume: {text}")
                _LOG.warning("%s", text)

    def train(self, num_steps: Any) -> dict[str, Any]:
        """Runs training steps, with a new iterator where a pass over data that needs it begins; see Trainer."""
        self.data.feed.check_not_empty()
        made = self.data.made
        if isinstance(made, (DatasetPasses, PyDatasetEpochs)) and made.by_pass:
            position, reads = self.data.position, self.data.feed.started
            made.by_pass = not position.left_out  # a loop without such a batch ends in the next pass
            if not made.by_pass or made.begin(position.batch, reads=reads):
                self.data.feed.forget()
        return super().train(num_steps)

    def evaluate(self, num_steps: Any, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Runs an evaluation; see Trainer. Metrics of an epoch that goes on are those of before the evaluation."""
        for data in self.inputs.validation_data.values() if self.trains else ():
            if isinstance(data, PyDatasetEpochs):
                # By the step, since a restart may repeat an evaluation or leave it out.
                evaluations = -(-self._read_step() // self.config.trainer.validation_interval)
                data.evaluation = max(0, evaluations - 1)
        if not self.metrics_continue:
            return super().evaluate(num_steps, sets)
        variables = self._train_set.variables()
        before = replica_values(variables, self._strategy)
        logs = super().evaluate(num_steps, sets)
        put_replica_values(variables, self._strategy, before)
        return logs

    def _training_metrics(self, config: Any, task: Any, model: Any) -> Any:
        return KerasMetrics("training_loss", model, task.train_logs)

    def _evaluation_metrics(self, config: Any, task: Any, model: Any, wanted: bool) -> Any:
        return KerasMetrics("validation_loss", model, task.eval_logs)

    def _is_inside_epoch(self) -> bool:
        steps = self.epoch_steps or self.config.trainer.steps_per_epoch
        return bool(steps and self._read_step() % steps)
