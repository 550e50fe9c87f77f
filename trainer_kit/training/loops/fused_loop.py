"""Fused loops: many training steps as one XLA program, several times as fast for small models.

The steps are the same Python code as in every other loop. Between two programs the loop does what
XLA cannot: it resets and reads metrics, fetches batches and checks for stops. It works on one
replica only, since XLA cannot update mirrored variables.
"""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.config.schema.experiment import XLA_REPLICA_LIMIT
from trainer_kit.errors import UsageError
from trainer_kit.inputs.autograph import apply_autograph
from trainer_kit.inputs.stateful_ops import iterate_nodes
from trainer_kit.training.loops.iterators import (
    SingleElementIterator,
    TimedIterator,
    as_int32,
    create_boolean_constants,
    create_wait_seconds,
    parse_wait_seconds,
    should_continue,
)
from trainer_kit.training.loops.loop_function import (
    LoopFunction,
    Packed,
    Readback,
    graph_function,
)
from trainer_kit.training.loops.train_loop import LoopSteps
from trainer_kit.typing import Dataset, ExperimentLike, IntLike, NestedSpec

# The stacked batches of an element, how many of them are used, and how many there are.
StackState = tuple[Any, tf.Tensor, tf.Tensor]

# The user's names of operations that XLA does not support.
_USERS_NAMES = {
    "EagerPyFunc": "tf.py_function",
    "PyFunc": "tf.numpy_function",
    "PyFuncStateless": "tf.numpy_function",
    "StringFormat": "tf.print",
    "PrintV2": "tf.print",
    "WriteSummary": "tf.summary",
}

_OVERDRAWN = (
    "trainer.fuse_steps: a training step takes more than one batch from its iterator, "
    "and a fused step can take only one; set trainer.fuse_steps to 1"
)


def find_fusing_problem(
    config: ExperimentLike,
    strategy: tf.distribute.Strategy,
    ready_made_dataset: Dataset | None,
    custom_loop_class: str,
) -> str:
    """Returns why training steps cannot be fused in one XLA program. "" if no reason is known.

    Nothing is tried for this. Runs eagerly, on the host.

    Args:
      config: The experiment's config.
      strategy: The trainer's strategy.
      ready_made_dataset: A ready-made dataset that replaces the task's. None if there is none.
      custom_loop_class: The name of a class that overrides create_train_loop_fn. "" if there is
        none.
    """
    replicas = strategy.num_replicas_in_sync
    if replicas > 1:
        return f"there are {replicas} replicas, and {XLA_REPLICA_LIMIT}"

    if isinstance(
        strategy, (tf.distribute.experimental.ParameterServerStrategy, tf.distribute.TPUStrategy)
    ):
        return f"{type(strategy).__name__} compiles its loops by itself, or not at all"

    if not config.trainer.train_tf_while_loop:
        return "trainer.train_tf_while_loop is false"
    if config.runtime.run_eagerly:
        return "runtime.run_eagerly is true"
    if custom_loop_class:
        return f"{custom_loop_class} builds its own training loop in create_train_loop_fn"

    if ready_made_dataset is not None and not isinstance(ready_made_dataset, tf.data.Dataset):
        return (
            "the ready-made dataset is already distributed, and fused steps need a tf.data.Dataset"
        )
    return ""


def check_fusing(fuse_steps: int, problem: str) -> None:
    """Raises UsageError when `fuse_steps` is above 1 and `problem` is not empty."""
    if fuse_steps > 1 and problem:
        raise UsageError(
            f"trainer.fuse_steps={fuse_steps}: {problem}; "
            "change that, or set trainer.fuse_steps to 1"
        )


