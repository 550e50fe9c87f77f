"""The flags of a training program, beside Model Garden's."""

from __future__ import annotations

import pytest
from absl import flags
from official.common import flags as their_flags

from trainer_kit.compat.model_garden.config.flags import define_flags

ARGUMENTS = [
    "train.py",
    *("--experiment=digits", "--mode=train_and_eval", "--model_dir=/tmp/run", "--tpu=local"),
    *("--config_file=a.yaml", "--config_file=b.yaml", "--params_override=trainer.train_steps=1"),
    *("--gin_file=a.gin", "--gin_params=a.b = 1", "--gin_params=c.d = 2"),
]


def _ours() -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(flag_values=values)
    return values


def _described(values: flags.FlagValues, name: str) -> tuple[object, ...]:
    flag = values[name]
    return (
        *(type(flag), flag.default, flag.short_name, flag.boolean, type(flag.parser)),
        *(getattr(flag.parser, "enum_values", None), flag.allow_hide_cpp),
    )


def test_names_kinds_defaults_and_values_are_theirs() -> None:
    before = set(flags.FLAGS)
    their_flags.define_flags()
    theirs = set(flags.FLAGS) - before
    try:
        ours = _ours()
        assert set(ours) == theirs
        assert {name: _described(ours, name) for name in ours} == {
            name: _described(flags.FLAGS, name) for name in theirs
        }
    finally:
        for name in theirs:
            delattr(flags.FLAGS, name)


def test_a_command_line_of_theirs_is_understood() -> None:
    values = _ours()
    assert values(ARGUMENTS) == ["train.py"]
    assert (values.experiment, values.mode, values.tpu) == ("digits", "train_and_eval", "local")
    assert values.config_file == ["a.yaml", "b.yaml"]
    assert values.gin_params == ["a.b = 1", "c.d = 2"]


def test_gin_flags_of_a_library_stay() -> None:
    values = flags.FlagValues()
    flags.DEFINE_multi_string("gin_file", ["own.gin"], "A library's.", flag_values=values)
    define_flags(flag_values=values)
    assert values["gin_file"].default == ["own.gin"]
    assert "gin_params" in values


def test_another_mode_is_refused() -> None:
    with pytest.raises(flags.IllegalFlagValueError, match="train_and_post_eval"):
        _ours()(["train.py", "--mode=trian"])
