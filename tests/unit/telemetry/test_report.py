from __future__ import annotations

import pytest

from tests.builders import imported_by, report
from trainer_kit.telemetry.report import Report


def test_a_report_is_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        Report("train", 1, 2, {})  # type: ignore[misc]
    built = report()
    with pytest.raises(AttributeError):
        built.step = 2  # type: ignore[misc]


def test_reading_and_showing_reports_needs_no_tensorflow() -> None:
    names = ("report", "report_lines", "console", "metrics_jsonl", "background_writer", "time_advice")
    modules = [f"trainer_kit.telemetry.{name}" for name in names]
    assert imported_by(modules, "tensorflow", "keras", "orbit") == []