class BatchStack:
    """The batches that a fused loop has read and not used yet.

    The dataset of a fused loop gives several batches at once. A loop may end within them. The next
    loop then begins with the first unused batch, while the dataset's own position is after all of
    them.

    Its methods run eagerly, on the host.
    """

    def __init__(self) -> None:
        # A weak reference to the iterator, since other code decides when it is deleted.
        self._iterator: weakref.ref[tf.data.Iterator] | None = None
        self._stored: StackState | None = None
        self._is_known = True

    def get_batches(self, iterator: tf.data.Iterator) -> StackState:
        """Returns the batches, the number of used batches, and the number of batches.

        The numbers are int32 scalars. For another iterator than the last one, it has no batches.
        """
        last_iterator = None if self._iterator is None else self._iterator()
        if self._stored is None or last_iterator is not iterator:
            self._iterator = weakref.ref(iterator)

            def create_empty(part: tf.TensorSpec) -> tf.Tensor:
                shape = [size or 0 for size in part.shape]
                return tf.zeros(shape, part.dtype)

            # Stacks of no batches, with the dtypes and ranks of the iterator's own.
            _, spec = iterator.element_spec
            empty = tf.nest.map_structure(create_empty, spec)
            self._stored = empty, tf.constant(0), tf.constant(0)
            self._is_known = True
        return self._stored

    def forget(self) -> None:
        """Drops the batches. The number of unused batches is unknown after this."""
        self._stored = None
        self._iterator = None
        self._is_known = False

    def store(self, batches: Any, used: tf.Tensor, count: tf.Tensor) -> None:
        """Stores the batches of an element, and how many are used."""
        self._stored = batches, used, count

    @property
    def is_empty(self) -> bool:
        """Whether all batches from the iterator are used. False if not known."""
        if not self._is_known:
            return False
        if self._stored is None:
            return True
        _, used, count = self._stored
        return int(used) >= int(count)

    def next_batch(self, iterator: tf.data.Iterator) -> Any:
        """Returns the next unused batch, and counts it as used.

        Raises:
          tf.errors.OutOfRangeError, StopIteration: when the data has ended.
        """
        batches, used, count = self.get_batches(iterator)
        if self.is_empty:
            count, batches = next(iterator)
            used = tf.constant(0)
        self.store(batches, used + 1, count)
        return tf.nest.map_structure(lambda stack: stack[int(used)], batches)


class FusedLoop:
    """Runs steps like a TrainLoop, up to `fuse_steps` of them in one program.

    Call it eagerly, on the host.

    Args:
      steps: What the loop runs. XLA has to support all operations of a step, and nothing follows a
        step.
      stop: The flag of stop_variable, checked between programs.
      stack: Contains the batches that a loop has not used, for the next one.
      fuse_steps: The number of batches in one element of the data.

    Attributes:
      loop_function: The function of the whole loop.
      wait_seconds: The seconds that the last call waited for batches. None with op determinism,
        which has no clock.
      fuse_steps: The argument of this name.
    """

    def __init__(
        self, steps: LoopSteps, stop: tf.Variable, stack: BatchStack, fuse_steps: int
    ) -> None:
        self._steps = steps
        self._stop = stop
        self._stack = stack
        self._flags = create_boolean_constants()
        self._results = Readback(steps.results, graph_function)
        self._program = tf.function(self._fused_steps, jit_compile=True, autograph=False)
        self.loop_function = LoopFunction(
            self._run_loop, "the fused training loop", _get_argument_specs, _refuse_summaries
        )
        self.wait_seconds: float | None = 0.0
        self.fuse_steps = fuse_steps

    def __call__(
        self, iterator: tf.data.Iterator, num_steps: IntLike, reset_metrics: bool = True
    ) -> tuple[int, Any]:
        """Returns the number of steps done and the results, as NumPy values.

        Args:
          iterator: An iterator over the data. Its elements are (number of batches, stacked batches)
            of inputs.fused_batches.
          num_steps: The number of steps to run.
          reset_metrics: Whether metrics are reset first. See TrainLoop.

        Raises:
          tf.errors.OutOfRangeError: when the data ends first. The steps before that have been done.
        """
        limit = as_int32(num_steps)
        stack_state = self._stack.get_batches(iterator)
        try:
            stack_state, packed = self.loop_function(
                iterator, limit, self._flags[reset_metrics], stack_state
            )
        except Exception:
            # The loop may have read more batches before the error.
            self._stack.forget()
            raise
        self._stack.store(*stack_state)

        results, (done, waited) = self._results.unpack(packed)
        self.wait_seconds = parse_wait_seconds(waited)
        return int(done), results

    @property
    def newest_graph(self) -> tf.Graph | None:
        """The newest graph of the whole loop. None if no graph exists."""
        return self.loop_function.newest_graph

    def _run_loop(
        self,
        iterator: tf.data.Iterator,
        num_steps: tf.Tensor,
        reset_metrics: tf.Tensor,
        stack_state: StackState,
    ) -> tuple[StackState, Packed]:
        """Runs programs until `num_steps` steps are done or a stop is requested.

        The state of the stack is (batches, number of used batches, number of batches).
        """

        def condition(done: tf.Tensor, stack: StackState, waited: tf.Tensor) -> tf.Tensor:
            return should_continue(self._stop, done < num_steps)

        def body(
            done: tf.Tensor, stack: StackState, waited: tf.Tensor
        ) -> tuple[tf.Tensor, StackState, tf.Tensor]:
            def read_batches() -> tuple[StackState, tf.Tensor]:
                # The clock times only elements of its own graph, here that of this branch.
                clock = TimedIterator(iterator, tf.identity(waited))
                count, batches = next(clock)
                return (batches, tf.constant(0), count), clock.wait_seconds

            _, used_before, available = stack
            (batches, used, count), waited = tf.cond(
                used_before < available, lambda: (stack, waited), read_batches
            )
            end = tf.minimum(count, used + num_steps - done)
            self._program(batches, used, end)
            return done + end - used, (batches, end, count), waited

        tf.cond(reset_metrics, self._steps.reset, lambda: None)

        # The static shapes are those of the specs, so a stack of any size may follow another.
        start = (tf.constant(0), stack_state, create_wait_seconds())
        shapes = tf.nest.map_structure(lambda tensor: tensor.shape, start)
        done, stack_state, waited = tf.while_loop(condition, body, start, shapes)
        return stack_state, self._results.pack(done, waited)

    def _fused_steps(self, batches: Any, begin: tf.Tensor, end: tf.Tensor) -> None:
        """Runs a step for each batch from `begin` to `end` (excluded). XLA compiles it."""

        def body(number: tf.Tensor) -> tuple[tf.Tensor]:
            element = tf.nest.map_structure(lambda stack: stack[number], batches)
            batch = SingleElementIterator(element)
            try:
                # Otherwise "while/" would stand before the names of the task's summaries.
                with tf.name_scope(""):
                    apply_autograph(self._steps.step)(batch)
            except Exception:
                if batch.is_overdrawn:
                    raise UsageError(_OVERDRAWN) from None
                raise
            return (number + 1,)

        tf.while_loop(lambda number: number < end, body, (begin,))


