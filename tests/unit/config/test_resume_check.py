"""What may change between a run and its resume."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import apply_values, collect_mistakes, nest_value
from trainer_kit.config.resume_check import (
    ABSENT,
    Change,
    check_resume,
    compare_configs,
    find_data_mistakes,
    find_unknown_paths,
    get_change_kind,
)
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.errors import ConfigError, ExitCode

EMA = "trainer.optimizer_config.ema"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.train_steps", 200),
        ("trainer.checkpoint_interval", 10),
        ("trainer.summary_interval", 3000),
        ("trainer.validation_interval", 10),
        ("trainer.validation_steps", 10),
        ("trainer.max_to_keep", 1),
        ("trainer.best_checkpoint_eval_metric", "accuracy"),
        ("trainer.optimizer_config.learning_rate.constant.learning_rate", 0.5),
        ("task.validation_data.global_batch_size", 64),
        ("task.train_data.prefetch_buffer_size", 4),
        ("task.init_checkpoint", "elsewhere"),
        ("runtime.num_gpus", 2),
        ("runtime.distribution_strategy", "off"),
        ("runtime.virtual_cpus", 2),
    ],
)
def test_a_safe_change_passes(default: ExperimentConfig, path: str, value: object) -> None:
    changes = check_resume(to_yaml(default), default.replace(**nest_value(path, value)), [])
    assert [(change.path, change.new, change.kind) for change in changes] == [(path, value, "safe")]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("trainer.optimizer_config.optimizer.adam.beta_1", 0.5),
        ("task.model.rate", 0.25),
        ("task.model.blocks", ({"width": 3},)),
        ("task.weights", (1.0,)),
        ("task.train_data.global_batch_size", 64),
        ("task.train_data.seed", 5),
        ("task.train_data.input_path", "elsewhere"),
        ("task.train_data.shuffle_buffer_size", 7),
        ("task.train_data.drop_remainder", False),
        ("task.train_data.deterministic", True),
        ("runtime.random_seed", 5),
        ("trainer.fuse_steps", 5),
        ("trainer.overfit_batches", 5),
        ("trainer.accumulate_steps", 4),
        ("runtime.mixed_precision_dtype", "bfloat16"),
        ("runtime.executor", "single_threaded"),
    ],
)
def test_a_dangerous_change_needs_its_flag(
    default: ExperimentConfig, path: str, value: object
) -> None:
    old = to_yaml(default)
    new = default.replace(**nest_value(path, value))

    for allowed in (["trainer.train_steps"], [""], [f"{path}x", path[:-1]]):
        with pytest.raises(ConfigError) as caught:
            check_resume(old, new, allowed)
        (mistake,) = caught.value.mistakes
        assert mistake.path.startswith(path)
        assert f"--allow_config_change={path}" in mistake.advice
        assert caught.value.exit_code == ExitCode.USAGE

    for allowed in (path, path.rpartition(".")[0]):
        assert [change.kind for change in check_resume(old, new, [allowed])] == ["dangerous"]


def test_steps_that_are_fused_may_be_fused_in_another_grouping(default: ExperimentConfig) -> None:
    fused = [default.replace(trainer={"fuse_steps": steps}) for steps in (5, 7, 1)]
    kinds = [
        [change.kind for change in compare_configs(fused[0].as_dict(), config)] for config in fused
    ]

    assert kinds == [[], ["safe"], ["dangerous"]]


@pytest.mark.parametrize(
    "path", ["trainer.fuse_steps", "trainer.accumulate_steps", "runtime.executor"]
)
def test_auto_of_an_earlier_release_has_to_be_given_up_by_name(
    path: str, default: ExperimentConfig
) -> None:
    section, _, field = path.partition(".")
    old = to_yaml(default).replace(
        f"{field}: {getattr(getattr(default, section), field)}", f"{field}: auto"
    )

    assert (
        "was 'auto' when this run began"
        in collect_mistakes(check_resume, old, default, [])[path].problem
    )
    assert [change.path for change in check_resume(old, default, [path])] == [path]


def test_changed_callbacks_are_shown_by_what_differs(default: ExperimentConfig) -> None:
    rates = {
        "name": "set_at_steps",
        "args": {"parameter": "learning_rate", "steps": [[100, 0.1], [2000, 0.01]]},
    }
    weights = {
        "name": "set_at_steps",
        "args": {"parameter": "loss_weight", "steps": [[100, 0.1], [2000, 0.01]]},
    }
    old = default.replace(trainer={"callbacks": ({"name": "reports"}, rates)})
    new = default.replace(
        trainer={"callbacks": ({"name": "reports"}, weights, {"name": "set_from_file", "args": {}})}
    )

    assert [str(change) for change in check_resume(to_yaml(old), new, [])] == [
        "trainer.callbacks.1.args.parameter: 'learning_rate' -> 'loss_weight'",
        "trainer.callbacks.2.args: absent -> {}",
        "trainer.callbacks.2.name: absent -> 'set_from_file'",
    ]


def test_all_dangerous_changes_are_named_at_once(default: ExperimentConfig) -> None:
    new = default.replace(
        task={"model": {"rate": 0.25}, "weights": (3.0,)}, trainer={"train_steps": 7}
    )

    assert collect_mistakes(check_resume, to_yaml(default), new, []).keys() == {
        "task.model.rate",
        "task.weights",
    }
    assert collect_mistakes(check_resume, to_yaml(default), new, ["task.model"]).keys() == {
        "task.weights"
    }


@pytest.mark.parametrize(
    ("section", "old", "new", "kind"),
    [
        ("optimizer", "adam", {"type": "sgd"}, "dangerous"),
        (
            "learning_rate",
            "constant",
            {"type": "cosine", "cosine": {"initial_learning_rate": 0.1, "decay_steps": 5}},
            "safe",
        ),
    ],
)
def test_another_choice_is_one_change(
    section: str, old: str, new: dict[str, Any], kind: str, default: ExperimentConfig
) -> None:
    path = f"trainer.optimizer_config.{section}"
    changed = apply_values(default, nest_value(path, new)).config

    assert compare_configs(default.as_dict(), changed) == [
        Change(f"{path}.type", old, new["type"], kind)
    ]


def test_a_moving_average_that_appears_is_dangerous(default: ExperimentConfig) -> None:
    new = default.replace(**nest_value(EMA, {"average_decay": 0.5}))
    changes = compare_configs(default.as_dict(), new)

    assert {change.kind for change in changes} == {"dangerous"}
    assert Change(EMA, None, ABSENT, "dangerous") in changes
    assert check_resume(to_yaml(default), new, [EMA]) == changes


@pytest.mark.parametrize(
    "path",
    [
        "task.train_data.data_is_sharded",
        "task.validation_data.data_is_sharded",
        "task.train_data.dataset",
        "task.validation_data.dataset",
        "trainer.optimizer_config.ema.more_decays",
        "trainer.optimizer_config.ema.evaluate",
        "trainer.optimizer_config.gradient_processors",
        "trainer.fuse_steps",
        "trainer.hang_timeout_seconds",
        "runtime.random_seed",
        "runtime.executor",
    ],
)
def test_data_of_an_earlier_release_is_the_same(path: str, default: ExperimentConfig) -> None:
    config = default.replace(**nest_value(EMA, {"average_decay": 0.5}))
    record = config.as_dict()
    *sections, field = path.split(".")
    values: Any = record
    for section in sections:
        values = values[section]

    del values[field]

    assert compare_configs(record, config) == []


def test_a_later_field_that_is_not_at_its_default_is_a_change(default: ExperimentConfig) -> None:
    old = default.as_dict()
    del old["runtime"]["executor"]
    new = default.replace(runtime={"executor": "single_threaded"})

    assert compare_configs(old, new) == [
        Change("runtime.executor", "default", "single_threaded", "dangerous")
    ]


@pytest.mark.parametrize(("first", "kind"), [("average", "safe"), ("weights", "dangerous")])
def test_more_evaluated_weights_are_safe_other_first_ones_not(
    first: str, kind: str, default: ExperimentConfig
) -> None:
    old = default.replace(**nest_value(EMA, {"average_decay": 0.5}))
    new = old.replace(
        **nest_value(f"{EMA}.evaluate", [first, "average" if first == "weights" else "weights"])
    )

    assert [(change.path, change.kind) for change in compare_configs(old.as_dict(), new)] == [
        (f"{EMA}.evaluate", kind)
    ]


def test_keys_that_vanished_or_appeared_count(default: ExperimentConfig) -> None:
    old = default.as_dict()
    del old["task"]["weights"]
    old["trainer"]["gone"] = 5

    assert compare_configs(old, default) == [
        Change("task.weights", ABSENT, [1.0, 2.5], "dangerous"),
        Change("trainer.gone", 5, ABSENT, "safe"),
    ]
    assert str(compare_configs(old, default)[1]) == "trainer.gone: 5 -> absent"
    assert all(change.old is ABSENT for change in compare_configs({}, default))


def test_equal_configs_and_equal_numbers_are_no_change(default: ExperimentConfig) -> None:
    old = default.as_dict()

    assert compare_configs(old, default) == []

    old["trainer"]["loss_upper_bound"] = 1000000
    assert compare_configs(old, default) == []

    old["task"]["train_data"]["cache"] = 0
    assert [change.path for change in compare_configs(old, default)] == ["task.train_data.cache"]


def test_an_allowed_path_that_matches_nothing_is_no_error(default: ExperimentConfig) -> None:
    assert check_resume(to_yaml(default), default, ["task.nothing", ""]) == []


@pytest.mark.parametrize("text", ["", "- 1", "a: ["])
def test_damaged_old_params_are_refused_by_name(default: ExperimentConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        check_resume(text, default, [])


def test_sections_that_nobody_knows_are_dangerous() -> None:
    assert get_change_kind("extra.thing") == "dangerous"
    assert get_change_kind("task.anything") == "dangerous"
    assert get_change_kind("trainer.anything") == "safe"


_DATA = {
    "task.train_data": {"array 0": "a", "array 1": "b"},
    "task.validation_data": {"array 0": "c"},
}


def test_other_data_is_a_mistake_that_names_what_differs() -> None:
    now = {
        "task.train_data": {"array 0": "a", "array 1": "other"},
        "task.validation_data": {"array 0": "c"},
    }
    (mistake,) = find_data_mistakes(_DATA, now, [], [])

    assert mistake.path == "task.train_data"
    assert mistake.problem.endswith(": array 1 was b and is other")
    assert "--allow_config_change=task.train_data.identity (" in mistake.advice


@pytest.mark.parametrize("allowed", ["task.train_data.identity", "task.train_data", "task"])
def test_other_data_is_allowed_by_its_path_or_a_section(allowed: str) -> None:
    assert not list(
        find_data_mistakes(_DATA, {"task.train_data": {"array 1": "other"}}, [], [allowed])
    )
    assert list(
        find_data_mistakes(
            _DATA, {"task.train_data": {"array 1": "other"}}, [], ["task.validation_data"]
        )
    )


def test_data_that_one_side_does_not_know_is_not_compared() -> None:
    assert not [*find_data_mistakes({}, _DATA, [], []), *find_data_mistakes(_DATA, {}, [], [])]
    assert not list(find_data_mistakes(_DATA, {"task.train_data": {"files": "1"}}, [], []))


@pytest.mark.parametrize(
    ("path", "is_judged"),
    [("train_data.seed", True), ("train_data.cache", False), ("validation_data.cache", True)],
)
def test_data_whose_config_was_judged_is_not_compared(path: str, is_judged: bool) -> None:
    change = Change(f"task.{path}", 1, 2, get_change_kind(f"task.{path}"))
    section = f"task.{path.partition('.')[0]}"

    assert (
        not list(find_data_mistakes(_DATA, {section: {"array 0": "other"}}, [change], []))
    ) == is_judged


def test_the_identity_of_data_can_be_allowed_by_name() -> None:
    allowed = [
        "task.train_data.identity",
        "task.validation_data.identity",
        "task.tain_data.identity",
    ]
    (mistake,) = find_unknown_paths(allowed, ExperimentConfig())

    assert "task.tain_data.identity" in mistake.problem
