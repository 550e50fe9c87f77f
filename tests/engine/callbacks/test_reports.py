"""What a report is put together from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_kit.callbacks import metrics_reporter as reports_module
from trainer_kit.callbacks.callback import Evaluation, Loop, Run
from trainer_kit.callbacks.metrics_reporter import MetricsReporter
from trainer_kit.telemetry.report import Report, Writer
from trainer_kit.telemetry.report_lines import estimate_seconds_left


class _Kept(Writer):
    def __init__(self) -> None:
        self.reports: list[Report] = []

    def write(self, report: Report) -> None:
        self.reports.append(report)


def _run(seconds: float = 2.0) -> Run:
    run = Run(SimpleNamespace())
    run.total_steps = 100
    run.loop = Loop(40, 50, seconds, {"loss": 0.5})
    return run


def _make_report(run: Run, batch_size: int = 0, best: Any = None) -> Report:
    kept = _Kept()
    assert run.loop is not None
    MetricsReporter(kept, batch_size, best).loop_end(run, run.loop.logs)
    return kept.reports[-1]


def test_rates_are_of_the_steps_and_of_the_examples_in_them() -> None:
    report = _make_report(_run(), 32)

    assert report.kind == "train"
    assert report.step == 50
    assert report.total_steps == 100
    assert report.metrics == {"loss": 0.5}
    assert report.steps_per_second == 5.0
    assert report.examples_per_second == 160.0
    assert report.seconds == 2.0


def test_a_loop_too_short_to_time_has_no_rate() -> None:
    report = _make_report(_run(seconds=0.0), 32)
    assert report.steps_per_second is report.examples_per_second is None


def test_the_time_left_counts_what_happens_between_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = _Kept()
    run = _run()
    reports = MetricsReporter(kept)
    times = iter([100.0, 130.0])
    monkeypatch.setattr(reports_module, "time", SimpleNamespace(monotonic=lambda: next(times)))
    reports.loop_end(run, {})
    run.loop = Loop(50, 60, 2.0, {})

    reports.loop_end(run, {})

    assert [report.seconds_left for report in kept.reports] == [None, 120.0]  # 40 steps of 3 s
    assert [estimate_seconds_left(report) for report in kept.reports] == [10.0, 120.0]


def test_the_best_is_that_which_is_kept_now() -> None:
    assert _make_report(_run()).best is None

    best = SimpleNamespace(best=("accuracy", 0.9, 40))
    assert _make_report(_run(), best=best).best == ("accuracy", 0.9, 40)


def test_what_callbacks_report_joins_the_line_of_the_loop_once() -> None:
    run = _run()

    run.report("samples", 3)

    assert _make_report(run).metrics == {"loss": 0.5, "samples": 3}
    assert _make_report(run).metrics == {"loss": 0.5}


@pytest.mark.parametrize("value", ["three", [1, 2], None])
def test_only_numbers_can_be_reported(value: Any) -> None:
    with pytest.raises(Exception, match=r"run.report\('samples'\): .* is not a single number"):
        _run().report("samples", value)


def test_evaluations_of_one_step_are_one_report() -> None:
    kept = _Kept()
    run = _run()
    reports = MetricsReporter(kept)
    for name, logs in (
        ("often", {"often": {"a": 1}}),
        ("rare", {"often": {"a": 1}, "rare": {"a": 2}}),
    ):
        run.evaluation = Evaluation(50, sets=(name,), seconds=1.0, seconds_of_sets={name: 1.0})
        reports.evaluation_end(run, logs)

    reports.boundary_end(run)
    reports.boundary_end(run)
    (report,) = kept.reports

    assert report.metrics == {"often": {"a": 1}, "rare": {"a": 2}}
    assert report.kind == "validation"
    assert report.seconds == 2.0
    assert report.seconds_of_sets == {"often": 1.0, "rare": 1.0}
    assert report.steps_per_second is None


def test_a_loop_is_reported_when_another_callback_fails() -> None:
    kept = _Kept()
    run = _run()
    reports = MetricsReporter(kept)

    for _ in range(2):
        reports.exception(run, ValueError("of another callback"))

    assert [report.step for report in kept.reports] == [50]


def test_a_replayed_evaluation_is_reported_already() -> None:
    kept = _Kept()
    run = _run()
    reports = MetricsReporter(kept)
    run.evaluation = Evaluation(50, is_replayed=True)

    run.report("samples", 3)
    reports.evaluation_end(run, {"a": 1})
    reports.boundary_end(run)

    assert kept.reports == []
    assert run.reported_metrics == {}
