"""The flags of `python -m trainer_kit.train`, and the run that they ask for."""

from __future__ import annotations

import pytest

from trainer_kit.config.layers import Layer
from trainer_kit.config.resolve import Sources
from trainer_kit.errors import UsageError
from trainer_kit.flags import define_flags, parse_flags, request, sources
from trainer_kit.preflight import Request


def test_the_flags_and_their_defaults_are_an_interface() -> None:
    values = define_flags()
    assert {name: values[name].default for name in values} == {
        "experiment": None,
        "mode": None,
        "model_dir": None,
        "checkpoint": "latest",
        "eval_name": "continuous_eval",
        "tpu": None,
        "tf_data_service": None,
        "config_file": [],
        "gin_file": [],
        "gin_params": [],
        "params_override": [],
        "import_module": [],
        "allow_config_change": [],
        "debug": False,
        "help": False,
        "h": False,
    }


def test_flags_are_defined_nowhere_else_and_two_parses_share_nothing() -> None:
    first, second = parse_flags(["train", "--mode=train"]), parse_flags(["train"])
    assert (first.mode, second.mode) == ("train", None)


def test_the_flags_make_the_request() -> None:
    values = parse_flags([
        "train", "--experiment=a", "--mode=eval", "--model_dir=b", "--checkpoint=best", "--eval_name=c",
        "--import_module=d", "--import_module=e", "--allow_config_change=f.g", "--config_file=h",
    ])  # fmt: skip
    assert request(values) == Request(
        "a", "eval", "b", Sources(config_files=("h",)), ("d", "e"), ("f.g",), checkpoint="best", eval_name="c"
    )
    assert request(parse_flags(["train"])) == Request(None, None, None)


def test_without_flags_of_that_kind_nothing_is_overridden() -> None:
    assert sources(parse_flags(["train"])).flags == Layer({}, {})


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean model_dir"):
        parse_flags(["train", "--modeldir=a"])
