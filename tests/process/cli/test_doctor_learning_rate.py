"""`trainer-kit doctor learning_rate`: the curve, the suggestion, the picture, and that it writes
nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from trainer_kit.cli.doctor.doctor_learning_rate import _print
from trainer_kit.cli.main import main
from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.errors import ExitCode
from trainer_kit.testing import tiny_experiment
from trainer_kit.training.rate_range import DATA_ENDED, DIVERGED, RateRange


@register_experiment("tests_rated")
def _tiny() -> object:
    return tiny_experiment()


def test_the_curve_and_a_suggestion_are_printed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    arguments = ["--steps=60", "--lowest=1e-4", "--highest=1e4", "--picture=rates.png"]
    epochs = "--params_override=trainer.train_steps=3 epochs,trainer.validation_interval=10 %"

    assert main(["doctor", "learning_rate", "tests_rated", epochs, *arguments]) == ExitCode.DONE

    out = capsys.readouterr().out
    assert re.match(r"\s+0\.0001  +\d\.\d+  #+$", out.splitlines()[1])
    end = r"^stopped after \d\d steps, at the rate [\d.]+: training diverged$"
    assert re.search(end, out, re.MULTILINE)
    (rate,) = re.findall(r"^suggested learning rate: ([^ ,]+)", out, re.MULTILINE)
    assert 1e-4 < float(rate) < 1
    assert (here / "rates.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in here.iterdir()} == {"mine.py", "rates.png"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--lowest=0",
            "--lowest=0 and --highest=10: the first has to be above 0 and below the second",
        ),
        ("--highest=1e-9", "--lowest=1e-06 and --highest=1e-09"),
        ("--highest=inf", "and the second finite"),
        ("--steps=19", "--steps: 19 is too few for a curve; give at least 20"),
    ],
)
def test_rates_that_make_no_curve_are_refused(
    argument: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "learning_rate", "tests_rated", argument]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def _falling_curve(ended_by: str) -> RateRange:
    """A curve whose loss falls up to the highest rate."""
    return RateRange(np.logspace(-5, 1, 100), np.linspace(2, 1, 100), ended_by)


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        (
            _falling_curve(""),
            "no suggestion: the loss still falls at the highest of these rates, 10; "
            "try higher ones",
        ),
        (
            _falling_curve(DATA_ENDED),
            "at the highest of these rates, 10; give --steps=100, or more data",
        ),
        (_falling_curve(DIVERGED), "upper bound: 10, where the loss is lowest"),
    ],
)
def test_a_loss_that_still_falls_gets_no_suggestion_is_named(
    curve: RateRange, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _print(curve)
    assert message in capsys.readouterr().out
