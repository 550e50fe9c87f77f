"""Called functions in the place of their calls: nested ones, several outputs, shapes that only the caller knows."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.distribution import tensorflow_internals
from trainer_kit.telemetry.flops import FlopsResult, count_flops
from trainer_kit.telemetry.flops_graph import with_calls_inlined


class _Nested(tf.Module):
    """Two functions, one of which calls the other twice."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.ones([3, 3]))

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def product(self, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return x, x @ self.kernel

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def twice(self, x: tf.Tensor) -> tf.Tensor:
        kept, made = self.product(x)
        return self.product(kept + made)[1]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(self.twice(x) @ self.kernel)


@functools.cache
def _module() -> _Nested:
    """A graph does not keep its variables, so this cache does."""
    return _Nested()


def _traced() -> Any:
    module = _module()
    return tf.function(lambda x: module(x)).get_concrete_function(tf.TensorSpec([1, 3]))


def _kinds(graph: Any) -> Counter[str]:
    return Counter(operation.type for operation in graph.get_operations())


def test_nested_calls_are_inlined_with_the_callers_shapes() -> None:
    graph = with_calls_inlined(_traced().graph)
    assert _kinds(graph)["MatMul"] == 3
    assert not _kinds(graph).keys() & {"PartitionedCall", "StatefulPartitionedCall"}
    products = [operation for operation in graph.get_operations() if operation.type == "MatMul"]
    assert [product.outputs[0].shape.as_list() for product in products] == [[1, 3]] * 3


def test_each_call_counts_and_the_graph_stays_as_it_was() -> None:
    concrete = _traced()
    before = _kinds(concrete.graph)
    with_calls_inlined(concrete.graph)
    assert _kinds(concrete.graph) == before
    first, second = (count_flops(_module(), tf.TensorSpec([None, 3])) for _ in range(2))
    assert first == second and first.problem == ""
    assert first.flops is not None and first.flops >= 3 * 2 * 3 * 3


def test_the_functions_of_a_loaded_saved_model_count(tmp_path: Path) -> None:
    module = tf.Module()
    module.kernel = tf.Variable(tf.ones([3, 4]))
    module.call = tf.function(lambda x: x @ module.kernel, input_signature=[tf.TensorSpec([None, 3])])
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    assert count_flops(lambda x: loaded.call(x), tf.TensorSpec([None, 3])) == FlopsResult(2 * 3 * 4)


def test_a_graph_without_calls_is_returned_as_it_is() -> None:
    graph = tf.function(lambda x: x @ x).get_concrete_function(tf.TensorSpec([2, 2])).graph
    assert with_calls_inlined(graph) is graph


def test_calls_without_visible_functions_stay_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_kit.telemetry.flops_graph.functions_called", lambda _: {})
    assert "PartitionedCall" in count_flops(_module(), tf.TensorSpec([None, 3])).problem
    assert tensorflow_internals.functions_called(object()) == {}
