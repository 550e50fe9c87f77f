"""What a report is put together from."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer_kit.telemetry.report import Report, Writer
from trainer_kit.telemetry.reporter import Reporter


class _Kept(Writer):
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def write(self, report: Report) -> None:
        self.reports.append(report)


def _report(reporter: Reporter, kept: _Kept, seconds: float = 2.0, steps: int = 10) -> Report:
    reporter.report("train", 50, 100, {"loss": 0.5}, seconds, steps=steps)
    return kept.reports[-1]


def test_rates_are_of_the_steps_and_of_the_examples_in_them() -> None:
    kept = _Kept()
    report = _report(Reporter(kept, 32), kept)
    assert (report.kind, report.step, report.total_steps, report.metrics) == ("train", 50, 100, {"loss": 0.5})
    assert (report.steps_per_second, report.examples_per_second, report.seconds) == (5.0, 160.0, 2.0)


@pytest.mark.parametrize(("seconds", "steps"), [(2.0, 0), (0.0, 10)])
def test_an_evaluation_and_a_loop_too_short_to_time_have_no_rate(seconds: float, steps: int) -> None:
    kept = _Kept()
    report = _report(Reporter(kept, 32), kept, seconds, steps)
    assert report.steps_per_second is report.examples_per_second is None


def test_the_best_is_that_which_is_kept_now() -> None:
    kept, evaluator = _Kept(), SimpleNamespace(checkpoint_exporter=SimpleNamespace(best=None))
    reporter = Reporter(kept, 0, evaluator)
    assert _report(reporter, kept).best is None
    evaluator.checkpoint_exporter.best = ("accuracy", 0.9, 40)
    report = _report(reporter, kept)
    assert (report.best, report.examples_per_second) == (("accuracy", 0.9, 40), None)
