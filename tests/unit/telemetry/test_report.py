from __future__ import annotations

from tests.builders import imported_by


def test_reading_and_showing_reports_needs_no_tensorflow() -> None:
    names = (
        "report",
        "report_lines",
        "console",
        "metrics_jsonl",
        "background_writer",
        "time_advice",
    )
    modules = [f"trainer_kit.telemetry.{name}" for name in names]

    assert imported_by(modules, "tensorflow", "keras", "orbit") == []
