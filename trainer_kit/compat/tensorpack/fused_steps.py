"""FusedSteps: several training steps of a program as one XLA program, where nothing runs between.

It is meant for small models, whose steps take less time than the Python between them. The engine's
option trainer.fuse_steps sets the number of steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from trainer_kit.compat.tensorpack.callbacks.base import Callback
from trainer_kit.compat.tensorpack.callbacks.graph import RunOp
from trainer_kit.compat.tensorpack.callbacks.monitor import JSONWriter, ScalarPrinter
from trainer_kit.compat.tensorpack.callbacks.param import ScheduledHyperParamSetter
from trainer_kit.compat.tensorpack.callbacks.steps import MaintainStepCounter, ProgressBar
from trainer_kit.compat.tensorpack.callbacks.summary import (
    MergeAllSummaries_RunWithOp,
    MovingAverageSummary,
)
from trainer_kit.compat.tensorpack.input_source.input_source import QueueSize
from trainer_kit.compat.tensorpack.program_errors import ProgramError
from trainer_kit.compat.tensorpack.program_graph import CutFunction
from trainer_kit.compat.tensorpack.session import flatten_fetches
from trainer_kit.training.loops.fused_loop import explain_xla_errors

if TYPE_CHECKING:
    from trainer_kit.compat.tensorpack.train.base import Trainer

# Callbacks of Tensorpack whose calls between two steps change nothing for others.
_QUIET_BETWEEN_STEPS = (
    JSONWriter,
    MaintainStepCounter,
    MergeAllSummaries_RunWithOp,
    MovingAverageSummary,
    ProgressBar,
    QueueSize,
    RunOp,
    ScalarPrinter,
)
_STEP_METHODS = ("_before_run", "_after_run", "_trigger_step")


class FusedSteps:
    """Runs steps of a trainer in blocks.

    Args:
      trainer: The trainer, with its callbacks.
      count: The number of steps in a block.

    Raises:
      UsageError: When a callback or the trainer has to run between steps.
    """

    def __init__(self, trainer: Trainer, count: int) -> None:
        self._trainer = trainer
        self._count = count
        self._functions: dict[int, Any] = {}
        if problem := self._find_problem():
            raise ProgramError(f"trainer.fuse_steps={count}: {problem}; leave fuse_steps at 1")

    def _find_problem(self) -> str:
        """Returns why steps cannot be fused. "" if they can."""
        trainer = self._trainer
        if "train_op" not in vars(trainer):
            return f"{type(trainer).__name__} has no train_op, and may run several calls in a step"
        for callback in trainer.callbacks:
            if getattr(callback, "_period", 0):
                return f"{type(callback).__name__} runs every {callback._period} steps"
            for method in _STEP_METHODS:
                definer = next(base for base in type(callback).__mro__ if method in vars(base))
                if definer is ScheduledHyperParamSetter and not callback._step:
                    continue
                if definer is not Callback and definer not in _QUIET_BETWEEN_STEPS:
                    return f"{type(callback).__name__}.{method} runs between steps"
        return ""

    def run(self, remaining: int) -> int:
        """Runs a block of steps. Runs on the host, with the graph of the program as the default.

        Args:
          remaining: The number of steps until the one that has to run alone, such as the last one
            of an epoch, whose summaries are read.

        Returns:
          The number of steps. 0 if the next step has to run alone.
        """
        if remaining < self._count:
            return 0
        trainer = self._trainer
        callback_fetches = []
        for callback in trainer.callbacks:
            request = callback.before_run(None)
            if request is not None:
                callback_fetches.append(request.fetches)
        train_op = vars(trainer)["train_op"]
        fetches = flatten_fetches([train_op, *callback_fetches])
        operations = [getattr(fetch, "op", fetch) for fetch in fetches]

        program = trainer.program
        program.initialize_variables()
        function = program.cut([], operations)
        feeders = program.find_feeders(function)
        feeds = [tensor for feeder in feeders for tensor in feeder.placeholders]
        function = program.cut(feeds, operations)
        function.check_placeholders()

        batches = []
        for _ in range(self._count):
            try:
                batches.append([value for feeder in feeders for value in feeder.next_values()])
            except tf.errors.OutOfRangeError:
                # The data ends here. The next step finds its end again.
                break
        seeds = [program.next_seed + index for index in range(len(batches))]
        program.next_seed += len(batches)

        parts = list(zip(*batches, strict=True))
        shapes_differ = False
        for part in parts:
            shapes = {np.shape(value) for value in part}
            if len(shapes) > 1:
                shapes_differ = True
        if shapes_differ or len(batches) < self._count:
            for batch, seed in zip(batches, seeds, strict=True):
                function(batch, seed)
        else:
            if id(function) not in self._functions:
                self._functions[id(function)] = _build_loop(function, len(batches))
            with tf.init_scope(), explain_xla_errors(self._count):
                arguments = []
                for part, tensor in zip(parts, function.feeds, strict=True):
                    arguments.append(tf.constant(np.stack(part), tensor.dtype))
                self._functions[id(function)](arguments, tf.constant(seeds, tf.int32))

        trainer.loop.count_calls(len(batches))
        return len(batches)


def _build_loop(function: CutFunction, count: int) -> Any:
    """Returns a compiled function that calls another one for each batch of a stack."""

    @tf.function(jit_compile=True, autograph=False)
    def run(stacks: list[tf.Tensor], seeds: tf.Tensor) -> None:
        def body(index: tf.Tensor) -> tf.Tensor:
            function.call_in_graph([stack[index] for stack in stacks], seeds[index])
            return index + 1

        tf.while_loop(lambda index: index < count, body, [tf.constant(0)])

    return run
