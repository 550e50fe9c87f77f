"""The flags of `python -m trainer_kit.train`, and what is told before TensorFlow is needed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from trainer_kit.config.layers import Layer
from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.errors import ConfigError, UsageError
from trainer_kit.experiment import register_experiment
from trainer_kit.modes import MODES
from trainer_kit.train import configure, define_flags, main, parse_flags, sources

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    """The name of an experiment."""
    name = f"flagged_{next(_numbers)}"
    register_experiment(name)(ExperimentConfig)
    return name


def _main(*arguments: str) -> int:
    return main(["train", *arguments])


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


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_the_help_names_every_flag_and_mode(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(flag) == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text or f"--[no]{name}" in text for name in define_flags() if name != "h")
    assert all(name in text for name in MODES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experment=a"], "--experment: no such flag; did you mean experiment"),
        (["experiment=a"], "'experiment=a' is not a flag; flags begin with --"),
        (["--debug=maybe"], "flag --debug=maybe: "),
        (["--mode"], "mode"),
    ],
)
def test_a_wrong_flag_is_one_message_and_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.startswith("error: ")
    assert printed.out == "" and "Traceback" not in printed.err


def test_flags_that_are_needed_are_all_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: 3 mistakes")
    assert all(f"--{flag}: is needed; see --help" in error for flag in ("experiment", "mode", "model_dir"))


def test_mistakes_of_every_kind_are_in_one_report(name: str, tmp_path: Path) -> None:
    values = parse_flags([
        "train", f"--experiment={name}", "--mode=trian", "--params_override=trainer.train_step=5",
        f"--config_file={tmp_path}/none.yaml", "--params_override=runtime.num_gpus=x",
    ])  # fmt: skip
    with pytest.raises(ConfigError) as error:
        configure(values)
    assert len(error.value.mistakes) == 5
    for text in ("--model_dir: is needed", "did you mean train", "trainer.train_step", "none.yaml", "runtime.num_gpus"):
        assert text in str(error.value)


def test_a_misspelt_experiment_and_mode_are_told_together(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _main(f"--experiment={name}x", "--mode=trian", "--model_dir=anywhere") == 2
    error = capsys.readouterr().err
    assert "error: 2 mistakes" in error
    assert f"none is called '{name}x'; did you mean" in error and "no mode is called 'trian'" in error


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert _main("--mode=trian", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_model_dir_that_cannot_be_written_is_exit_6_for_modes_that_train(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    common = (f"--experiment={name}", f"--model_dir={tmp_path}/file/run")
    for mode, chosen in MODES.items():
        if chosen.trains:
            assert _main(*common, f"--mode={mode}") == 6
        else:
            configure(parse_flags(["train", *common, f"--mode={mode}"]))


def test_flags_for_devices_and_services_win_over_every_other_source(name: str) -> None:
    values = parse_flags([
        "train", f"--experiment={name}", "--mode=eval", "--model_dir=anywhere", "--tpu=local",
        "--tf_data_service=grpc://host:5000", "--params_override=runtime.tpu=other",
    ])  # fmt: skip
    resolved = configure(values)
    data = resolved.config.task.train_data
    assert resolved.config.runtime.tpu == "local"
    assert (data.tf_data_service_address, data.enable_tf_data_service) == ("grpc://host:5000", True)
    assert resolved.config.task.validation_data.tf_data_service_address is None
    assert resolved.origins["runtime.tpu"] == "--tpu"
    assert resolved.origins["task.train_data.tf_data_service_address"] == "--tf_data_service"


def test_without_flags_of_that_kind_nothing_is_overridden() -> None:
    assert sources(parse_flags(["train"])).flags == Layer({}, {})


def test_an_unknown_flag_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="did you mean model_dir"):
        parse_flags(["train", "--modeldir=a"])
