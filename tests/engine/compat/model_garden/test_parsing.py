"""From flags to a config of theirs: the same config as theirs gives, and mistakes in one report of
ours.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from official.core import config_definitions, exp_factory, train_utils
from official.core.train_utils import ParseConfigOptions
from official.utils.testing import mock_task  # noqa: F401 - registers the experiment

from trainer_kit.compat.model_garden import parsing
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.config.serialize import from_yaml
from trainer_kit.errors import ConfigError, UsageError

FILES = {
    "data.yaml": """
task: {train_data: {global_batch_size: 4, input_path: {a: x, b: [y, z]}}}
trainer: {train_steps: 3}
""",
    "rates.yaml": """
trainer:
  train_steps: 5
  optimizer_config:
    optimizer: {type: lars, lars: {momentum: 0.5}}
    learning_rate: {type: stepwise, stepwise: {boundaries: [2, 4], values: [0.1, 0.2, 0.3]}}
    ema: {average_decay: 0.9}
runtime: {distribution_strategy: one_device}
""",
    "more.json": '{"trainer": {"train_steps": 6, "max_to_keep": 1}}',
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def _parse_both(
    folder: Path, experiment: str = "mock", config_file: Any = (), **flags: Any
) -> tuple[Any, Any]:
    """Returns the config of theirs and of ours for the same flags, which name files of FILES."""
    files = [str(folder / name) for name in config_file]
    if flags.get("params_override") in FILES:
        flags["params_override"] = str(folder / flags["params_override"])
    theirs = train_utils.parse_configuration(ParseConfigOptions(experiment, files, **flags))
    return theirs, parsing.parse_configuration(ParseConfigOptions(experiment, files, **flags))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"config_file": ["data.yaml", "rates.yaml", "more.json"]},
        {"config_file": ["rates.yaml", "data.yaml"]},
        {"config_file": ["data.yaml"], "params_override": "task.train_data.input_path=other"},
        {"config_file": ["data.yaml"], "params_override": "task.train_data.input_path.a=other"},
        {
            "params_override": "{trainer: {train_steps: 9}, "
            "task: {train_data: {input_path: [p, q]}}}"
        },
        {"params_override": "rates.yaml"},
        {"tpu": "grpc://10.0.0.2:8470"},
        {
            "config_file": ["data.yaml", "rates.yaml"],
            "tf_data_service": "grpc://10.0.0.3:5050",
            "params_override": "task.train_data.tf_data_service_address=elsewhere,"
            "runtime.num_gpus=1,trainer.optimizer_config.optimizer.type=adamw",
        },
    ],
    ids=str,
)
def test_the_same_flags_give_the_same_config(files: Path, flags: dict[str, Any]) -> None:
    theirs, ours = _parse_both(files, **flags)

    assert type(ours) is type(theirs)
    assert type(ours.task) is type(theirs.task)
    assert ours.as_dict() == theirs.as_dict()
    for config in (ours, theirs):
        with pytest.raises(ValueError, match="locked"):
            config.override({"trainer": {"train_steps": 1}})


@dataclasses.dataclass
class _Flags(ParseConfigOptions):
    """As absl's FLAGS: several files, several overrides, and more flags than are looked at."""

    params_override: Any = ()
    mode: str = "train"


def test_an_explicit_value_counts_even_if_it_is_our_choice(files: Path) -> None:
    override = "trainer.best_checkpoint_export_subdir=best_ckpt,runtime.distribution_strategy=auto"

    _, plain = _parse_both(files)
    explicit = parsing.parse_configuration(ParseConfigOptions("mock", [], params_override=override))

    assert plain.trainer.best_checkpoint_export_subdir == ""
    assert plain.runtime.distribution_strategy == "mirrored"
    assert explicit.trainer.best_checkpoint_export_subdir == "best_ckpt"
    assert explicit.runtime.distribution_strategy == "auto"


def test_repeated_flags_are_applied_in_order(files: Path) -> None:
    overrides = ["trainer.train_steps=8,trainer.max_to_keep=4", "trainer.train_steps=9"]
    flags = _Flags("mock", [str(files / "data.yaml")], params_override=overrides)
    config = parsing.parse_configuration(flags, lock_return=False)

    assert (config.trainer.train_steps, config.trainer.max_to_keep) == (9, 4)

    config.trainer.train_steps = 10  # it is not locked


def test_options_of_our_engine_can_be_given_too(files: Path) -> None:
    overrides = "trainer.fuse_steps=4,trainer.continuous_eval.policy=latest,runtime.random_seed=7"
    config = parsing.parse_configuration(ParseConfigOptions("mock", [], params_override=overrides))
    converted = convert(config)

    assert (converted.trainer.fuse_steps, converted.runtime.random_seed) == (4, 7)
    assert converted.trainer.continuous_eval.policy == "latest"
    with pytest.raises(KeyError, match="does not exist"):
        _parse_both(files, params_override=overrides)


