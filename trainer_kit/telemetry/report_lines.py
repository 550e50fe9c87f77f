"""Formats reports as lines of text without control characters, one line each."""

from __future__ import annotations

import math
from dataclasses import replace

from trainer_kit.telemetry.report import EVALUATING, TRAINING, Activity, EpochProgress, Report
from trainer_kit.telemetry.scalars import flatten_scalars


def format_report_lines(report: Report) -> list[str]:
    """Returns the line of `report`.

    With several validation sets, returns one line for each set, which begins like "validation dev".
    """
    if not report.seconds_of_sets:
        return [format_single_report(report)]
    set_reports = [_select_set(report, name) for name in report.seconds_of_sets]
    return [format_single_report(set_report) for set_report in set_reports]


def format_single_report(report: Report) -> str:
    """Returns the line of `report`, its parts separated by " | ".

    For example "train | step 200/400 | 1234.5 steps/s | 39504 examples/s | 0:00:12 left |
    training_loss 0.123", or "validation | step 200/400 | accuracy 0.98 | best accuracy 0.98 at step
    200 | 1.5 s".
    """
    is_training = report.kind == "train"
    parts = [report.kind]
    parts.append(f"step {format_progress(report)}")
    parts += format_rates(report)
    parts += format_time_left(report)
    parts += format_metrics(report)
    if not is_training and report.best is not None:
        parts.append(format_best(report.best))
    if not is_training and report.seconds > 0:
        seconds = format_number(report.seconds)
        parts.append(f"{seconds} s")

    line = " | ".join(parts)
    return replace_unprintable(line)


def format_activity(activity: Activity) -> str:
    """Returns the line of the run's current activity, its parts separated by " | ".

    For example "evaluating | step 200 | batch 120/600 | 0:00:12 | 0:00:48 left", "training | step
    203/1000 | 0:00:12" or "building the model | 0:00:12". The time is that of this evaluation,
    training loop or phase.
    """
    name = activity.name
    completed = activity.completed
    total = activity.total
    remaining = None
    parts = [name]
    if name == EVALUATING:
        batches = _format_fraction(completed, total)
        parts.append(f"step {activity.step}")
        parts.append(f"batch {batches}")
        if total is not None:
            remaining = max(0, total - completed)
    elif name == TRAINING:
        steps = _format_fraction(activity.step, total)
        parts.append(f"step {steps}")
        if total is not None:
            remaining = max(0, total - activity.step)

    # The time left follows from the speed of this activity so far.
    parts.append(format_duration(activity.seconds))
    if remaining is not None and completed > 0:
        seconds_left = activity.seconds / completed * remaining
        time_left = format_duration(seconds_left)
        parts.append(f"{time_left} left")
    return " | ".join(parts)


def _format_fraction(done: int, total: int | None) -> str:
    if total is None:
        return f"{done}"
    shown_total = max(done, total)
    return f"{done}/{shown_total}"


def format_progress(report: Report) -> str:
    """Returns "240/400 (epoch 3/4)". Unknown totals and epochs are left out."""
    steps = f"{report.step}"
    if report.total_steps is not None:
        steps = f"{report.step}/{report.total_steps}"
    if report.epoch_progress is None:
        return steps
    return f"{steps} (epoch {_format_epoch(report.epoch_progress)})"


def format_epoch_progress(progress: EpochProgress) -> str:
    """Returns "epoch 3/4, step 40/100". The number of epochs is left out if it is not known."""
    return f"epoch {_format_epoch(progress)}, step {progress.step}/{progress.steps}"


def _format_epoch(progress: EpochProgress) -> str:
    if progress.epochs is None:
        return f"{progress.epoch}"
    return f"{progress.epoch}/{progress.epochs}"