def _get_argument_specs(elements: tuple[tf.TensorSpec, NestedSpec]) -> Sequence[NestedSpec]:
    """Returns the specs of a loop's arguments after the iterator, for stacks of any size."""
    count, batches = elements
    number = tf.TensorSpec([], tf.int32)
    flag = tf.TensorSpec([], tf.bool)
    return number, flag, (batches, number, count)


def _refuse_summaries(graph: tf.Graph) -> None:
    """Raises UsageError when the steps write summaries, which the message of XLA would not say."""
    for node in iterate_nodes(graph.as_graph_def()):
        if re.fullmatch(r"Write\w*Summary|ImportEvent", node.op):
            raise UsageError(
                "trainer.fuse_steps: XLA cannot compile the training step: "
                f"it writes a tf.summary ({node.name}); "
                "report the value as a metric, or set trainer.fuse_steps to 1"
            )


@contextlib.contextmanager
def explain_xla_errors(size: int) -> Iterator[None]:
    """Raises UsageError instead of the error with which XLA refuses a loop.

    Args:
      size: The number of steps in a program.
    """
    try:
        yield
    except tf.errors.OpError as error:
        reason = _refusal_of_xla(error.message) if size > 1 else ""
        if not reason:
            raise
        raise UsageError(
            f"trainer.fuse_steps={size}: XLA cannot compile the training step: {reason}; "
            "change the step, or set trainer.fuse_steps to 1"
        ) from error


def _refusal_of_xla(message: str) -> str:
    """Returns in one line why XLA did not compile a program. "" for another kind of error."""
    variable = re.search(r"Trying to access resource (.+?) located in device \S*CPU", message)
    if variable:
        return (
            f"it uses the variable {variable[1]}, which is on the CPU, "
            "where TensorFlow keeps variables of int32; "
            "create it as int64, and not under tf.device('CPU:0')"
        )

    if (
        "tf2xla conversion failed" not in message
        and "unsupported operations when trying to compile" not in message
    ):
        return ""

    # Of the places in the stack, the last one in the user's own code is named.
    stack = message.split("tf2xla conversion failed", 1)[0]
    places = re.findall(r'File "[^"]+", line \d+, in \S+', stack)
    own_places = [place for place in places if "site-packages" not in place] or places
    location = f" ({own_places[-1]})" if own_places else ""

    operations = dict.fromkeys(re.findall(r"No registered '(\w+)' OpKernel", message))
    if operations:
        names = ", ".join(_USERS_NAMES.get(operation, operation) for operation in operations)
        return f"it uses {names}{location}, which XLA does not support"

    # Without the name of an operation, the first line that says anything is the reason.
    lines = [line.strip() for line in message.splitlines()]
    introductions = ("Graph execution error", "Detected at", "<stack")
    reasons = [line for line in lines if line and not line.startswith(introductions)]
    reason = reasons[0] if reasons else "TensorFlow gives no reason"
    return f"{reason}{location}"
