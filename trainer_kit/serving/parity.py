"""Compares an exported file with the live model, before it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from trainer_kit.errors import UsageError
from trainer_kit.serving.export_formats import Arrays, ExportFormat
from trainer_kit.serving.inference_function import InferenceFunction

TOLERANCE = 1e-5
_CLASSES_AGREE = 0.9  # the share of examples whose class has to be the same, in low precision


@dataclass(frozen=True)
class Parity:
    """How far an export is from the live model.

    Attributes:
      difference: The largest difference of an output, as a part of its largest absolute value.
      examples: The number of examples that were compared.
      class_agreement: The share of the examples whose largest output is the same one. None where
        the difference decides.
      is_random: Whether the examples are random numbers.
    """

    difference: float
    examples: int
    class_agreement: float | None = None
    is_random: bool = False

    def __str__(self) -> str:
        kind = "random examples" if self.is_random else "examples"
        text = f"largest difference {self.difference:.1e} on {self.examples} {kind}"
        if self.class_agreement is None:
            return text
        return f"{text}, the same class in {self.class_agreement:.0%}"


def check_parity(
    export_format: ExportFormat,
    path: str,
    inference: InferenceFunction,
    batches: Sequence[Arrays],
    tolerance: float | None,
) -> Parity:
    """Runs an exported file in its runtime, and compares it with the live model.

    The last batch runs twice. An export that draws random numbers differs from itself then.

    Args:
      export_format: The format.
      path: The file.
      inference: The live model.
      batches: Batches of inputs by name.
      tolerance: The largest difference, as a part of the largest absolute output. None: the classes
        have to agree, as for numbers of low precision.

    Raises:
      UsageError: When the export differs too far, or from itself.
    """
    # On a GPU float32 is TF32 by default, which has the accuracy of float16.
    options = tf.config.experimental
    is_allowed = options.tensor_float_32_execution_enabled()
    options.enable_tensor_float_32_execution(False)
    try:
        expected = [inference(batch) for batch in batches]
        all_batches = [*batches, batches[-1]]
        *actual, repeated = export_format.run(inference, path, all_batches)
    finally:
        options.enable_tensor_float_32_execution(is_allowed)

    name = export_format.name
    random_difference = _compute_difference(actual[-1], repeated)
    if random_difference > TOLERANCE:
        raise UsageError(
            f"{name}: two calls on the same batch differ by {random_difference:.1e}, so the model"
            " draws random numbers in inference; call its random layers with training=False"
        )

    difference = max(map(_compute_difference, expected, actual))
    examples = 0
    for batch in batches:
        first_input = next(iter(batch.values()))
        examples += len(first_input)
    if tolerance is not None:
        if difference > tolerance:
            raise UsageError(
                f"{name}: the outputs differ from those of the model by {difference:.1e} of the"
                f" largest one, and {tolerance:.1e} is allowed; give a higher tolerance if that is"
                " good enough"
            )
        return Parity(difference, examples)

    matches: list[np.ndarray] = []
    for live, exported in zip(expected, actual, strict=True):
        for output, values in live.items():
            if values.ndim > 1 and values.shape[-1] > 1:
                classes = values.argmax(-1)
                exported_classes = exported[output].argmax(-1)
                matches.append((classes == exported_classes).ravel())
    if not matches:
        raise UsageError(
            f"{name}: it computes in low precision, the outputs are no classes, and they differ by"
            f" {difference:.1e} of the largest one; give a tolerance if that is good enough"
        )
    agreement = float(np.concatenate(matches).mean())
    if agreement < _CLASSES_AGREE:
        raise UsageError(
            f"{name}: the class of {1 - agreement:.0%} of {examples} examples is another one than"
            f" the model's, and {1 - _CLASSES_AGREE:.0%} is allowed; give a tolerance for the"
            " outputs if they are no classes"
        )
    return Parity(difference, examples, agreement)


def _compute_difference(expected: Arrays, actual: Arrays) -> float:
    """Returns the largest difference of all outputs, each as a part of its largest finite value."""
    if expected.keys() != actual.keys():
        return float("inf")
    differences = [0.0]
    for name, live in expected.items():
        other = np.asarray(actual[name])
        is_number = live.dtype.kind in "biuf"
        if live.shape != other.shape or not (is_number or np.array_equal(live, other)):
            return float("inf")
        if is_number:
            live = live.astype(np.float64)
            other = other.astype(np.float64)
            finite = live[np.isfinite(live)]
            scale = np.abs(finite).max(initial=0.0) or 1.0
            differs = ~np.isclose(live, other, rtol=0.0, atol=0.0, equal_nan=True)
            distances = np.abs(live[differs] - other[differs])
            errors = distances / scale
            errors[np.isnan(errors)] = np.inf
            differences.append(errors.max(initial=0.0))
    return float(max(differences))
