from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from trainer_kit.telemetry.report import Report, as_scalar, flat_scalars


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (True, 1.0),
        (0.25, 0.25),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.array(3.5), 3.5),
        (np.bool_(False), 0.0),
        (float("inf"), float("inf")),
    ],
)
def test_a_number_is_a_scalar(value: object, expected: float) -> None:
    assert as_scalar(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("1.5", b"1.5", np.str_("1.5"), np.array("1.5"), None, {"a": 1.0}, object(), 1j, np.complex64(1j), 10**400),
        *([1.0], np.array([1.0]), np.zeros((2, 2)), np.datetime64("2020-01-01")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_single_number_is_no_scalar(value: object) -> None:
    assert as_scalar(value) is None


def test_bfloat16_is_a_scalar() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    assert as_scalar(ml_dtypes.bfloat16(1.5)) == 1.5


def test_flat_scalars_joins_names_and_drops_the_rest() -> None:
    metrics = {
        "loss": np.float32(0.5),
        "digits": {"accuracy": 1, "deep": {"n": 2.0}},
        "image": np.zeros(3),
        "note": "x",
    }
    assert flat_scalars(metrics) == {"loss": 0.5, "digits/accuracy": 1.0, "digits/deep/n": 2.0}
    assert list(flat_scalars({"b": 1, "a": 2})) == ["b", "a"]


def test_a_report_is_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        Report("train", 1, 2, {})  # type: ignore[misc]
    report = Report(kind="train", step=1, total_steps=None, metrics={})
    with pytest.raises(AttributeError):
        report.step = 2  # type: ignore[misc]


def test_reading_and_showing_reports_needs_no_tensorflow() -> None:
    modules = ("report", "lines", "console", "history", "background")
    imports = "; ".join(f"import trainer_kit.telemetry.{name}" for name in modules)
    code = f"import sys; {imports}; sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'orbit')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
