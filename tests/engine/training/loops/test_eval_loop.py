"""The loops of an evaluation, with steps that count and reductions of every kind."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tests.engine.training.loops.counting_step import Counter, batches
from trainer_kit.errors import DataError
from trainer_kit.training.loops.eval_loop import EvalLoop, StatefulEvalLoop, check_evaluated_batches


@pytest.mark.parametrize(("wanted", "done", "total"), [(-1, 4, 45.0), (2, 2, 15.0), (9, 4, 45.0)])
def test_evaluation_ends_with_the_data_or_the_wanted_steps(
    wanted: int, done: int, total: float
) -> None:
    counter = Counter()
    evaluate = EvalLoop(counter, counter.stop)

    assert evaluate(iter(batches()), wanted) == (done, {"total": total})


def test_a_limited_evaluation_takes_no_element_more_than_it_uses() -> None:
    counter = Counter()
    evaluate = EvalLoop(counter, counter.stop)
    iterator = iter(batches())

    evaluate(iterator, 2)

    assert evaluate(iterator, -1) == (2, {"total": 30.0})


class _Pair(NamedTuple):
    first: Any
    second: Any


def _grow(state: Any, new: Any) -> Any:
    return new if state is None else tf.concat([state, new], axis=0)


def _grow_values(state: Any, outputs: Any) -> Any:
    return _grow(state, outputs["value"])


def _add_to_histogram(state: Any, outputs: Any) -> Any:
    counts = tf.math.bincount(tf.cast(outputs["value"], tf.int32), minlength=10, maxlength=10)
    state = tf.zeros([10], tf.int32) if state is None else state
    assert state.shape == [10]  # what does not grow keeps its static shape
    return state + counts


def _reduce_nested(state: Any, outputs: Any) -> Any:
    state = state or {"all": None, "pair": _Pair(0, (tf.constant(-1, tf.int64),))}
    most = tf.maximum(state["pair"].second[0], tf.reduce_max(outputs["value"]))
    return {
        "all": _grow(state["all"], outputs["value"]),
        "pair": _Pair(state["pair"].first + 1, (most,)),
    }


def _change_in_place(state: Any, outputs: Any) -> Any:
    state = {} if state is None else state
    state["names"] = _grow(state.get("names"), tf.strings.as_string(outputs["value"]))
    return state


def _grow_rows(state: Any, outputs: Any) -> Any:
    return _grow(
        state,
        tf.RaggedTensor.from_row_lengths(outputs["value"], [1, tf.size(outputs["value"]) - 1]),
    )


def _to_lists(state: Any) -> Any:
    leaves = tf.nest.flatten(state, expand_composites=True)
    return tf.nest.map_structure(lambda leaf: np.asarray(leaf).tolist(), leaves)


def _create_loops(
    reduce_fn: Any, watched: Any = ()
) -> tuple[Counter, StatefulEvalLoop, StatefulEvalLoop]:
    counter = Counter()
    graph = StatefulEvalLoop(counter, counter.stop, use_tf_while_loop=True, watched=watched)
    return counter, graph, StatefulEvalLoop(counter, counter.stop)


@pytest.mark.parametrize(
    "reduce_fn", [_add_to_histogram, _reduce_nested, _change_in_place, _grow_rows]
)
def test_any_state_is_the_same_in_graph_and_step_by_step(
    reduce_fn: Any, caplog: pytest.LogCaptureFixture
) -> None:
    counter, graph, by_step = _create_loops(reduce_fn)

    for wanted in (-1, 2, 1, 9, 0):
        done, state = graph(iter(batches()), wanted, None, reduce_fn)
        total = float(counter.total)
        expected_done, expected = by_step(iter(batches()), wanted, None, reduce_fn)
        tf.nest.assert_same_structure(state, expected)
        assert done == expected_done
        assert _to_lists(state) == _to_lists(expected)
        assert total == float(counter.total)

    assert "step by step" not in caplog.text


@pytest.mark.parametrize("build_array", [np.zeros, tf.ones])
def test_a_state_that_was_given_is_added_to(
    build_array: Any, caplog: pytest.LogCaptureFixture
) -> None:
    state = build_array([10], np.int32)
    _, graph, _ = _create_loops(_add_to_histogram)

    done, result = graph(iter(batches()), -1, state, _add_to_histogram)

    assert done == 4
    assert result.numpy().tolist() == (1 + np.asarray(state)).tolist()
    assert "step by step" not in caplog.text


def test_other_data_gets_its_own_trace_besides_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, graph, _ = _create_loops(_grow_values)
    static = tf.data.Dataset.range(12).batch(4, drop_remainder=True)

    for data, examples in (
        (static, 12),
        (batches(), 10),
        (static, 12),
        (static.map(lambda x: x + 1), 12),
    ):
        done, state = graph(iter(data), -1, None, _grow_values)
        assert done == len(list(data))
        assert len(state) == examples

    assert "step by step" not in caplog.text


def test_limited_graph_loop_takes_no_unused_element() -> None:
    _, graph, _ = _create_loops(_grow_values)
    iterator = iter(batches())

    graph(iterator, 2, None, _grow_values)
    done, state = graph(iterator, -1, None, _grow_values)

    assert done == 2
    assert state.numpy().tolist() == [6, 7, 8, 9]
    assert graph(iterator, -1, None, _grow_values) == (0, None)  # there is no more


def test_a_stop_ends_the_loop_in_graph_before_its_next_step() -> None:
    class StoppingCounter(Counter):
        def after_step(self) -> None:
            self.stop.assign(self.total > 3.0)

    counter = StoppingCounter()
    graph = StatefulEvalLoop(counter, counter.stop, use_tf_while_loop=True)

    done, state = graph(iter(batches()), -1, None, _grow_values)

    assert done == 2
    assert state.numpy().tolist() == [0, 1, 2, 3, 4, 5]
    assert graph(iter(batches()), -1, None, _grow_values) == (0, None)


def _sum_values(state: Any, outputs: Any) -> Any:
    return (state or 0.0) + float(outputs["value"].numpy().sum())


def _return_tensors(state: Any, outputs: Any) -> Any:
    return [*(state or []), outputs["value"]]


def _add_seconds(state: Any, outputs: Any) -> Any:
    return {"all": outputs["value"], "seconds": 0.1 + (state["seconds"] if state else 0.0)}


def _change_type(state: Any, outputs: Any) -> Any:
    return outputs["value"] if state is None else tf.cast(outputs["value"], tf.float32)


@pytest.mark.parametrize(
    ("reduce_fn", "reason"),
    [
        (_sum_values, "'SymbolicTensor' object has no attribute 'numpy'"),
        (_return_tensors, "changes its structure from step to step"),
        (_add_seconds, "holds a float"),
        (_change_type, "int64.* after one step and .*float32"),
    ],
)
def test_untraceable_reduction_runs_step_by_step_with_a_warning(
    reduce_fn: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    counter, graph, by_step = _create_loops(reduce_fn)

    for _ in range(2):
        done, state = graph(iter(batches()), -1, None, reduce_fn)
        assert float(counter.total) == 45.0  # each batch counted once
        assert done == 4
        assert _to_lists(state) == _to_lists(by_step(iter(batches()), -1, None, reduce_fn)[1])

    (warning,) = [
        record.getMessage() for record in caplog.records if "step by step" in record.getMessage()
    ]

    assert re.search(
        f"{reason}.*; trainer.eval_tf_while_loop=false silences this warning$", warning
    )


class _Remembering:
    """Its reductions change more than the state."""

    def __init__(self) -> None:
        self.batches = 0
        self.parts = {"each": []}

    def count(self, state: Any, outputs: Any) -> Any:
        self.batches += 1
        return _grow_values(state, outputs)

    def keep(self, state: Any, outputs: Any) -> Any:
        self.parts["each"].append(outputs["value"])
        return _grow_values(state, outputs)


@pytest.mark.parametrize(
    ("method", "reason"),
    [("count", "_Remembering.batches"), ("keep", "_Remembering.parts")],
)
def test_side_effects_of_tracing_a_reduction_are_undone(
    method: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    task = _Remembering()
    reduce_fn = getattr(task, method)
    _, graph, _ = _create_loops(reduce_fn, [task])

    _, state = graph(iter(batches()), -1, None, reduce_fn)

    assert np.asarray(state).tolist() == list(range(10))
    assert reason in caplog.text

    kept = {"count": [0] * task.batches, "keep": task.parts["each"]}[method]
    # And no tensor of a graph, which has no value, among them.
    assert len([np.asarray(value) for value in kept]) == 4


@pytest.mark.parametrize(
    ("reduce_fn", "error"),
    [
        (lambda state, outputs: outputs["no_such_log"], KeyError),
        (lambda state, outputs: _grow_values(None, outputs) + "text", Exception),
        (lambda state, outputs: [].pop(), IndexError),
    ],
)
def test_a_mistake_in_the_reduction_is_raised_as_it_is(
    reduce_fn: Any, error: type[Exception]
) -> None:
    _, graph, by_step = _create_loops(reduce_fn)

    with pytest.raises(error) as expected:
        by_step(iter(batches()), -1, None, reduce_fn)

    with pytest.raises(error) as raised:
        graph(iter(batches()), -1, None, reduce_fn)

    assert type(raised.value) is type(expected.value)
    assert str(raised.value) == str(expected.value)


def test_an_error_that_depends_on_values_is_raised_in_graph() -> None:
    def reduce_fn(state: Any, outputs: Any) -> Any:
        tf.debugging.assert_less(outputs["value"], tf.constant(6, tf.int64), "too much")
        return _grow_values(state, outputs)

    _, graph, _ = _create_loops(reduce_fn)

    with pytest.raises(tf.errors.InvalidArgumentError, match="too much"):
        graph(iter(batches()), -1, None, reduce_fn)


def test_no_batch_is_an_error_and_too_few_are_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(DataError, match="has no batch"):
        check_evaluated_batches(0, -1, was_stopped=False)

    check_evaluated_batches(0, -1, was_stopped=True)
    check_evaluated_batches(3, 3, was_stopped=False)

    assert not caplog.text

    check_evaluated_batches(3, 4, was_stopped=False)

    assert "the evaluation used 3 batches of the 4 asked for" in caplog.text
