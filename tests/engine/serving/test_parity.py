"""The comparison of an export with the live model."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.serving.export_formats import Arrays, Outputs, SavedModelFormat
from trainer_kit.serving.inference_function import InferenceFunction
from trainer_kit.serving.parity import check_parity
from trainer_kit.serving.validation_examples import open_inference

BATCH = {"x": np.array([[1.0, 2.0], [3.0, 4.0]], "float32")}


class Changed(SavedModelFormat):
    """A format whose runtime gives these outputs, one after the other."""

    def __init__(self, *outputs: list[list[float]]) -> None:
        self._outputs = outputs

    def run(self, inference: InferenceFunction, path: str, batches: Sequence[Arrays]) -> Outputs:
        assert len(batches) == len(self._outputs)
        self.is_tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
        return [{"outputs": np.array(values, "float32")} for values in self._outputs]


@pytest.fixture(scope="module")
def identity() -> InferenceFunction:
    inputs = keras.Input((2,), name="x")
    model = keras.Model(inputs, keras.layers.Identity()(inputs))
    return open_inference(model, None)


def test_the_difference_is_a_part_of_the_largest_output(identity: InferenceFunction) -> None:
    outputs = [[1.0, 2.0], [3.0, 4.04]]

    parity = check_parity(Changed(outputs, outputs), "", identity, [BATCH], 0.02)

    assert parity.difference == pytest.approx(0.01, rel=1e-5)
    assert parity.examples == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 4.5])
def test_another_value_is_refused(identity: InferenceFunction, value: float) -> None:
    outputs = [[1.0, 2.0], [3.0, value]]

    with pytest.raises(UsageError, match="the outputs differ from those of the model by"):
        check_parity(Changed(outputs, outputs), "", identity, [BATCH], 0.01)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_values_that_are_not_finite_do_not_hide_others(
    identity: InferenceFunction, value: float
) -> None:
    batch = {"x": np.array([[1.0, value]], "float32")}

    assert check_parity(Changed([[1.0, value]], [[1.0, value]]), "", identity, [batch], 1e-5)
    with pytest.raises(UsageError, match="the outputs differ"):
        check_parity(Changed([[2.0, value]], [[2.0, value]]), "", identity, [batch], 1e-5)


def test_two_calls_may_not_differ(identity: InferenceFunction) -> None:
    with pytest.raises(UsageError, match="two calls on the same batch differ"):
        check_parity(
            Changed([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 5.0]]), "", identity, [BATCH], 1.0
        )


def test_a_gpu_compares_in_full_float32(identity: InferenceFunction) -> None:
    outputs = [[1.0, 2.0], [3.0, 4.0]]
    export_format = Changed(outputs, outputs)

    check_parity(export_format, "", identity, [BATCH], 1e-5)

    assert not export_format.is_tf32
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def test_in_low_precision_the_classes_decide(identity: InferenceFunction) -> None:
    same = [[1.0, 1.5], [3.0, 4.5]]
    other = [[1.0, 0.5], [3.0, 4.5]]

    parity = check_parity(Changed(same, same), "", identity, [BATCH], None)
    assert parity.class_agreement == 1.0
    with pytest.raises(UsageError, match="the class of 50% of 2 examples is another one"):
        check_parity(Changed(other, other), "", identity, [BATCH], None)
