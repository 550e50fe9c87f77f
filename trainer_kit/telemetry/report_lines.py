"""Formats reports as lines of text without control characters, one line each."""

from __future__ import annotations

import math
from dataclasses import replace

from trainer_kit.telemetry.report import EVALUATING, TRAINING, Activity, EpochProgress, Report
from trainer_kit.telemetry.scalars import flatten_scalars


def format_report_lines(report: Report) -> list[str]:
    """Returns the line of `report`, or one line for each of several validation sets, beginning "validation dev"."""
    return [format_single_report(_select_set(report, name)) for name in report.seconds_of_sets] or [
        format_single_report(report)
    ]


def format_single_report(report: Report) -> str:
    """Returns the line of `report`, its parts separated by " | ".

    For example "train | step 200/400 | 1234.5 steps/s | 39504 examples/s | 0:00:12 left |
    training_loss 0.123", or "validation | step 200/400 | 1.5 s | accuracy 0.98 | best accuracy 0.98
    at step 200".
    """
    parts = [
        report.kind,
        f"step {format_progress(report)}",
        *format_rates(report),
        *format_time_left(report),
    ]
    if report.kind != "train" and report.seconds > 0:
        parts.append(f"{format_number(report.seconds)} s")
    parts += format_metrics(report)
    if report.kind != "train" and report.best is not None:
        parts.append(format_best(report.best))
    return replace_unprintable(" | ".join(parts))


def format_activity(activity: Activity) -> str:
    """Returns the line of the run's current activity, its parts separated by " | ".

    For example "evaluating | step 200 | batch 120/600 | 0:00:12 | 0:00:48 left", "training | step
    203/1000 | 0:00:12" or "building the model | 0:00:12". The time is that of this evaluation,
    training loop or phase.
    """
    what, done, total, seconds = activity.name, activity.completed, activity.total, activity.seconds
    left = None
    if what == EVALUATING:
        parts = [what, f"step {activity.step}", f"batch {_format_fraction(done, total)}"]
        left = None if total is None else max(0, total - done)
    elif what == TRAINING:
        parts = [what, f"step {_format_fraction(activity.step, total)}"]
        left = None if total is None else max(0, total - activity.step)
    else:
        parts = [what]
    parts.append(format_duration(seconds))
    if left is not None and done > 0:
        parts.append(f"{format_duration(seconds / done * left)} left")
    return " | ".join(parts)


def _format_fraction(done: int, total: int | None) -> str:
    return f"{done}" if total is None else f"{done}/{max(done, total)}"


def format_progress(report: Report) -> str:
    """Returns "240/400 (epoch 3/4, step 40/100)"; totals and epochs are left out if they are not known."""
    steps = (
        f"{report.step}" if report.total_steps is None else f"{report.step}/{report.total_steps}"
    )
    return (
        steps
        if report.epoch_progress is None
        else f"{steps} ({format_epoch_progress(report.epoch_progress)})"
    )


def format_epoch_progress(progress: EpochProgress) -> str:
    """Returns "epoch 3/4, step 40/100"; the number of epochs is left out if it is not known."""
    epochs = (
        f"{progress.epoch}" if progress.epochs is None else f"{progress.epoch}/{progress.epochs}"
    )
    return f"epoch {epochs}, step {progress.step}/{progress.steps}"


def format_rates(report: Report) -> list[str]:
    """Returns the steps and the examples per second, as far as they are known."""
    texts = []
    for value, unit in (
        (report.steps_per_second, "steps/s"),
        (report.examples_per_second, "examples/s"),
    ):
        if value is not None:
            digits = ".0f" if value >= 10_000 else ".1f" if value >= 10 else ".3g"
            texts.append(f"{value:{digits}} {unit}")
    return texts


def format_time_left(report: Report, elapsed: float = 0.0) -> list[str]:
    """Returns the time left, `elapsed` seconds after the report; [] if it is not known."""
    left = estimate_seconds_left(report)
    return [] if left is None else [f"{format_duration(max(0.0, left - elapsed))} left"]


def format_metrics(report: Report) -> list[str]:
    """Returns "name value" for each scalar of the report except the best one, which `format_best` shows."""
    shown_already = set()
    if report.best:
        place, bar, last = report.best[0].rpartition("|")
        shown_already = {f"best_{report.best[0]}", f"{place}{bar}best_{last}".replace("|", "/")}
    scalars = flatten_scalars(report.metrics).items()
    return [
        f"{name} {format_number(value)}" for name, value in scalars if name not in shown_already
    ]


def format_best(best: tuple[str, float, int]) -> str:
    """Returns "best accuracy 0.98 at step 200"."""
    name, value, step = best
    return f"best {name} {format_number(value)} at step {step}"


def estimate_seconds_left(report: Report) -> float | None:
    """Returns the seconds to the last step, by the rate of the loop in the first report; None if they are not known."""
    if report.seconds_left is not None:
        return report.seconds_left
    rate = report.steps_per_second
    if report.total_steps is None or rate is None or not 0 < rate < math.inf:
        return None
    return max(0.0, (report.total_steps - report.step) / rate)


def format_duration(seconds: float) -> str:
    """Returns `seconds`, rounded up, as hours:minutes:seconds, e.g. "0:00:12" or "123:05:00"."""
    whole = math.ceil(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def format_number(value: float, digits: int = 4) -> str:
    """Returns `value` with `digits` significant digits; integer parts are always written in full."""
    if math.isfinite(value) and abs(value) < 1e15:
        if value == int(value):
            return str(int(value))
        if abs(value) >= 10 ** (digits - 1):
            return f"{value:.1f}"
    return f"{value:.{digits}g}"


def replace_unprintable(text: str, keep: str = "") -> str:
    """Returns `text` with each character that is neither printable nor in `keep` replaced by a space."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else " " for character in text
    )


def _select_set(report: Report, name: str) -> Report:
    best = (
        report.best if report.best is not None and report.best[0].startswith(f"{name}|") else None
    )
    return replace(
        report,
        kind=f"{report.kind} {name}",
        metrics=report.metrics[name],
        seconds=report.seconds_of_sets[name],
        best=(best[0].removeprefix(f"{name}|"), *best[1:]) if best else None,
    )
