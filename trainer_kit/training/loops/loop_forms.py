"""The forms of a trainer's training loop: each step by itself, or so many as one program of XLA."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import ONE_REPLICA
from trainer_kit.errors import DataError, UsageError
from trainer_kit.inputs.dataset_iterator import no_batch
from trainer_kit.inputs.train_data import TrainData
from trainer_kit.training.async_workers import AsyncWorkers
from trainer_kit.training.loops.fused_loop import FusedLoop, Stack
from trainer_kit.training.loops.split_loop import LoopParts
from trainer_kit.training.loops.train_loop import TrainLoop
from trainer_kit.training.metrics import MetricSet

OR_NOT = "change that, or set trainer.fuse_steps to 1"


class TrainLoops:
    """The methods of a trainer that concern the form of its loop; to be inherited from.

    Attributes:
      data: the training data.
      input_seconds: that the last loop waited for batches; None when that is not known.
      batch_spec: of what a replica is trained on, once that was traced; None before.
    """

    data: TrainData
    input_seconds: float | None
    batch_spec: Any
    _strategy: tf.distribute.Strategy
    _train_set: MetricSet
    stop_flag: Any  # a StopFlag
    config: Any
    train_step: Any
    _train_results: Any
    _workers: AsyncWorkers
    _global_step: tf.Variable
    loop_steps: int | None
    data_ended: bool
    parts: LoopParts

    def init_train_loops(self, fuse_steps: int | str) -> None:
        """Makes so many steps one program; after the data. By "auto" none is as yet: that is chosen later.

        Raises:
          UsageError: when they cannot be.
        """
        self._stack = Stack()
        self._loops: dict[int, Any] = {}  # by how many steps are one program
        self._train_loop: Any = None
        self.input_seconds = None
        self.fuse(fuse_steps if isinstance(fuse_steps, int) else 1)

    @property
    def fuse_steps(self) -> int:
        """How many training steps are one program of XLA; 1: none is."""
        return self._fuse_steps

    def fuse(self, steps: int) -> None:
        """Makes so many training steps one program from the next loop on; 1: none.

        Raises:
          UsageError: when they cannot be.
        """
        if steps > 1 and (problem := self.problem_of_fusing()):
            raise UsageError(f"trainer.fuse_steps={steps}: {problem}; {OR_NOT}")
        self._fuse_steps, self._train_loop = steps, None
        self._stack.clear()
        self.data.put_in_stacks(steps)

    def problem_of_fusing(self) -> str:
        """Returns why training steps cannot be one program of XLA, as far as that is known before they are tried."""
        replicas, given = self._strategy.num_replicas_in_sync, self.data.feed.given
        if replicas > 1:
            return f"there are {replicas} replicas, and {ONE_REPLICA}"
        if isinstance(self._strategy, (tf.distribute.experimental.ParameterServerStrategy, tf.distribute.TPUStrategy)):
            return f"{type(self._strategy).__name__} compiles its loops by itself, or not at all"
        if not self.config.trainer.train_tf_while_loop:
            return "trainer.train_tf_while_loop is false"
        if self.config.runtime.run_eagerly:
            return "runtime.run_eagerly is true"
        if self.has_own_loop:
            return f"{type(self).__name__} makes its loop itself, by create_train_loop_fn"
        if given is not None and not isinstance(given, tf.data.Dataset):
            return "the ready-made dataset is distributed already, and not a tf.data.Dataset"
        return ""

    @property
    def has_own_loop(self) -> bool:
        """Whether a subclass makes the training loop itself."""
        return False

    def loop_of(self, fuse_steps: int) -> Any:
        """Returns the training loop in which so many steps are one program, traced once for its kind of data."""
        if fuse_steps not in self._loops:
            self._loops[fuse_steps] = self._new_loop(fuse_steps)
        return self._loops[fuse_steps]

    def forget_train_loop(self) -> None:
        """Has the training loop traced anew, because something it was traced with has changed."""
        self._train_loop, self._loops = None, {}

    def next_batch(self) -> Any:
        """Takes the next batch out of the training data; eager, on the host."""
        iterator = self.data.iterator()
        return self._stack.next_batch(iterator) if self._fuse_steps > 1 else next(iterator)

    def is_out_of_data(self) -> bool:
        """Whether the training data has ended, which a loop may have kept to itself; takes a batch if it has not.

        Raises:
          DataError: when there is no data at all.
        """
        try:
            next(self.data.iterator())
        except (tf.errors.OutOfRangeError, StopIteration):
            self._end_of_data()
        return self.data_ended

    @property
    def tracing_seconds(self) -> float:
        """The seconds that the last loop took to begin a trace and to write it."""
        return self.parts.tracing

    @property
    def first_step_at(self) -> float:
        """The time.perf_counter() when the first step of the newest loop function was done; 0 before."""
        return self.parts.ready_at

    @property
    def current_loop(self) -> TrainLoop | FusedLoop | None:
        """The training loop that runs, or ran last; None in asynchronous training, where it runs on workers."""
        return None if self._workers.are_there else self.loop_of(self._fuse_steps)

    def coordinator_for_async(self) -> Any:
        """Returns the coordinator of asynchronous training.

        Raises:
          UsageError: when the strategy is synchronous.
        """
        return self._workers.coordinator

    def join(self) -> None:
        """Waits for all scheduled steps; returns at once in synchronous training."""
        self._workers.join()

    def metric_variables(self) -> list[Any]:
        """Returns the variables of all training metrics."""
        return self._train_set.variables()

    def _new_loop(self, fuse_steps: int) -> TrainLoop | FusedLoop:
        parts = (self._train_set.reset, self.train_step, self._train_results, self.stop_flag.variable)
        if fuse_steps > 1:
            return FusedLoop(*parts, self._stack, fuse_steps)
        options = self.config.trainer
        return TrainLoop(
            *parts,
            after_step=lambda: self.stop_flag.agree(self._global_step),
            use_tf_function=options.train_tf_function,
            use_tf_while_loop=options.train_tf_while_loop,
            exact_waits=self.config.runtime.executor != "default",
        )

    def _end_of_data(self) -> None:
        """The data ended inside a loop: what was done is done, and only global_step tells how much."""
        self.loop_steps, self.data_ended = None, True
        self.data.feed.forget()
        if int(self._global_step.numpy()) == 0:
            raise DataError(no_batch("train_data"))
