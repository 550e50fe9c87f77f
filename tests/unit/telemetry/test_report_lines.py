from __future__ import annotations

import math

import pytest

from tests.builders import report
from trainer_kit.telemetry import report_lines as lines
from trainer_kit.telemetry.report import EVALUATING, Activity, EpochProgress


def test_a_training_line_has_all_figures() -> None:
    built = report(
        200,
        total_steps=400,
        training_loss=0.1230001,
        learning_rate=1e-3,
        steps_per_second=1234.5,
        examples_per_second=39504.2,
        best=("accuracy", 0.5, 100),
    )

    assert (
        lines.format_single_report(built)
        == "train | step 200/400 | 1234.5 steps/s | 39504 examples/s | 0:00:01 left | training_loss"
        " 0.123 | learning_rate 0.001"
    )


def test_a_training_line_tells_how_the_devices_are_used() -> None:
    built = report(
        20,
        steps_per_second=2.0,
        examples_per_second=64.0,
        tokens_per_second=8192.0,
        flops_utilization=0.4132,
        peak_memory_bytes=13 * 2**29,
    )

    assert (
        lines.format_single_report(built)
        == "train | step 20 | 2 steps/s | 8192.0 tokens/s | MFU 41 % | peak 6.5 GiB"
    )


@pytest.mark.parametrize(
    ("total", "epochs", "expected"),
    [
        (300, 3, "step 150/300 (epoch 2/3)"),
        (None, None, "step 150 (epoch 2)"),
    ],
)
def test_a_line_of_a_run_with_epochs_names_the_epoch(
    total: int | None, epochs: int | None, expected: str
) -> None:
    place = EpochProgress(epoch=2, epochs=epochs, step=50, steps=100)

    assert expected in lines.format_single_report(
        report(150, total_steps=total, epoch_progress=place)
    )


def test_an_evaluation_line_has_its_seconds_and_the_best() -> None:
    metrics = {"digits": {"accuracy": 0.98333}}
    best = ("digits/accuracy", 0.98333, 200)

    built = report(200, "validation", metrics=metrics, seconds=1.5, best=best)

    assert (
        lines.format_single_report(built)
        == "validation | step 200 | digits/accuracy 0.9833 | best digits/accuracy 0.9833 at step"
        " 200 | 1.5 s"
    )


def test_the_best_of_other_weights_is_shown_once() -> None:
    metrics = {"loss": 0.5, "weights": {"loss": 0.75, "best_loss": 0.25}}
    built = report(9, "validation", total_steps=10, metrics=metrics, best=("weights|loss", 0.25, 3))

    assert lines.format_single_report(built).endswith(
        "| loss 0.5 | weights/loss 0.75 | best weights|loss 0.25 at step 3"
    )


def test_each_validation_set_has_a_line_with_seconds_and_best() -> None:
    metrics = {"dev": {"accuracy": 0.5}, "rare": {"accuracy": 0.25}, "best_dev|accuracy": 0.75}
    built = report(
        9,
        "validation",
        total_steps=10,
        metrics=metrics,
        seconds=2.0,
        best=("dev|accuracy", 0.75, 3),
        seconds_of_sets={"dev": 0.5, "rare": 1.25},
    )

    assert lines.format_report_lines(built) == [
        "validation dev | step 9/10 | accuracy 0.5 | best accuracy 0.75 at step 3 | 0.5 s",
        "validation rare | step 9/10 | accuracy 0.25 | 1.25 s",
    ]


@pytest.mark.parametrize(
    ("done", "total", "expected"),
    [
        (120, 600, "batch 120/600 | 0:00:12 | 0:00:48 left"),
        (0, 600, "batch 0/600 | 0:00:12"),
        (120, None, "batch 120 | 0:00:12"),
        (601, 600, "batch 601/601 | 0:00:12 | 0:00:00 left"),
    ],
)
def test_a_running_evaluation_shows_its_progress_and_time_left(
    done: int, total: int | None, expected: str
) -> None:
    assert (
        lines.format_activity(Activity(EVALUATING, 200, done, total, 12.0))
        == f"evaluating | step 200 | {expected}"
    )


def test_a_line_is_one_line_whatever_names_hold() -> None:
    built = report(1, metrics={"a\nb\x1b[31m\r\tc": 1.0})
    assert lines.format_single_report(built) == "train | step 1 | a b [31m  c 1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *(
            (1.0, "1"),
            (0.123456, "0.1235"),
            (1e-5, "1e-05"),
            (123456.0, "123456"),
            (1234.567, "1234.6"),
            (0.0, "0"),
        ),
        *(
            (-0.5, "-0.5"),
            (math.nan, "nan"),
            (math.inf, "inf"),
            (-math.inf, "-inf"),
            (1e300, "1e+300"),
        ),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert lines.format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98123456, "0.981235"),
        (1234.5678, "1234.57"),
        (1234567.25, "1234567.2"),
        (math.nan, "nan"),
    ],
)
def test_numbers_may_have_more_digits(value: float, text: str) -> None:
    assert lines.format_number(value, digits=6) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00:00"), (11.2, "0:00:12"), (3600, "1:00:00"), (443100, "123:05:00")],
)
def test_durations_are_hours_minutes_seconds(seconds: float, text: str) -> None:
    assert lines.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("total", "rate", "left"),
    [
        (400, 10.0, 30.0),
        (100, 10.0, 0.0),
        (None, 10.0, None),
        (400, None, None),
        (400, 0.0, None),
        (400, math.nan, None),
    ],
)
def test_the_time_left_is_told_where_it_can_be(
    total: int | None, rate: float | None, left: float | None
) -> None:
    built = report(100, total_steps=total, steps_per_second=rate)

    assert lines.estimate_seconds_left(built) == left
    assert len(lines.format_time_left(built)) == (left is not None)


@pytest.mark.parametrize("rate", [0.0123, 12.34, 39504.2, math.inf, math.nan, 0.0])
def test_odd_rates_do_not_break_a_line(rate: float) -> None:
    built = report(1, total_steps=5, steps_per_second=rate, examples_per_second=rate)
    assert "steps/s | " in lines.format_single_report(built)
