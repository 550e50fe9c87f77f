"""Trainer: Orbit's train and eval step functions for a Task, under any strategy; the only caller of strategy.run.

The methods keep the names and meanings of TF Model Garden's Trainer. A training loop is one call of one tf.function:
metrics are reset, the steps run, and the results come back in one transfer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import orbit
import tensorflow as tf

from trainer_kit.checkpoint_names import ITERATOR
from trainer_kit.checkpoints.state.train_state import TrainState
from trainer_kit.config.schema.evaluation import validation_sets
from trainer_kit.distribution.batches import tell_uneven_batch
from trainer_kit.distribution.datasets import distribute_dataset, has_plain_iterator, with_threads
from trainer_kit.distribution.executor import executor
from trainer_kit.distribution.replica_values import ReplicasState, put_replica_values, replica_values
from trainer_kit.distribution.replicas import local_tensors, run_options
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import converted
from trainer_kit.inputs.dataset_iterator import DatasetIterator
from trainer_kit.inputs.records import damage_in
from trainer_kit.inputs.stacking import tell_of_stacks
from trainer_kit.inputs.train_data import TrainData, open_whole
from trainer_kit.optimizers.learning_rate import ConfiguredRates, current_learning_rate
from trainer_kit.optimizers.moving_average import MovingAverage, averaged_variables
from trainer_kit.training.async_workers import AsyncWorkers
from trainer_kit.training.checks import check_model, check_sections
from trainer_kit.training.evaluator import Evaluator
from trainer_kit.training.first_batch import batch_described, build_model
from trainer_kit.training.loops.batch_first import writes_after
from trainer_kit.training.loops.fused_loop import FusedLoop, not_compiled
from trainer_kit.training.loops.loop_forms import OR_NOT, TrainLoops
from trainer_kit.training.loops.split_loop import LoopParts
from trainer_kit.training.loops.train_loop import TrainLoop
from trainer_kit.training.metrics import MetricSet, model_metrics, task_metrics, to_numpy
from trainer_kit.training.signatures import check_methods
from trainer_kit.training.state_keeping import StateKeeping
from trainer_kit.training.stop_flag import StopFlag
from trainer_kit.training.task import step_loss

_LOG = logging.getLogger(__name__)
LOOK_EVERY = 5  # steps between looks at the weights where loops are shorter
_SOUND = "trainer_kit/sound"  # what a loop returns beside its logs


class Trainer(StateKeeping, TrainLoops, Evaluator):
    """Trains and evaluates a task. To be made in the scope of its strategy.

    Args:
      config: an ExperimentConfig, or anything with the same sections.
      task: what is learned.
      model: of `task.build_model`; one without variables is built from what a batch looks like.
      optimizer: of `task.create_optimizer`; a dict of them by name; None if train is False.
      train: whether this trainer will train.
      evaluate: whether this trainer will evaluate.
      train_dataset: used in place of the task's; with replicas, a distributed dataset.
      validation_dataset: the same for evaluation, or a dict of such by name; each evaluation starts it anew.
      checkpoint_exporter: keeps the best checkpoint; has `maybe_export_checkpoint` and `best_ckpt_logs`.

    Raises:
      AttributeError: when the config lacks a section that is needed.
      UsageError: when the model has no variables, or XLA is asked for where it cannot be.
      TrainerKitError: when a method of the task does not take what it is called with.
    """

    between_steps = True  # False while a loop runs: an error may then come from the middle of a step

    def __init__(
        self,
        config: Any,
        task: Any,
        model: Any,
        optimizer: Any,
        train: bool = True,
        evaluate: bool = True,
        train_dataset: Any = None,
        validation_dataset: Any = None,
        checkpoint_exporter: Any = None,
    ) -> None:
        check_sections(config, train and train_dataset is None, evaluate and validation_dataset is None)
        self._strategy = tf.distribute.get_strategy()
        self._config, self._task, self._model, self._optimizer = config, task, model, optimizer
        self._checkpoint_exporter, self.trains, self._evaluates = checkpoint_exporter, train, evaluate
        self._global_step = self._new_global_step()
        check_methods(task, train, evaluate)
        build_model(config.task, task, model, train, train_dataset if train else validation_dataset)
        check_model(model, config.runtime, self._strategy)
        self._build_optimizers()
        self._average = self._moving_average()
        trained, own = (model, optimizer, self._average, task), model_metrics(model)
        self.state = TrainState(self._global_step, *trained, getattr(config.runtime, "random_seed", 0))
        self._train_set = MetricSet("training_loss", task_metrics(task, True) + own if train else [])
        self.data = self._open_data(train_dataset)
        self._keep_run_state()
        self.init_state_keeping(self.has_own_loop, type(self).train is not Trainer.train)
        eval_metrics = task_metrics(task, False) + own if evaluate else []
        self.init_evaluation(eval_metrics, self._validation_feeds(validation_dataset))
        self.stop_flag = StopFlag(self._strategy)
        self._run_options = run_options(config.runtime)
        self._guarded = train and getattr(config.trainer, "recovery_max_trials", 0) >= 0
        self.parts = LoopParts(lambda: int(self._global_step.numpy()), self.on_first_step)
        self.data_ended, self.batch_spec = False, None  # the spec of what a replica is trained on, once it was traced
        self.loop_steps: int | None = 0  # done in the last loop; None when only global_step can tell
        self.sound: bool | None = True  # whether all weights were finite at the last look; None when the loop had none
        self.cut_short = False  # whether the next loop goes on with one that was stopped in the middle
        self._workers = AsyncWorkers(self._strategy)
        self.init_train_loops(getattr(config.trainer, "fuse_steps", 1) if train else 1)

    @classmethod
    def create(cls, config: Any, task: Any, train: bool, evaluate: bool, checkpoint_exporter: Any = None) -> Any:
        """Returns a trainer with the task's model and, to train, its optimizer. In strategy scope."""
        model = task.build_model()
        optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime) if train else None
        return cls(config, task, model, optimizer, train, evaluate, checkpoint_exporter=checkpoint_exporter)

    # ---- what it is made of

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """The strategy in whose scope this trainer was made."""
        return self._strategy

    @property
    def config(self) -> Any:
        """The experiment's config."""
        return self._config

    @property
    def task(self) -> Any:
        """The task."""
        return self._task

    @property
    def model(self) -> Any:
        """The model."""
        return self._model

    @property
    def optimizer(self) -> Any:
        """The optimizer, a dict of them, or None."""
        return self._optimizer

    @property
    def global_step(self) -> tf.Variable:
        """int64 scalar: training iterations done, whatever the number of optimizers."""
        return self._global_step

    @property
    def train_loss(self) -> Any:
        """The metric of the training loss, a mean over the loop."""
        return self._train_set.loss

    @property
    def train_metrics(self) -> list[Any]:
        """All training metrics but the loss."""
        return self._train_set.metrics

    @property
    def checkpoint(self) -> tf.train.Checkpoint:
        """All that a checkpoint of the run holds."""
        return self.state.checkpoint

    @property
    def train_dataset(self) -> Any:
        """The training data, made when first needed; setting it takes effect with the next loop.

        With fused steps an element is (how many, batches), of inputs.stacking; what is set comes in batches as ever.
        """
        return self.data.feed.dataset

    @train_dataset.setter
    def train_dataset(self, dataset: Any) -> None:
        self.data.feed.replace(dataset)
        if self._fuse_steps > 1 and (problem := self.problem_of_fusing()):
            raise UsageError(f"trainer.fuse_steps={self._fuse_steps}: {problem}; {OR_NOT}")

    def keep_state(self, name: str, get: Callable[[], Any], put: Callable[[Any], None]) -> None:
        """Has checkpoints hold what `get` returns, as JSON can hold it, and `put` take it after a restore."""
        self.state.run_state.add(name, get, put)

    @property
    def has_own_loop(self) -> bool:
        """Whether a subclass makes the training loop itself."""
        return type(self).create_train_loop_fn is not Trainer.create_train_loop_fn

    def check_data(self) -> None:
        """Raises DataError when a dataset is known to be empty, or not to end; to be called after the restore."""
        if self.trains:
            self.data.feed.check_not_empty()
        if self._evaluates:
            self.check_validation_data()

    def initialize(self) -> None:
        """Called when there is no checkpoint to restore: lets the task load its initial weights. Eager, in scope."""
        self.watch_values()
        self.task.initialize(self.model)
        self.after_restore()

    def before_save(self, prefix: str) -> None:
        """Gets all ready that is no variable for the checkpoint that is about to be saved at `prefix`; eager."""
        self.prepare_save(quiet=self.stop_requested)
        self.state.run_state.store()
        patience, begin = getattr(self.config.trainer, "preemption_grace_seconds", 25) / 4, time.monotonic()
        give_up = lambda: min(self.stopping_for, time.monotonic() - begin) > patience  # noqa: E731
        self.data.save_iterator(f"{prefix}{ITERATOR}", at_place=self._stack.empty, give_up=give_up)

    def after_restore(self, path: str | None = None) -> None:
        """Brings data, metrics and average in line with the restored variables. Called after every restore.

        Args:
          path: of the checkpoint that was restored; None when there was none.
        """
        self.data.restored(f"{path}{ITERATOR}" if path else None)
        self.state.restored(path)
        if path is not None:
            self.watch_values()
        if self.trains and self.has_own_loop:  # whose graph is not known
            self.look_into(None)
        self.sound, self.data_ended = None, False

    # ---- training

    def distribute_dataset(self, dataset_or_fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns a dataset distributed over the replicas.

        Args:
          dataset_or_fn: a tf.data.Dataset in global batches, or a function that returns one in batches for one
            replica; the function may have an argument `input_context`.
          *args: for the function.
          **kwargs: for the function.
        """
        return self._workers.per_worker(distribute_dataset, dataset_or_fn, *args, **kwargs)

    def train(self, num_steps: Any) -> dict[str, Any]:
        """Runs `num_steps` training steps and returns what `train_loop_end` returns. Eager, on the host.

        `loop_steps` tells how many were done: fewer when a stop was asked for, or the data ended. It is None where a
        subclass has made the loop.

        Raises:
          DataError: when there is no data at all.
        """
        self.train_loop_begin()
        iterator = self.data.iterator()
        loop = self._train_loop = self._train_loop or self.create_train_loop_fn()
        self.loop_steps = self.input_seconds = None
        self.look_at_python_state()  # at what actions have changed
        spec = lambda: self.batch_spec or iterator.element_spec  # noqa: E731  of fused steps an element is a stack
        self.between_steps = False
        described = batch_described("task.train_data", spec, self.task, self.model)
        with described, self._end_of_loop_told(), executor(self.config.runtime):
            if not isinstance(loop, (TrainLoop, FusedLoop)):
                if self.has_own_loop:
                    self._train_set.reset()  # our own loops do so inside the graph
                loop(iterator, num_steps)
            else:
                if not self._looked_into:
                    self.look_into(loop.graph(iterator))
                    if self._fuse_steps > 1:
                        tell_of_stacks(iterator.element_spec, self._fuse_steps, self.config.trainer.steps_per_loop)
                self._run_in_parts(loop, iterator, num_steps)
        self.between_steps = True
        self.look_at_python_state()
        return self.train_loop_end()

    def _run_in_parts(self, loop: TrainLoop | FusedLoop, iterator: Any, num_steps: Any) -> None:
        self.loop_steps, self._results.train = self.parts.run(loop, iterator, num_steps, not self.cut_short)
        self.input_seconds = self.parts.waited
        self.cut_short = 0 < self.loop_steps < int(num_steps)

    @contextlib.contextmanager
    def _end_of_loop_told(self) -> Iterator[None]:
        """The end of the data ends a loop, and an error of damaged data says so."""
        try:
            yield
        except (tf.errors.OutOfRangeError, StopIteration):
            self._end_of_data()
        except tf.errors.OpError as error:
            read = (self.data.made, self.data.feed.dataset)
            self.data.feed.forget()  # the state of an iterator that has failed may hold the failure
            if damage := damage_in(error, *read) or not_compiled(error, self._fuse_steps):
                raise damage from error
            raise

    def create_train_loop_fn(self) -> Any:
        """Returns `loop_fn(iterator, num_steps)`, which runs the steps; scheduled on a worker if asynchronous."""
        loop = self.loop_of(self._fuse_steps)
        if not self._workers.are_there:
            return loop
        if loop.whole is None:
            raise UsageError("asynchronous training needs trainer.train_tf_while_loop=true: workers run whole loops")
        return lambda iterator, num_steps: self._workers.coordinator.schedule(
            loop.whole.function, args=(iterator, num_steps, tf.constant(True))
        )

    def train_loop_begin(self) -> None:
        """Called before each loop, eagerly, and before the iterator is made. Metrics are reset inside the loop."""

    def train_loop_end(self) -> dict[str, Any]:
        """Returns the logs of the loop: metrics, training_loss, learning_rate. Eager, on the host."""
        self.join()
        found, self._results.train = self._results.train, None
        results = to_numpy(self._train_results()) if found is None else found
        self.sound = {1: True, 0: False}.get(int(results.pop(_SOUND, -1)))
        return dict(results)

    @tf.autograph.experimental.do_not_convert
    def next_train_inputs(self, iterator: Any) -> Any:
        """Returns the next batch for the model; in graph, on the host. Override to change what the model is fed."""
        return next(iterator)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, iterator: Any) -> None:
        """Uses one element of the iterator for one step on every replica; in graph."""
        inputs = converted(self.next_train_inputs)(iterator)
        with writes_after(local_tensors(inputs, self._strategy)):
            self._strategy.run(self._replica_train_step, args=(inputs,), options=self._run_options)
            self._global_step.assign_add(1)
            if self._average is not None:
                self._average.update(self._global_step)

    @tf.autograph.experimental.do_not_convert
    def _replica_train_step(self, inputs: Any) -> None:
        self.batch_spec = tf.nest.map_structure(tf.type_spec_from_value, inputs)
        step = converted(self.task.train_step)
        if self.config.runtime.enable_xla:
            step = tf.function(step, jit_compile=True, autograph=False)
        logs = step(inputs, model=self.model, optimizer=self.optimizer, metrics=self.train_metrics)
        self._train_set.update_loss(step_loss(self.task, logs))

    # ---- how it is done

    def _new_global_step(self) -> Any:
        return orbit.utils.create_global_step()

    def _keep_run_state(self) -> None:
        """Puts into every checkpoint what is no variable."""
        rates, parts = ConfiguredRates(self._optimizer), self.state.run_state
        parts.add("data", self.data.state, self.data.put_state)
        parts.add("metrics", self._metrics_state, self._put_metrics_state)
        parts.add("learning rates", rates.state, rates.restore)
        of_model = ReplicasState(lambda: self.model.variables, self._strategy)
        parts.add("replicas", of_model.state, of_model.restore)
        others = ReplicasState(lambda: self.state.other_variables, self._strategy)
        parts.add("replicas of other variables", others.state, others.restore)

    def _build_optimizers(self) -> None:
        optimizers = self._optimizer.values() if isinstance(self._optimizer, Mapping) else [self._optimizer]
        for optimizer in optimizers:
            if isinstance(optimizer, keras.Optimizer) and not optimizer.built:
                optimizer.build(self._model.trainable_variables)

    def _moving_average(self) -> Any:
        config = self._config.trainer.optimizer_config.ema
        return MovingAverage(averaged_variables(self._model, config), config) if config is not None else None

    def _open_data(self, given: Any) -> TrainData:
        return self._data_of(self.task, lambda: self.config.task.train_data, self._global_step, given)

    def _data_of(self, task: Any, params: Callable[[], Any], steps: tf.Variable, given: Any) -> TrainData:
        """Returns the data that `task` is trained on, of which each of so many `steps` has taken a batch."""
        return TrainData(
            lambda open_at: self._task_data(params(), open_at, task.build_inputs),
            lambda: int(steps.numpy()),
            given,
            one_iterator=has_plain_iterator(self._strategy),
            deterministic_ops=getattr(self.config.runtime, "deterministic_ops", False),
            require_exact=getattr(self.config.trainer, "require_exact_resume", False),
        )

    def _validation_feeds(self, given: Any) -> dict[str, DatasetIterator]:
        sets = validation_sets(self._config.task)
        if isinstance(given, Mapping):
            sets = {**dict.fromkeys(given), **{name: data for name, data in sets.items() if name}}
        given = given if isinstance(given, Mapping) else {"": given}
        return {name: self._validation_feed(name, data, given.get(name)) for name, data in sets.items()}

    def _validation_feed(self, name: str, data: Any, given: Any, build_inputs: Any = None) -> DatasetIterator:
        section, replicas = f"validation_data.{name}".rstrip("."), self._strategy.num_replicas_in_sync

        def make() -> Any:
            path = f"task.{section}.global_batch_size"
            with tell_uneven_batch(getattr(data, "global_batch_size", 0), replicas, path):
                return self._task_data(data, self._open_validation, build_inputs)

        return DatasetIterator(section, make, given)

    def _open_validation(self, build_inputs: Any, params: Any, input_context: Any) -> tf.data.Dataset:
        return open_whole(build_inputs, params, input_context)

    def _task_data(self, params: Any, open_data: Any, build_inputs: Any = None) -> Any:
        def dataset_fn(input_context: tf.distribute.InputContext | None = None) -> tf.data.Dataset:
            opened = open_data(build_inputs or self.task.build_inputs, params, input_context)
            return with_threads(opened, self.config.runtime)

        return self.distribute_dataset(dataset_fn)

    @tf.autograph.experimental.do_not_convert
    def _train_results(self) -> dict[str, Any]:
        results = {**self._train_set.results(), "learning_rate": current_learning_rate(self._optimizer)}
        if self._guarded:
            results[_SOUND] = self._look()
        return results

    @tf.autograph.experimental.do_not_convert
    def _look(self) -> tf.Tensor:
        """Whether all weights are finite, 1 or 0; -1 between the looks of very short loops, where each would cost."""
        if self.config.trainer.steps_per_loop >= LOOK_EVERY:
            return tf.cast(self.state.finite(), tf.int32)
        due = tf.equal(self._global_step % LOOK_EVERY, 0)
        return tf.cond(due, lambda: tf.cast(self.state.finite(), tf.int32), lambda: tf.constant(-1))

    def _metrics_state(self) -> Any:
        return replica_values(self._train_set.variables(), self._strategy) if self.cut_short else None

    def _put_metrics_state(self, state: Any) -> None:
        metrics = self._train_set.variables()
        self.cut_short = state is not None and put_replica_values(metrics, self._strategy, state)
        if state is not None and not self.cut_short:
            _LOG.warning("the metrics are not those of the run before: the first ones reported leave out a few steps")
