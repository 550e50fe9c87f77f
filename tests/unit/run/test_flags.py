"""The flags of `python -m trainer_kit.train`, and the run that they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_kit.config.resolve import ConfigSources
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import UsageError
from trainer_kit.run.flags import (
    build_request,
    build_sources,
    define_flags,
    format_attempt_flags,
    format_first_attempt_flags,
    parse_flags,
)
from trainer_kit.run.preflight import RunRequest


def test_the_flags_and_their_defaults_are_an_interface() -> None:
    values = define_flags()

    assert {name: values[name].default for name in values} == {
        "experiment": None,
        "mode": None,
        "model_dir": None,
        "checkpoint": "latest",
        "eval_name": "continuous_eval",
        "profile": None,
        "tpu": None,
        "tf_data_service": None,
        "config_file": [],
        "gin_file": [],
        "gin_params": [],
        "params_override": [],
        "import_module": [],
        "allow_config_change": [],
        "max_restarts": 0,
        "from_step": None,
        "allow_partial_restore": False,
        "debug": False,
        "help": False,
        "h": False,
    }


def test_the_flags_make_the_request() -> None:
    values = parse_flags(
        [
            "train",
            "--experiment=a",
            "--mode=eval",
            "--model_dir=b",
            "--checkpoint=best",
            "--eval_name=c",
            "--import_module=d",
            "--import_module=e",
            "--allow_config_change=f.g",
            "--config_file=h",
            "--profile=i",
        ]
    )

    assert build_request(values) == RunRequest(
        "a",
        "eval",
        "b",
        ConfigSources(config_files=("h",)),
        ("d", "e"),
        ("f.g",),
        checkpoint="best",
        eval_name="c",
        profile="i",
    )
    assert build_request(parse_flags(["train"])) == RunRequest(None, None, None)


def test_flags_are_not_global_and_override_nothing_unless_given() -> None:
    assert parse_flags(["train", "--mode=train"]).mode == "train"

    values = parse_flags(["train"])
    assert values.mode is None
    assert build_sources(values).flags == ConfigLayer({}, {})


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean --model_dir"):
        parse_flags(["train", "--modeldir=a"])


@pytest.mark.parametrize("number", ["-1", "1.5", "many"])
def test_an_impossible_number_of_restarts_is_a_usage_error(number: str) -> None:
    with pytest.raises(UsageError):
        parse_flags(["train", f"--max_restarts={number}"])


def test_a_supervised_run_gets_the_flags_without_max_restarts(tmp_path: Path) -> None:
    (tmp_path / "flags").write_text("--max_restarts=7\n--tpu=local\n")
    values = parse_flags(
        [
            "train",
            "--max_restarts",
            "3",
            "--experiment",
            "a",
            "-mode=train",
            "--model_dir=b c",
            "--nodebug",
            "--gin_params=x.y = '--max_restarts=5'",
            "--gin_params=z = 1",
            "--params_override=a:\n  b: 1\n",
            "--eval_name=",
            f"--flagfile={tmp_path}/flags",
            "--max_restarts=2",
        ]
    )

    assert values.max_restarts == 2

    arguments = format_attempt_flags(values)
    again = parse_flags(["train", *arguments])
    changed = {name for name in define_flags() if again[name].value != values[name].value}

    assert changed == {"max_restarts"}
    assert again.max_restarts == 0
    assert sorted(arguments) == [
        "--eval_name=",
        "--experiment=a",
        "--gin_params=x.y = '--max_restarts=5'",
        "--gin_params=z = 1",
        "--mode=train",
        "--model_dir=b c",
        "--nodebug",
        "--params_override=a:\n  b: 1\n",
        "--tpu=local",
    ]


def test_every_flag_reaches_the_run_under_a_supervisor() -> None:
    flags = define_flags()
    once_or_never = {"max_restarts", "from_step", "h"}  # h is help
    names = set(flags) - once_or_never
    flags_given = [f"--{name}" if flags[name].boolean else f"--{name}=1" for name in names]

    assert sorted(format_attempt_flags(parse_flags(["train", *flags_given]))) == sorted(flags_given)


@pytest.mark.parametrize(("flag", "step"), [("0", 0), ("500", 500), ("ckpt-500", 500)])
def test_from_step_takes_a_step_or_its_checkpoint(flag: str, step: int) -> None:
    values = parse_flags(["train", "--mode=train", f"--from_step={flag}"])

    assert values.from_step == step
    assert format_attempt_flags(values) == ["--mode=train"]
    assert format_first_attempt_flags(values) == [f"--from_step={step}"]
    assert format_first_attempt_flags(parse_flags(["train"])) == []


@pytest.mark.parametrize("flag", ["-1", "1.5", "", "best", "runs/x/ckpt-500"])
def test_from_step_says_what_it_takes(flag: str) -> None:
    with pytest.raises(
        UsageError, match=r"give a step of this run's checkpoints, such as 500 or ckpt-500, or 0"
    ) as error:
        parse_flags(["train", f"--from_step={flag}"])

    assert ("task.init_checkpoint" in str(error.value)) == ("/" in flag)
