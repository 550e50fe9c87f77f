"""Compares an exported file with the live model, before it is published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    expected = [inference(batch) for batch in batches]
    actual = export_format.run(inference, path, [*batches, batches[-1]])
    name = export_format.name
    repeated = _compute_difference(actual[-2], actual[-1])
    if repeated > TOLERANCE:
        raise UsageError(
            f"{name}: two calls on the same batch differ by {repeated:.1e}, so the model draws"
            " random numbers in inference; call its random layers with training=False"
        )

    differences = []
    for live, exported in zip(expected, actual, strict=False):
        differences.append(_compute_difference(live, exported))
    difference = max(differences)
    examples = sum(len(next(iter(batch.values()))) for batch in batches)
    if tolerance is not None:
        if not difference <= tolerance:
            raise UsageError(
                f"{name}: the outputs differ from those of the model by {difference:.1e} of the"
                f" largest one, and {tolerance:.1e} is allowed; give a higher tolerance if that is"
                " good enough"
            )
        return Parity(difference, examples)

    agreement = _compute_class_agreement(expected, actual[: len(batches)])
    if agreement is None:
        raise UsageError(
            f"{name}: the model computes in low precision, and its outputs are no classes; give the"
            " tolerance that is good enough"
        )
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
    return max(_compare_arrays(expected[name], np.asarray(actual[name])) for name in expected)


def _compare_arrays(expected: np.ndarray, actual: np.ndarray) -> float:
    if expected.shape != actual.shape:
        return float("inf")
    if expected.dtype.kind not in "biuf":
        return 0.0 if np.array_equal(expected, actual) else float("inf")
    live = expected.astype(np.float64)
    other = actual.astype(np.float64)
    is_finite = np.isfinite(live) & np.isfinite(other)
    if not np.array_equal(live[~is_finite], other[~is_finite], equal_nan=True):
        return float("inf")
    if not is_finite.any():
        return 0.0
    scale = float(np.abs(live[is_finite]).max()) or 1.0
    return float(np.abs(live[is_finite] - other[is_finite]).max()) / scale


def _compute_class_agreement(expected: Sequence[Arrays], actual: Sequence[Arrays]) -> float | None:
    """Returns the share of equal classes. None if no output has several numbers in a row."""
    matches: list[np.ndarray] = []
    for live, exported in zip(expected, actual, strict=True):
        for name, value in live.items():
            if value.ndim > 1 and value.shape[-1] > 1:
                matches.append((value.argmax(-1) == exported[name].argmax(-1)).ravel())
    return float(np.concatenate(matches).mean()) if matches else None
