"""The text of `python -m trainer_kit.train --help`, and the table of flags that it is made from."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_kit.run.flag_texts import (
    EXAMPLES,
    FLAGS,
    describe_flag,
    format_help_text,
    format_usage,
)
from trainer_kit.run.flags import build_request, define_flags, parse_flags

ROOT = Path(__file__).parents[3]


def test_every_flag_is_described_by_a_whole_sentence() -> None:
    assert set(define_flags()) - {"h"} == {
        name for name, flag in FLAGS.items() if flag.kind != "absl"
    }
    assert all(
        flag.sentence[0].isupper() and flag.sentence.endswith(".") for flag in FLAGS.values()
    )


def test_the_default_in_the_table_is_the_one_that_counts() -> None:
    values = define_flags()
    told = {name: flag.default for name, flag in FLAGS.items() if flag.default is not None}

    assert {name: str(values[name].default).lower() for name in told} == told


@pytest.mark.parametrize("command", EXAMPLES.values())
def test_the_examples_are_complete_commands(command: str) -> None:
    words = shlex.split(command.replace("\\\n", ""))

    assert words[:3] == ["python", "-m", "trainer_kit.train"]

    asked = build_request(parse_flags(words[2:]))
    assert asked.experiment
    assert asked.mode
    assert asked.model_dir


def test_the_help_opens_with_two_examples() -> None:
    text = format_help_text()
    before = text.partition("\nflags:\n")[0]

    assert len(EXAMPLES) == 2
    assert all(command in before for command in EXAMPLES.values())
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("name", "shown"),
    [("model_dir", "--model_dir=FOLDER"), ("debug", "--debug"), ("help", "--help, -h")],
)
def test_a_flag_is_shown_as_it_is_written(name: str, shown: str) -> None:
    assert format_usage(name) == shown


def test_needed_flags_and_defaults_are_named() -> None:
    assert describe_flag("mode").endswith(" Required.")
    assert describe_flag("checkpoint").endswith(" Default: latest.")
    assert describe_flag("debug") == FLAGS["debug"].sentence


def test_the_help_needs_no_tensorflow() -> None:
    code = (
        "import sys; from trainer_kit import train; train.main(['train', '-h'])\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )

    assert done.returncode == 0
    assert done.stdout == f"{format_help_text()}\n"