def format_rates(report: Report) -> list[str]:
    """Returns the speed of a loop and its use of the devices, as far as they are known.

    The tokens per second stand in place of the examples per second.
    """
    examples_per_second = report.examples_per_second
    if report.tokens_per_second is not None:
        examples_per_second = None
    rates = (
        (report.steps_per_second, "steps/s"),
        (examples_per_second, "examples/s"),
        (report.tokens_per_second, "tokens/s"),
    )
    texts = []
    for rate, unit in rates:
        if rate is None:
            continue
        if rate >= 10_000:
            texts.append(f"{rate:.0f} {unit}")
        elif rate >= 10:
            texts.append(f"{rate:.1f} {unit}")
        else:
            texts.append(f"{rate:.3g} {unit}")

    if report.flops_utilization is not None:
        percentage = 100 * report.flops_utilization
        texts.append(f"MFU {percentage:.2g} %")
    if report.peak_memory_bytes is not None:
        gibibytes = report.peak_memory_bytes / 2**30
        texts.append(f"peak {gibibytes:.3g} GiB")
    return texts


def format_time_left(report: Report, elapsed: float = 0.0) -> list[str]:
    """Returns the time left, `elapsed` seconds after the report. [] if it is not known."""
    seconds = estimate_seconds_left(report)
    if seconds is None:
        return []
    remaining = max(0.0, seconds - elapsed)
    time_left = format_duration(remaining)
    return [f"{time_left} left"]


def format_metrics(report: Report) -> list[str]:
    """Returns "name value" for each scalar of the report, except the best one.

    `format_best` shows the best one.
    """
    hidden_names = set()
    if report.best:
        # The best metric of one of several validation sets is nested under the name of the set.
        best_name = report.best[0]
        group, bar, metric = best_name.rpartition("|")
        nested_name = f"{group}{bar}best_{metric}"
        hidden_names = {f"best_{best_name}", nested_name.replace("|", "/")}

    texts = []
    scalars = flatten_scalars(report.metrics)
    for name, value in scalars.items():
        if name not in hidden_names:
            number = format_number(value)
            texts.append(f"{name} {number}")
    return texts


def format_best(best: tuple[str, float, int]) -> str:
    """Returns "best accuracy 0.98 at step 200"."""
    name, value, step = best
    number = format_number(value)
    return f"best {name} {number} at step {step}"


def estimate_seconds_left(report: Report) -> float | None:
    """Returns the seconds to the last step, or None if they are not known.

    In the first report they follow from the rate of its loop.
    """
    if report.seconds_left is not None:
        return report.seconds_left
    rate = report.steps_per_second
    if report.total_steps is None or rate is None:
        return None
    if not 0 < rate < math.inf:
        return None
    steps_left = report.total_steps - report.step
    return max(0.0, steps_left / rate)


def format_duration(seconds: float) -> str:
    """Returns `seconds`, rounded up, as hours:minutes:seconds, e.g. "0:00:12" or "123:05:00"."""
    whole_seconds = math.ceil(seconds)
    minutes, rest = divmod(whole_seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def format_number(value: float, digits: int = 4) -> str:
    """Returns `value` as text with about `digits` significant digits.

    An integer below 1e15 has all its digits. Another number with `digits` or more digits before the
    point has them all and one decimal, such as 1234.6. The rest has `digits` significant digits.
    """
    if math.isfinite(value) and abs(value) < 1e15:
        if value == int(value):
            return str(int(value))
        if abs(value) >= 10 ** (digits - 1):
            return f"{value:.1f}"
    return f"{value:.{digits}g}"


def replace_unprintable(text: str, keep: str = "") -> str:
    """Returns `text` with a space for each character that is not printable and not in `keep`."""
    if text.isprintable():
        return text
    characters = []
    for character in text:
        is_kept = character.isprintable() or character in keep
        characters.append(character if is_kept else " ")
    return "".join(characters)


def _select_set(report: Report, name: str) -> Report:
    """Returns the part of a report that belongs to one of several validation sets."""
    best = None
    if report.best is not None:
        best_name, value, step = report.best
        prefix = f"{name}|"
        if best_name.startswith(prefix):
            best = (best_name.removeprefix(prefix), value, step)
    return replace(
        report,
        kind=f"{report.kind} {name}",
        metrics=report.metrics[name],
        seconds=report.seconds_of_sets[name],
        best=best,
    )
