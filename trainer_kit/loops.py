"""The training loop as a tf.function: many steps in one call, results read back once; and what every loop needs.

A loop tests a stop variable before each step, so that a signal ends it within a step although Python waits for the
call. Nothing here knows what a step does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer_kit.tracing import LoopFunction, graph_function

Begin = Callable[[], None]
Step = Callable[[Any], Any]
Results = Callable[[], Any]


def stop_variable() -> tf.Variable:
    """Returns a flag, on the host and outside every strategy, that ends a running loop when it is set."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(False, trainable=False, name="stop")


def batch_counter() -> tf.Variable:
    """Returns a counter, on the host, that tells another thread how far a loop is."""
    with tf.device("CPU:0"), tf.init_scope():
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="batches")


class WaitingClock:
    """An iterator that adds up how long its elements were waited for; in graph, on the host.

    It costs nothing that can be measured: two operations for an element. What is asked for inside another graph, of a
    tf.function, a tf.cond or a loop in the step, is not timed: its seconds could not leave that graph.

    Args:
      iterator: over the data.
      waited: float64 scalar, seconds before.

    Attributes:
      waited: with those of the elements since.
    """

    def __init__(self, iterator: Any, waited: tf.Tensor) -> None:
        self._iterator, self.waited = iterator, waited

    def __iter__(self) -> WaitingClock:
        return self

    def __next__(self) -> Any:
        here = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if here is not (self.waited.graph if tf.is_symbolic_tensor(self.waited) else None):
            return next(self._iterator)
        begin = tf.timestamp()
        with tf.control_dependencies([begin]):
            element = next(self._iterator)
        parts = [part for part in tf.nest.flatten(element, expand_composites=True) if tf.is_tensor(part)]
        with tf.control_dependencies(parts):
            self.waited += tf.timestamp() - begin
        return element

    get_next = __next__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class TrainLoop:
    """Runs steps until enough are done or a stop is asked for.

    Args:
      begin: called first, in graph: resets metrics.
      step: takes the iterator, uses exactly one element of it.
      results: returns nested scalars and tensors after the last step.
      stop: of stop_variable.
      use_tf_function: compile; otherwise all is eager.
      use_tf_while_loop: compile the loop too, not only the step.

    Attributes:
      waited: seconds that the last call waited for batches; None where the loop is not compiled.
    """

    def __init__(
        self,
        begin: Begin,
        step: Step,
        results: Results,
        stop: tf.Variable,
        *,
        use_tf_function: bool = True,
        use_tf_while_loop: bool = True,
    ) -> None:
        compiled = graph_function if use_tf_function else eager
        self._begin, self._stop = compiled(begin), stop
        self._step = LoopFunction(step, "the training step") if use_tf_function else step
        self._results = Readback(results, compiled)
        self.waited: float | None = None
        whole = self._graph(begin, step, self._results.pack, stop)
        self.whole = LoopFunction(whole, "the training loop") if use_tf_while_loop else None

    def __call__(self, iterator: Any, num_steps: tf.Tensor, fresh: bool = True) -> tuple[int, Any]:
        """Returns the number of steps done and the results, as NumPy values.

        Args:
          iterator: over the data.
          num_steps: how many to do.
          fresh: whether metrics are reset first; False goes on with a loop that was stopped in the middle.

        Raises:
          tf.errors.OutOfRangeError, StopIteration: when the data ends first; the steps done so far are done.
        """
        if self.whole is not None:
            wanted = tf.convert_to_tensor(num_steps, tf.int32)
            done, waited, packed = self.whole(iterator, wanted, tf.constant(fresh))
            self.waited = float(waited)
            return int(done), self._results.unpack(packed)
        if fresh:
            self._begin()
        done = 0
        while done < int(num_steps) and not self._stop.numpy():
            self._step(iterator)
            done += 1
        return done, self.results()

    def graph(self, iterator: Any) -> tf.Graph | None:
        """Returns the graph of the whole loop, traced as its next call will be; None if the loop is not compiled."""
        if self.whole is None:
            return None
        return self.whole.graph(iterator, tf.constant(1), tf.constant(True))

    def results(self) -> Any:
        """Returns the results as they are now, as NumPy values; for a loop that the end of the data cut short."""
        return self._results()

    @staticmethod
    def _graph(begin: Begin, step: Step, results: Results, stop: tf.Variable) -> Any:
        def loop(iterator: Any, num_steps: tf.Tensor, fresh: tf.Tensor) -> Any:
            def go_on(done: tf.Tensor, waited: tf.Tensor) -> tf.Tensor:
                return tf.logical_and(done < num_steps, tf.logical_not(stop))

            def one_step(done: tf.Tensor, waited: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
                clock = WaitingClock(iterator, waited)
                with tf.name_scope(""):  # else "while/" would stand before the names of the task's summaries
                    step(clock)
                return done + 1, clock.waited

            tf.cond(fresh, begin, lambda: None)
            done, waited = tf.while_loop(go_on, one_step, (tf.constant(0), tf.constant(0.0, tf.float64)))
            return done, waited, results()

        return loop


class OneElement:
    """An iterator over one element, so that steps which call `next(iterator)` run inside the graph's loop.

    Raises:
      ValueError: when a step asks for a second element; evaluate such a step with eval_tf_function=False.
    """

    def __init__(self, element: Any) -> None:
        self._left = [element]

    def __iter__(self) -> OneElement:
        return self

    def __next__(self) -> Any:
        if not self._left:
            raise ValueError(
                "an evaluation step took two elements from its iterator; set trainer.eval_tf_function=false"
            )
        return self._left.pop()

    get_next = __next__


def over_elements(
    iterator: Any,
    limit: tf.Tensor,
    stop: tf.Variable,
    step: Callable[[OneElement, Any], Any],
    state: Sequence[tf.Tensor] = (),
    done: int | tf.Tensor = 0,
) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
    """Calls `step(element, state) -> state` until the data ends, enough are done or a stop is asked for; in graph.

    `get_next_as_optional` ends the loop inside the graph: no exception, ragged batches and replicas included.

    Args:
      iterator: over the data.
      limit: how many steps at most, those done before included; -1 is all of the data.
      stop: of stop_variable.
      step: takes an iterator over one element, and the state.
      state: tensors; each keeps its dtype and its static shape.
      done: steps done before.

    Returns:
      How many are done, those before included, and the state.
    """

    def go_on(done: tf.Tensor, wanted: tf.Tensor, element: Any, state: Any) -> tf.Tensor:
        return tf.logical_and(tf.logical_and(element.has_value(), wanted), tf.logical_not(stop))

    def one_step(done: tf.Tensor, wanted: tf.Tensor, element: Any, state: Any) -> Any:
        with tf.name_scope(""):  # else "while/" would stand before the names of the task's summaries
            state = step(OneElement(element.get_value()), state)
        wanted = tf.not_equal(done + 1, limit)
        # A branch around the step itself would cost more than a small step.
        return done + 1, wanted, tf.cond(wanted, iterator.get_next_as_optional, lambda: element), state

    done, state = tf.convert_to_tensor(done), list(state)
    values = (done, tf.not_equal(done, limit), iterator.get_next_as_optional(), state)
    shapes = (None, None, None, [tensor.shape for tensor in state])
    done, _, _, state = tf.while_loop(go_on, one_step, values, shapes)
    return done, state


class Readback:
    """Brings nested results from graph to host in one transfer: scalars travel stacked as float64.

    Args:
      results: returns nested scalars, tensors or variables.
      compiled: graph_function or eager.
    """

    def __init__(self, results: Callable[[], Any], compiled: Callable[[Any], Any]) -> None:
        self._source = results
        self._structure: Any = None
        self._scalar: list[bool] = []
        self._dtypes: list[Any] = []
        self._compiled = compiled(self.pack)

    def __call__(self) -> Any:
        return self.unpack(self._compiled())

    def pack(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Returns (stacked scalars, the other tensors); remembers the structure when traced."""
        self._structure = self._source()
        return self._packed()

    @tf.autograph.experimental.do_not_convert
    def _packed(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        tensors = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(self._structure)]
        self._structure = tf.nest.map_structure(lambda leaf: None, self._structure)
        self._scalar = [t.shape.rank == 0 and (t.dtype.is_floating or t.dtype.is_integer) for t in tensors]
        self._dtypes = [tensor.dtype.as_numpy_dtype for tensor in tensors]
        scalars = [tf.cast(t, tf.float64) for t, is_scalar in zip(tensors, self._scalar, strict=True) if is_scalar]
        others = [t for t, is_scalar in zip(tensors, self._scalar, strict=True) if not is_scalar]
        return tf.stack(scalars) if scalars else tf.zeros([0], tf.float64), others

    def unpack(self, packed: tuple[tf.Tensor, list[tf.Tensor]]) -> Any:
        """Returns the results as NumPy values of their own dtypes, nested as they were."""
        scalars, others = iter(packed[0].numpy()), iter(packed[1])
        leaves = [
            dtype(next(scalars)) if is_scalar else next(others).numpy()
            for is_scalar, dtype in zip(self._scalar, self._dtypes, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._structure, leaves)


def eager(function: Callable[..., Any]) -> Any:
    """Returns `function` as it is, where another loop has it compiled."""
    return function
