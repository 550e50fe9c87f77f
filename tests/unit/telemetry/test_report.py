from __future__ import annotations

import subprocess
import sys

import pytest

from trainer_kit.telemetry.report import Report


def test_a_report_is_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError):
        Report("train", 1, 2, {})  # type: ignore[misc]
    report = Report(kind="train", step=1, total_steps=None, metrics={})
    with pytest.raises(AttributeError):
        report.step = 2  # type: ignore[misc]


def test_reading_and_showing_reports_needs_no_tensorflow() -> None:
    modules = ("report", "report_lines", "console", "metrics_jsonl", "background_writer", "time_advice")
    imports = "; ".join(f"import trainer_kit.telemetry.{name}" for name in modules)
    code = f"import sys; {imports}; sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'orbit')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
