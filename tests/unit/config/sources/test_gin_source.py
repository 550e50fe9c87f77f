"""gin: sections, factory arguments, scopes, both passes, origins, and repeated use in a process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gin
import pytest

from trainer_kit.config.experiment_registry import register_experiment
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_source import (
    get_operative_gin_config,
    run_gin_first_pass,
    run_gin_second_pass,
)
from trainer_kit.errors import ConfigError, Mistake


@gin.configurable(module="sample_values")
def triple(number: int = 1) -> int:
    return 3 * number


@gin.configurable(module="sample_values")
def failing_value() -> int:
    raise OSError("no such thing")


def read_first_pass(
    experiment: str, *bindings: str, files: tuple[str, ...] = ()
) -> tuple[dict[str, Any], list[Mistake]]:
    first_pass = run_gin_first_pass(files, bindings, experiment)
    return first_pass.layer.values, list(first_pass.mistakes)


def read_only_mistake(experiment: str, *bindings: str) -> Mistake:
    _, mistakes = read_first_pass(experiment, *bindings)
    (mistake,) = mistakes
    return mistake


def read_second_pass_mistakes(*bindings: str, files: tuple[str, ...] = ()) -> list[Mistake]:
    with pytest.raises(ConfigError) as caught:
        run_gin_second_pass(files, bindings)
    return list(caught.value.mistakes)


def test_a_section_goes_by_the_name_of_its_class(experiment: str) -> None:
    bindings = [
        "TrainerConfig.train_steps = 5",
        "NetConfig.rate = 0.25",
        "SampleTaskConfig.weights = (1, 2)",
    ]
    config: Any = resolve_config(experiment, ConfigSources(gin_params=tuple(bindings))).config

    assert config.trainer.train_steps == 5
    assert config.task.model.rate == 0.25
    assert config.task.weights == (1.0, 2.0)


def test_a_scope_tells_sections_of_one_class_apart_and_wins(experiment: str) -> None:
    bindings = (
        "validation_data/DataConfig.global_batch_size = 8",
        "DataConfig.seed = 1",
        "train_data/DataConfig.seed = 2",
        "DataConfig.global_batch_size = 4",
    )
    task: Any = resolve_config(experiment, ConfigSources(gin_params=bindings)).config.task

    assert task.train_data.global_batch_size == 4
    assert task.validation_data.global_batch_size == 8
    assert task.train_data.seed == 2
    assert task.validation_data.seed == 1
    assert task.extra_data is None


def test_a_scoped_binding_brings_an_absent_section_into_being(experiment: str) -> None:
    bindings = (
        "extra_data/DataConfig.seed = 3",
        "DataConfig.global_batch_size = 4",
        "EMAConfig.start_step = 9",
    )
    config: Any = resolve_config(experiment, ConfigSources(gin_params=bindings)).config

    assert config.task.extra_data.seed == 3
    assert config.task.extra_data.global_batch_size == 4
    assert config.trainer.optimizer_config.ema.start_step == 9


def test_the_branches_of_a_choice_go_by_their_classes(experiment: str) -> None:
    bindings = (
        "OptimizerConfig.type = 'sgd'",
        "SGDConfig.momentum = 0.9",
        "AdamConfig.beta_1 = 0.8",
    )
    optimizer = resolve_config(
        experiment, ConfigSources(gin_params=bindings)
    ).config.trainer.optimizer_config.optimizer

    assert optimizer.type == "sgd"
    assert optimizer.get().momentum == 0.9

    optimizer = resolve_config(
        experiment, ConfigSources(gin_params=bindings[2:])
    ).config.trainer.optimizer_config.optimizer
    assert optimizer.type == "adam"
    assert optimizer.get().beta_1 == 0.8


def test_origins_of_gin_are_the_line_or_the_flag(experiment: str, tmp_path: Path) -> None:
    path = tmp_path / "conf.gin"
    path.write_text("\nTrainerConfig:\n  train_steps = 5\n  max_to_keep = 2\nDataConfig.seed = 1\n")
    sources = ConfigSources(gin_files=(str(path),), gin_params=("TrainerConfig.max_to_keep = 3",))
    origins = resolve_config(experiment, sources).origins

    assert origins["trainer.train_steps"] == f"{path}:3"
    assert origins["trainer.max_to_keep"] == "--gin_params"
    assert origins["task.train_data.seed"] == f"{path}:5"


def test_macros_and_includes_work_and_later_bindings_win(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "base.gin").write_text("steps = 5\nTrainerConfig.max_to_keep = 1\n")
    path = tmp_path / "conf.gin"
    path.write_text(
        "include 'base.gin'\nTrainerConfig.train_steps = %steps\nTrainerConfig.max_to_keep = 2\n"
    )

    trainer = resolve_config(
        experiment, ConfigSources(gin_files=(str(path),), gin_params=("steps = 6",))
    ).config.trainer

    assert trainer.train_steps == 6
    assert trainer.max_to_keep == 2


def test_a_registered_function_can_make_a_value(experiment: str) -> None:
    values, mistakes = read_first_pass(
        experiment, "TrainerConfig.train_steps = @triple()", "triple.number = 4"
    )

    assert values == {"trainer": {"train_steps": 12}}
    assert mistakes == []
    assert triple() == 12


def test_the_experiments_name_binds_factory_arguments(experiment: str) -> None:
    resolved = resolve_config(
        experiment, ConfigSources(gin_params=(f"{experiment}.learning_rate = 3e-4",))
    )
    learning_rate = "trainer.optimizer_config.learning_rate.constant.learning_rate"

    assert resolved.config.trainer.optimizer_config.learning_rate.get().learning_rate == 3e-4
    assert resolved.origins[learning_rate] == f"{experiment}.learning_rate of --gin_params"
    assert resolved.origins["trainer.train_steps"] == "default"


def test_a_name_with_slashes_and_other_characters(register: Callable[[str], str]) -> None:
    name = register("vision/3d/net-{}")
    last = name.rpartition("-")[2]

    for written in (f"vision/_3d/net_{last}", f"vision._3d.net_{last}", f"net_{last}"):
        config = resolve_config(name, ConfigSources(gin_params=(f"{written}.steps = 6",))).config
        assert config.trainer.train_steps == 6, written

    mistake = read_only_mistake(name, f"vison/_3d/net_{last}.steps = 6")

    assert "vison/_3d" in mistake.problem


def test_a_decorated_factory_is_bound_once(register: Callable[[str], str]) -> None:
    name = f"{register('plain_{}')}_decorated"

    @gin.configurable(name)
    def build_config(steps: int = 1) -> ExperimentConfig:
        return ExperimentConfig().replace(trainer={"train_steps": steps})

    register_experiment(name)(build_config)

    assert (
        resolve_config(
            name, ConfigSources(gin_params=(f"{name}.steps = 6",))
        ).config.trainer.train_steps
        == 6
    )
    assert resolve_config(name, ConfigSources()).config.trainer.train_steps == 1


@pytest.mark.parametrize(
    ("binding", "problem", "advice"),
    [
        ("validation_dta/DataConfig.seed = 1", "scope validation_dta", "validation_data"),
        ("x/ExperimentConfig.trainer = {}", "scope x", "without a scope"),
        ("TrainerConfig.train_steps = %steps", "a macro that is not defined", "name = ..."),
        ("TrainerConfig.train_steps = @nobody()", "@nobody", "import its module"),
        ("NetConfig.name = [@nobody, 1]", "@nobody", "import its module"),
        ("TrainerConfig.train_steps = @failing_value()", "cannot make the value", "no such thing"),
        ("{experiment}.learning_rat = 1.0", "no such argument", "learning_rate"),
        ("{experiment}.steps = 'many'", "steps='many'", "train_steps"),
    ],
)
def test_a_binding_of_ours_that_cannot_count_is_a_mistake(
    experiment: str, binding: str, problem: str, advice: str
) -> None:
    binding = binding.replace("{experiment}", experiment)
    mistake = read_only_mistake(experiment, binding)

    assert problem in mistake.problem
    assert advice in mistake.advice
    assert binding.startswith(mistake.path)
    assert mistake.origin == "--gin_params"


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("TrainerConfig.train_steps = 5\nTrainerConfig.train_steps 6\n", "2", "is not gin"),
        (
            "RuntimeConfig.distribution_strategy = mirrored\n",
            "1",
            "mirrored is not a value; write values as in Python",
        ),
        ("x = [1,\n", "2", "is not gin"),
        ("TrainerConfig:\ntrain_steps = 5\n", "2", "is not gin"),
        ("from __gin__ import dynamic_registration\n", "1", "not supported"),
        ("TrainerConfig.x = 1 2\n", "1", "is not gin"),
        ("x = %'a'", "1", "is not gin"),
        ("x = '''abc\n", "1", "is not gin"),
    ],
)
def test_broken_gin_is_reported_with_its_line(
    experiment: str, tmp_path: Path, text: str, place: str, said: str
) -> None:
    path = tmp_path / "conf.gin"
    path.write_text(text)

    _, mistakes = read_first_pass(experiment, files=(str(path),))

    assert mistakes[0].origin.split(":")[:2] == [str(path), place]
    assert said in str(mistakes[0])


def test_a_file_that_includes_itself_is_a_mistake(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "conf.gin").write_text("include 'conf.gin'\n")
    _, mistakes = read_first_pass(experiment, files=(str(tmp_path / "conf.gin"),))

    assert "includes itself" in mistakes[0].problem


def test_a_broken_binding_on_the_command_line_is_shown(experiment: str) -> None:
    mistake = read_only_mistake(experiment, "TrainerConfig.train_steps=")

    assert mistake.origin == "--gin_params"
    assert "'TrainerConfig.train_steps='" in mistake.problem


def test_a_missing_gin_file_names_the_near_ones(experiment: str, tmp_path: Path) -> None:
    (tmp_path / "digits.gin").touch()
    (tmp_path / "conf.gin").write_text("include 'digit.gin'\n")
    for name in ("digit.gin", "conf.gin"):
        _, mistakes = read_first_pass(experiment, files=(str(tmp_path / name),))
        assert "there is no such file" in mistakes[0].problem

    with pytest.raises(ConfigError, match=r"did you mean .*/digits.gin\?"):
        resolve_config(experiment, ConfigSources(gin_files=(str(tmp_path / "digit.gin"),)))


def test_the_second_pass_reports_all_unknown_names(experiment: str, tmp_path: Path) -> None:
    path = tmp_path / "conf.gin"

    path.write_text("TrainerConfg.train_steps = 5\nNetConfig.rate = 0.5\n\nmake_thing.size = 4\n")

    assert read_first_pass(experiment, "other.x = @nobody()", files=(str(path),))[1] == []

    mistakes = read_second_pass_mistakes("other.x = @nobody()", files=(str(path),))
    assert [(mistake.path, mistake.origin) for mistake in mistakes] == [
        ("TrainerConfg.train_steps", f"{path}:1"),
        ("make_thing.size", f"{path}:4"),
        ("other.x", "--gin_params"),
        ("other.x", "--gin_params"),
    ]
    assert "TrainerConfig" in mistakes[0].advice
    assert "nobody" in mistakes[3].problem


def test_a_section_of_another_experiment_is_unknown(
    experiment: str, register: Callable[[str], str]
) -> None:
    run_gin_first_pass((), ("NetConfig.rate = 0.5",), experiment)
    other = f"{experiment}_plain"

    register_experiment(other)(ExperimentConfig)

    assert read_first_pass(other, "NetConfig.rate = 0.5") == ({}, [])
    assert (
        "nothing called NetConfig" in read_second_pass_mistakes("NetConfig.rate = 0.5")[0].problem
    )


def test_code_imported_between_the_passes_gets_its_bindings(experiment: str) -> None:
    bindings = (
        "late_thing.size = 4",
        "late_thing.inner = @late_inner()",
        "size = 9",
        "TrainerConfig.train_steps = %size",
    )
    values, mistakes = read_first_pass(experiment, *bindings)

    assert values == {"trainer": {"train_steps": 9}}
    assert mistakes == []

    @gin.configurable(module="late")
    def late_inner() -> str:
        return "inner"

    @gin.configurable(module="late")
    def late_thing(size: int = 1, inner: str = "") -> tuple[int, str]:
        return size, inner

    run_gin_second_pass((), bindings)

    assert late_thing() == (4, "inner")
    assert "late_thing.size = 4" in get_operative_gin_config()

    (mistake,) = read_second_pass_mistakes(*bindings, "late_thing.sise = 5")
    assert mistake.path == "late_thing.sise"
    assert "doesn't have a parameter named 'sise'" in mistake.advice


def test_only_the_second_pass_imports_a_gin_files_modules(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_for_gin.py").write_text(
        "import gin\n@gin.configurable\ndef from_gin(x=1):\n    return x\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    bindings = ("import module_for_gin", "from_gin.x = 5")

    read_first_pass(experiment, *bindings)

    assert "module_for_gin" not in sys.modules

    run_gin_second_pass((), bindings)

    assert sys.modules["module_for_gin"].from_gin() == 5

    mistakes = read_second_pass_mistakes("import module_for_gni")
    assert "module_for_gni" in mistakes[0].problem


def test_an_ambiguous_name_has_to_be_written_whole(experiment: str) -> None:
    for module in ("one_place", "two_place"):
        gin.external_configurable(lambda size=1: size, name="ambiguous_thing", module=module)
    mistake = read_only_mistake(experiment, "ambiguous_thing.size = 4")

    assert "one_place.ambiguous_thing" in mistake.advice
    assert read_first_pass(experiment, "two_place.ambiguous_thing.size = 4") == ({}, [])


def test_a_hook_that_refuses_the_bindings_is_a_config_error(experiment: str) -> None:
    gin.external_configurable(lambda size=1: size, name="required_thing", module="late")
    bindings = ("required_thing.size = %gin.REQUIRED",)

    read_first_pass(experiment, *bindings)

    assert "REQUIRED" in read_second_pass_mistakes(*bindings)[0].problem

    read_first_pass(experiment)


def test_sections_are_not_bound_in_gin(experiment: str) -> None:
    gin.external_configurable(lambda size=1: size, name="kept_thing", module="late")
    gin.bind_parameter("kept_thing.size", 5)
    before = gin.config_str()

    for steps in (5, 6):
        assert read_first_pass(experiment, f"TrainerConfig.train_steps = {steps}")[0] == {
            "trainer": {"train_steps": steps}
        }

    assert gin.config_str() == before
    assert read_first_pass(experiment, "TrainerConfig.max_to_keep = 2")[0] == {
        "trainer": {"max_to_keep": 2}
    }


def test_a_name_that_an_earlier_run_has_bound_is_a_mistake(experiment: str) -> None:
    gin.external_configurable(lambda size=1, name="": size, name="bound_thing", module="late")

    assert read_first_pass(experiment, "bound_thing.size = 4", "in/bound_thing.name = 'a'")[1] == []
    assert read_first_pass(experiment, "bound_thing.size = 5", "in/bound_thing.name = 'a'")[1] == []

    for _ in range(2):
        _, (mistake,) = read_first_pass(experiment, "bound_thing.size = 4")
        assert mistake.path == "in/late.bound_thing.name"
        assert mistake.origin == "gin"
        assert "start each run in a new process" in mistake.advice


def test_a_locked_gin_is_no_obstacle_and_stays_locked(experiment: str) -> None:
    gin.finalize()
    try:
        assert read_first_pass(experiment, "TrainerConfig.max_to_keep = 2")[0] == {
            "trainer": {"max_to_keep": 2}
        }
        run_gin_second_pass((), ("TrainerConfig.max_to_keep = 2",))
        assert gin.config_is_locked()
    finally:
        gin.config._set_config_is_locked(False)


def test_without_gin_sources_the_second_pass_leaves_gin_alone() -> None:
    before = gin.config_str()

    run_gin_second_pass((), ())

    assert gin.config_str() == before
