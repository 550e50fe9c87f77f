"""`trainer-kit doctor precision`: both losses, the variables that differ, and both speeds."""

from __future__ import annotations

import re

import keras
import pytest
import tf_keras

from trainer_kit.cli.main import main
from trainer_kit.config.experiments import register_experiment
from trainer_kit.errors import ExitCode
from trainer_kit.testing import tiny_experiment


@register_experiment("tests_precise")
def _precise() -> object:
    return tiny_experiment(freeze=("/dense/",))  # the same layer of both models


def test_losses_differences_and_speeds_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    keras.utils.clear_session()
    schedule = "{type: cosine, constant: null, cosine: {initial_learning_rate: 0.05, decay_steps: 100 %}}"
    changed = (
        "--params_override=runtime.mixed_precision_dtype=float16",
        f"--params_override=trainer: {{optimizer_config: {{learning_rate: {schedule}}}}}",
    )
    assert main(["doctor", "precision", "tests_precise", "--steps=20", *changed]) == ExitCode.DONE
    out = capsys.readouterr().out
    assert re.search(r"^ +1 +1\.\d+ +1\.\d+  [+-]0\.\d\d%$", out, re.MULTILINE), out
    assert re.search(r"^ +\d+\.\d%  [\w/]*kernel$", out, re.MULTILINE), out
    assert keras.config.dtype_policy().name == tf_keras.mixed_precision.global_policy().name == "float32"
    assert re.search(
        r"^[\d.,]+ steps/s in float32, [\d.,]+ in float16 \(\d+\.\d\d times as many\)$", out, re.MULTILINE
    ), out


@pytest.mark.parametrize(
    ("argument", "message"),
    [("--steps=20", "the experiment computes in float32; name the dtype"), ("--steps=0", "0 trains nothing")],
)
def test_nothing_to_compare_is_a_usage_error(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "precision", "tests_precise", argument]) == ExitCode.USAGE
    assert message in capsys.readouterr().err
