"""KerasTrainer: the Trainer of a compiled Keras model, with the metrics of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.compat.keras.dataset_passes import DatasetPasses
from trainer_kit.compat.keras.keras_types import CompiledModel
from trainer_kit.compat.keras.program_changes import describe_model
from trainer_kit.compat.keras.py_dataset_epochs import PyDatasetEpochs
from trainer_kit.compat.keras.step_preparation import apply_keras_autograph, flatten_logs
from trainer_kit.errors import UsageError
from trainer_kit.inputs.dataset_resume import examine_dataset
from trainer_kit.inputs.worker_pipeline import WorkerPipeline
from trainer_kit.runtime.datasets import distribute_dataset
from trainer_kit.runtime.replica_values import read_replica_values, restore_replica_values
from trainer_kit.training.metric_set import MetricSet
from trainer_kit.training.task_inputs import TaskInputs
from trainer_kit.training.trainer import Trainer
from trainer_kit.typing import ExperimentLike, FloatLike, IntLike, Model, TaskLike, Variable

_LOG = logging.getLogger(__name__)
_NEW_ORDERS = (
    "draws another order in each evaluation, and a resumed run begins with the first one again,"
    " which may change val_loss, and by it what callbacks do; set reshuffle_each_iteration=False"
)


class GlobalBatchInputs(TaskInputs):
    """Opens data in global batches, as `Model.fit` has them.

    The strategy splits a batch among the replicas.
    """

    def distribute(self, pipeline: WorkerPipeline) -> Any:
        """Returns the dataset of a pipeline over the replicas. Runs eagerly."""
        return distribute_dataset(self._strategy, pipeline(None))


class KerasTrainer(Trainer):
    """Trains a KerasTask.

    Create it in the scope of its strategy. The arguments are those of Trainer.

    If trainer.steps_per_epoch is set, training metrics are those of the epoch so far, as in Keras:
    they are reset where an epoch begins, and a checkpoint inside an epoch contains them. Otherwise
    they are those of a training loop.
    """

    inputs_class: Any = GlobalBatchInputs
    _steps_per_epoch: int | None = None

    @classmethod
    def create(
        cls,
        config: ExperimentLike,
        task: Any,
        train: bool,
        evaluate: bool,
        checkpoint_exporter: Any = None,
    ) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizers.

        Called in strategy scope, on the host.
        """
        model = task.build_model()
        task.model_description = describe_model(model)
        optimizer = task.prepare(model, trains=train, evaluates=evaluate)
        return cls(
            config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter
        )

    def check_data(self) -> None:
        """Also warns of validation data that is shuffled, if the run trains. See Trainer.

        Raises:
          UsageError: For such data, if trainer.require_exact_resume is set.
        """
        super().check_data()
        for data in self.inputs.opened_validation_data.values() if self.can_train else ():
            if not isinstance(data, tf.data.Dataset):
                continue
            orders = examine_dataset(data).reshuffled_each_iteration
            if orders:
                text = f"validation_data: {', '.join(orders)} {_NEW_ORDERS}"
                if self.config.trainer.require_exact_resume:
                    raise UsageError(f"trainer.require_exact_resume: {text}")
                _LOG.warning("%s", text)

    def train(self, num_steps: IntLike) -> dict[str, Any]:
        """Runs training steps. See Trainer.

        Data that needs it gets a new iterator where a pass begins.
        """
        self.data.check_not_empty()
        self._begin_pass()
        return super().train(num_steps)

    def trace_training(self) -> None:
        """Traces the training loop before the first step. See Trainer."""
        if self.can_train and not self.state.is_step_tracked:
            self._begin_pass()
            super().trace_training()

    def _begin_pass(self) -> None:
        """Drops the iterator where the pass of the next batch needs a new one."""
        source = self.data.source
        if isinstance(source, (DatasetPasses, PyDatasetEpochs)) and source.ends_with_pass:
            position = self.data.position
            # A loop without a skipped batch ends in the next pass.
            source.ends_with_pass = not position.skipped_batches
            needs_iterator = not source.ends_with_pass or source.prepare_pass(
                position.batch, has_iterator=self.data.has_iterator
            )
            if needs_iterator:
                self.data.reset()

    def evaluate(self, num_steps: IntLike, sets: Sequence[str] | None = None) -> dict[str, Any]:
        """Runs an evaluation. See Trainer.

        Inside an epoch the training metrics keep the values from before the evaluation.
        """
        for data in self.inputs.opened_validation_data.values() if self.can_train else ():
            if isinstance(data, PyDatasetEpochs):
                # By the step, since a restart may repeat an evaluation or leave it out.
                interval = self.config.trainer.validation_interval
                evaluations = -(-self._read_step() // interval)
                data.evaluation_number = max(0, evaluations - 1)

        if not self.should_continue_metrics:
            return super().evaluate(num_steps, sets)

        # The model's metrics are those of both steps, so an evaluation resets them.
        variables = self._train_metric_set.variables()
        values = read_replica_values(variables, self._strategy)
        logs = super().evaluate(num_steps, sets)
        restore_replica_values(variables, self._strategy, values)
        return logs

    def accumulate_epoch_metrics(self, steps_per_epoch: int) -> None:
        """Makes training metrics those of the epoch so far, without trainer.steps_per_epoch.

        Args:
          steps_per_epoch: The number of steps in an epoch.
        """
        self._steps_per_epoch = steps_per_epoch

    def _build_training_metrics(
        self, config: ExperimentLike, task: Any, model: Any, enabled: bool
    ) -> MetricSet:
        return KerasMetrics("training_loss", model, task.train_log_specs)

    def _build_evaluation_metrics(
        self, config: ExperimentLike, task: Any, model: Any, enabled: bool
    ) -> MetricSet:
        return KerasMetrics("validation_loss", model, task.eval_log_specs)

    def _is_inside_epoch(self) -> bool:
        steps = self._steps_per_epoch or self.config.trainer.steps_per_epoch
        return bool(steps and self._read_step() % steps)


class KerasMetrics(MetricSet):
    """The metrics of a compiled model, as `Model.fit` reports them.

    Created in the scope of the strategy. It reports the results of the model's metrics. If the step
    returns other logs, it reports those of the last step, as Keras does: a mean over replicas.

    Args:
      loss_name: The name under which the run reports the model's "loss".
      model: The compiled model. Its metrics have all their variables.
      logs: The specs of what the model's step returns. Empty if that is the results of its metrics.
    """

    def __init__(
        self, loss_name: str, model: CompiledModel, logs: Mapping[str, tf.TensorSpec]
    ) -> None:
        super().__init__(loss_name, [])
        self._model = model
        self._loss_name = loss_name
        # Each replica writes its own value, and a read returns the mean.
        self._last_logs: dict[str, tf.Variable] = {}
        for name, spec in logs.items():
            self._last_logs[name] = tf.Variable(
                tf.zeros(spec.shape, spec.dtype),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )

    @tf.autograph.experimental.do_not_convert
    def update_with_step(
        self, task: TaskLike, logs: Any, inputs: Any, share: float | tf.Tensor = 1.0
    ) -> None:
        """Keeps what a training step has returned. Runs in graph, on a replica.

        The step has updated its metrics itself.
        """
        self.update(task, logs, inputs)

    @tf.autograph.experimental.do_not_convert
    def extract_metrics(self, task: TaskLike, logs: object, model: Model | None = None) -> Any:
        """Returns `logs` unchanged.

        A step of Keras returns results of metrics, which are reported as Keras does.
        """
        return logs

    @tf.autograph.experimental.do_not_convert
    def update(
        self,
        task: TaskLike,
        logs: Mapping[Any, Any],
        inputs: Any,
        weight: FloatLike | None = None,
    ) -> None:
        """Keeps what a step has returned. Runs in graph, on a replica.

        The model's own tracker has the loss.
        """
        if self._last_logs:
            values = flatten_logs(logs)
            for name, variable in self._last_logs.items():
                variable.assign(tf.cast(values[name], variable.dtype))

    @tf.autograph.experimental.do_not_convert
    def reset(self) -> None:
        """Resets all metrics. Runs eagerly or in graph, in cross-replica context."""
        super().reset()
        self._model.reset_metrics()

    @tf.autograph.experimental.do_not_convert
    def results(self) -> dict[str, Any]:
        """Returns all results by name. Called in cross-replica context."""
        logs: Mapping[str, Any] = self._last_logs
        if not logs:
            get_results = apply_keras_autograph(self._model.get_metrics_result, self._model)
            logs = flatten_logs(get_results())
        values: dict[str, tf.Tensor] = {}
        for name, value in logs.items():
            values[name] = tf.convert_to_tensor(value)
        if "loss" in values:
            values[self._loss_name] = values.pop("loss")
        return {**super().results(), **values}

    def variables(self) -> list[Variable]:
        """Returns the variables of all metrics.

        Their order is that of the checkpoints of earlier releases.
        """
        variables: list[Variable] = []
        for metric in [self.loss, *self._engine_metrics, *self._model.metrics]:
            variables += metric.variables
        return [*variables, *self._last_logs.values()]

    def names(self) -> list[str] | None:
        """Returns the names of the results. Runs eagerly."""
        return list(self.results())