def test_all_mistakes_of_files_and_override_are_in_one_report(files: Path) -> None:
    (files / "wrong.yaml").write_text(
        "trainer:\n  train_stepz: 3\n  max_to_keep: few\nruntime: {num_gpu: 1}\n"
    )
    text = "task.train_data.global_batch_sise=1,trainer.steps_per_loop=3,trainer.summary_interval=4"
    flags = ParseConfigOptions("mock", [str(files / "wrong.yaml")], params_override=text)

    with pytest.raises(ConfigError) as error:
        parsing.parse_configuration(flags)

    origins = {mistake.path: mistake.origin.rpartition("/")[2] for mistake in error.value.mistakes}
    assert origins == {
        "trainer.train_stepz": "wrong.yaml:2",
        "trainer.max_to_keep": "wrong.yaml:3",
        "runtime.num_gpu": "wrong.yaml:4",
        "task.train_data.global_batch_sise": "--params_override",
        "trainer.summary_interval": "--params_override",
    }


def test_the_override_can_mend_what_a_file_breaks(files: Path) -> None:
    (files / "short.yaml").write_text("trainer: {steps_per_loop: 300, summary_interval: 500}\n")
    flags = ParseConfigOptions("mock", [str(files / "short.yaml")])

    with pytest.raises(ConfigError, match="500 is not a multiple of steps_per_loop"):
        parsing.parse_configuration(flags)

    flags.params_override = "trainer.summary_interval=600"
    assert parsing.parse_configuration(flags).trainer.summary_interval == 600


def test_an_experiment_and_a_folder_have_to_be_named() -> None:
    with pytest.raises(UsageError, match="--experiment must be specified"):
        parsing.parse_configuration(ParseConfigOptions(None, []))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no experiment is called 'mokc'; did you mean mock\?"):
        parsing.parse_configuration(ParseConfigOptions("mokc", []))
    with pytest.raises(UsageError, match="model_dir must be specified"):
        parsing.serialize_config(exp_factory.get_exp_config("mock"), None)  # type: ignore[arg-type]


def test_their_restrictions_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    mock = exp_factory.get_exp_config("mock")
    config = config_definitions.ExperimentConfig(
        task=mock.task,
        trainer=mock.trainer,
        runtime=mock.runtime,
        restrictions=["trainer.train_steps == trainer.max_to_keep"],
    )
    monkeypatch.setattr(exp_factory, "get_exp_config", lambda name: config)

    flags = ParseConfigOptions("mock", [], params_override="trainer.train_steps=2")
    with pytest.raises(KeyError, match="inconsistency"):
        parsing.parse_configuration(flags)
    flags = ParseConfigOptions("mock", [], params_override="trainer.train_steps=5")
    assert parsing.parse_configuration(flags).trainer.train_steps == 5


@pytest.mark.parametrize("ours", [False, True])
def test_the_record_is_one_of_our_runs(tmp_path: Path, files: Path, ours: bool) -> None:
    _, params = _parse_both(files, config_file=["data.yaml", "rates.yaml"])

    parsing.serialize_config(convert(params) if ours else params, str(tmp_path / "run"))

    text = (tmp_path / "run" / "params.yaml").read_text()
    default = convert(exp_factory.get_exp_config("mock"))
    assert from_yaml(text, default).as_dict() == convert(params).as_dict()

    flags = ParseConfigOptions("mock", [str(tmp_path / "run" / "params.yaml")])
    again = parsing.parse_configuration(flags)
    assert convert(again).as_dict() == convert(params).as_dict()


def test_the_record_of_a_run_is_not_overwritten(tmp_path: Path) -> None:
    config = exp_factory.get_exp_config("mock")
    folder = tmp_path / "run"
    parsing.serialize_config(config, str(folder))
    config.task.train_data.global_batch_size = 8
    parsing.serialize_config(config, str(folder))  # nothing was trained yet
    before = (folder / "params.yaml").read_bytes()
    tf.train.Checkpoint(global_step=tf.Variable(1)).write(str(folder / "ckpt-1"))
    parsing.serialize_config(config, str(folder))

    config.task.train_data.global_batch_size = 16
    message = r"task.train_data.global_batch_size: was 8 when this run began and is 16 now"
    with pytest.raises(ConfigError, match=message):
        parsing.serialize_config(config, str(folder))
    assert (folder / "params.yaml").read_bytes() == before

    config.task.train_data.global_batch_size = 8
    config.trainer.train_steps = 100
    parsing.serialize_config(config, str(folder))  # a run may be prolonged
    assert "train_steps: 100" in (folder / "params.yaml").read_text()


def test_a_program_may_give_an_override_as_a_mapping() -> None:
    override = {"trainer": {"train_steps": 3, "optimizer_config": {"optimizer": {"type": "sgd"}}}}
    options = ParseConfigOptions("mock", [], params_override=override)
    trainer = parsing.parse_configuration(options, print_return=False).trainer

    assert (trainer.train_steps, trainer.optimizer_config.optimizer.type) == (3, "sgd")
