"""What may change between a run and its resume."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.merge import apply
from trainer_kit.config.resume_check import ABSENT, Change, check_resume, compare, data_mistakes, kind_of, unknown_paths
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.serialize import to_yaml
from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import ConfigError, ExitCode


def changed(default: ExperimentConfig, path: str, value: Any) -> ExperimentConfig:
    values: Any = value
    for part in reversed(path.split(".")):
        values = {part: values}
    return default.replace(**values)


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
    new = changed(default, path, value)
    changes = check_resume(to_yaml(default), new, [])
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
def test_a_dangerous_change_needs_its_flag(default: ExperimentConfig, path: str, value: object) -> None:
    new = changed(default, path, value)
    old = to_yaml(default)
    with pytest.raises(ConfigError) as caught:
        check_resume(old, new, ["trainer.train_steps"])
    (mistake,) = caught.value.mistakes
    assert mistake.path.startswith(path)
    assert f"--allow_config_change={path}" in mistake.advice
    assert caught.value.exit_code == ExitCode.USAGE
    for allowed in (path, path.rpartition(".")[0]):
        assert [change.kind for change in check_resume(old, new, [allowed])] == ["dangerous"]


def test_steps_that_are_fused_may_be_fused_in_another_grouping(default: ExperimentConfig) -> None:
    fused = [changed(default, "trainer.fuse_steps", steps) for steps in (5, 7, 1)]
    kinds = [[change.kind for change in compare(fused[0].as_dict(), other)] for other in fused]
    assert kinds == [[], ["safe"], ["dangerous"]]


def test_fuse_steps_auto_means_the_number_chosen_earlier(default: ExperimentConfig) -> None:
    old = to_yaml(default).replace("fuse_steps: 1", "fuse_steps: auto")
    assert "auto" in old
    five, one = changed(default, "trainer.fuse_steps", 5), changed(default, "trainer.fuse_steps", 1)
    assert check_resume(old, five, [], {"trainer.fuse_steps": 5}) == []
    assert check_resume(old, one, [], {"trainer.fuse_steps": 1}) == []
    assert check_resume(old, five, []) == check_resume(old, one, []) == []  # it had not chosen yet
    with pytest.raises(ConfigError, match=r"trainer\.fuse_steps: was 5 when this run began and is 1 now"):
        check_resume(old, one, [], {"trainer.fuse_steps": 5})


def test_a_run_that_began_before_there_was_a_choice_of_executors(default: ExperimentConfig) -> None:
    old = "".join(line for line in to_yaml(default).splitlines(keepends=True) if "executor:" not in line)
    assert old != to_yaml(default)
    assert check_resume(old, default, []) == []
    with pytest.raises(ConfigError, match=r"runtime\.executor: was 'default' when this run began"):
        check_resume(old, changed(default, "runtime.executor", "single_threaded"), [])


def test_executor_auto_means_the_executor_chosen_earlier(default: ExperimentConfig) -> None:
    old = to_yaml(default).replace("executor: default", "executor: auto")
    single = changed(default, "runtime.executor", "single_threaded")
    assert "auto" in old
    assert check_resume(old, default, [], {"runtime.executor": "default"}) == []
    assert check_resume(old, single, [], {"runtime.executor": "single_threaded"}) == []
    assert check_resume(old, default, []) == check_resume(old, single, []) == []  # it had not chosen yet
    with pytest.raises(ConfigError, match=r"executor: was 'single_threaded' when this run began and is 'default' now"):
        check_resume(old, default, [], {"runtime.executor": "single_threaded"})


def test_accumulate_steps_auto_means_the_number_chosen_earlier(default: ExperimentConfig) -> None:
    old = to_yaml(default).replace("accumulate_steps: 1", "accumulate_steps: auto")
    assert "auto" in old
    four, two = (changed(default, "trainer.accumulate_steps", steps) for steps in (4, 2))
    assert check_resume(old, four, [], {"trainer.accumulate_steps": 4}) == []
    assert check_resume(old, two, []) == []  # it had not chosen yet
    with pytest.raises(ConfigError, match=r"trainer\.accumulate_steps: was 4 when this run began and is 2 now"):
        check_resume(old, two, [], {"trainer.accumulate_steps": 4})


def test_a_run_that_began_before_datasets_had_names_goes_on(default: ExperimentConfig) -> None:
    record = default.as_dict()
    for section in ("train_data", "validation_data"):
        del record["task"][section]["dataset"]
    assert compare(record, default) == []
    assert check_resume(yaml_loader.dump(record), default, []) == []


def test_the_message_shows_both_values(default: ExperimentConfig) -> None:
    with pytest.raises(ConfigError, match=r"was 0\.5 when this run began and is 0\.25 now"):
        check_resume(to_yaml(default), changed(default, "task.model.rate", 0.25), [])


def test_changed_callbacks_are_shown_by_what_differs(default: ExperimentConfig) -> None:
    rates = {"name": "set_at_steps", "args": {"parameter": "learning_rate", "steps": [[100, 0.1], [2000, 0.01]]}}
    weights = {"name": "set_at_steps", "args": {"parameter": "loss_weight", "steps": [[100, 0.1], [2000, 0.01]]}}
    old = default.replace(trainer={"callbacks": ({"name": "reports"}, rates)})
    new = default.replace(trainer={"callbacks": ({"name": "reports"}, weights, {"name": "set_from_file", "args": {}})})
    assert [str(change) for change in check_resume(to_yaml(old), new, [])] == [
        "trainer.callbacks.1.args.parameter: 'learning_rate' -> 'loss_weight'",
        "trainer.callbacks.2.args: absent -> {}",
        "trainer.callbacks.2.name: absent -> 'set_from_file'",
    ]


def test_all_dangerous_changes_are_named_at_once(default: ExperimentConfig) -> None:
    new = default.replace(task={"model": {"rate": 0.25}, "weights": (3.0,)}, trainer={"train_steps": 7})
    with pytest.raises(ConfigError) as caught:
        check_resume(to_yaml(default), new, ["task.model"])
    assert [mistake.path for mistake in caught.value.mistakes] == ["task.weights"]


def test_another_optimizer_is_one_change(default: ExperimentConfig) -> None:
    new = default.replace(trainer={"optimizer_config": {"optimizer": {"type": "sgd"}}})
    path = "trainer.optimizer_config.optimizer.type"
    assert compare(default.as_dict(), new) == [Change(path, "adam", "sgd", "dangerous")]


def test_another_schedule_is_safe(default: ExperimentConfig) -> None:
    cosine = {"type": "cosine", "cosine": {"initial_learning_rate": 0.1, "decay_steps": 5}}
    new = apply(default, [Layer({"trainer": {"optimizer_config": {"learning_rate": cosine}}})]).config
    path = "trainer.optimizer_config.learning_rate.type"
    assert compare(default.as_dict(), new) == [Change(path, "constant", "cosine", "safe")]


def test_a_moving_average_that_appears_is_dangerous(default: ExperimentConfig) -> None:
    new = changed(default, "trainer.optimizer_config.ema", {"average_decay": 0.5})
    changes = compare(default.as_dict(), new)
    assert {change.kind for change in changes} == {"dangerous"}
    assert Change("trainer.optimizer_config.ema", None, ABSENT, "dangerous") in changes
    assert check_resume(to_yaml(default), new, ["trainer.optimizer_config.ema"]) == changes


def test_data_of_an_earlier_release_is_the_same(default: ExperimentConfig) -> None:
    old = default.as_dict()
    for section in ("train_data", "validation_data"):
        del old["task"][section]["data_is_sharded"]
    assert compare(old, default) == []


def test_an_average_of_an_earlier_release_is_the_same(default: ExperimentConfig) -> None:
    new = changed(default, "trainer.optimizer_config.ema", {"average_decay": 0.5})
    old = new.as_dict()
    for name in ("more_decays", "evaluate"):
        del old["trainer"]["optimizer_config"]["ema"][name]
    assert compare(old, new) == []


@pytest.mark.parametrize(("first", "kind"), [("average", "safe"), ("weights", "dangerous")])
def test_more_evaluated_weights_are_safe_other_first_ones_not(first: str, kind: str, default: ExperimentConfig) -> None:
    old = changed(default, "trainer.optimizer_config.ema", {"average_decay": 0.5})
    path = "trainer.optimizer_config.ema.evaluate"
    new = changed(old, path, [first, "average" if first == "weights" else "weights"])
    assert [(change.path, change.kind) for change in compare(old.as_dict(), new)] == [(path, kind)]


def test_keys_that_vanished_or_appeared_count(default: ExperimentConfig) -> None:
    old = default.as_dict()
    del old["task"]["weights"]
    old["trainer"]["gone"] = 5
    assert compare(old, default) == [
        Change("task.weights", ABSENT, [1.0, 2.5], "dangerous"),
        Change("trainer.gone", 5, ABSENT, "safe"),
    ]
    assert str(compare(old, default)[1]) == "trainer.gone: 5 -> absent"


def test_equal_configs_and_equal_numbers_are_no_change(default: ExperimentConfig) -> None:
    old = default.as_dict()
    assert compare(old, default) == []
    old["trainer"]["loss_upper_bound"] = 1000000
    assert compare(old, default) == []
    old["task"]["train_data"]["cache"] = 0
    assert [change.path for change in compare(old, default)] == ["task.train_data.cache"]


def test_an_allowed_path_that_matches_nothing_is_no_error(default: ExperimentConfig) -> None:
    assert check_resume(to_yaml(default), default, ["task.nothing", ""]) == []


def test_an_empty_allowed_path_allows_nothing(default: ExperimentConfig) -> None:
    with pytest.raises(ConfigError):
        check_resume(to_yaml(default), changed(default, "task.model.rate", 0.25), [""])


def test_a_path_allows_its_section_and_no_namesake(default: ExperimentConfig) -> None:
    with pytest.raises(ConfigError):
        check_resume(to_yaml(default), changed(default, "task.model.rate", 0.25), ["task.mod", "task.model.rat"])


@pytest.mark.parametrize("text", ["", "- 1", "a: ["])
def test_damaged_old_params_are_refused_by_name(default: ExperimentConfig, text: str) -> None:
    with pytest.raises(ConfigError, match=r"params\.yaml"):
        check_resume(text, default, [])


def test_sections_that_nobody_knows_are_dangerous() -> None:
    assert kind_of("extra.thing") == "dangerous"
    assert kind_of("task.anything") == "dangerous"
    assert kind_of("trainer.anything") == "safe"


def test_a_field_missing_in_an_old_record_counts_as_its_default(default: ExperimentConfig) -> None:
    old = default.as_dict()
    del old["trainer"]["fuse_steps"], old["trainer"]["hang_timeout_seconds"], old["runtime"]["random_seed"]
    assert compare(old, default) == []
    new = default.replace(runtime={"random_seed": 7})
    assert compare(old, new) == [Change("runtime.random_seed", 1, 7, "dangerous")]


def test_a_key_of_the_task_that_an_old_record_lacks_is_a_change(default: ExperimentConfig) -> None:
    old = default.as_dict()
    del old["task"]["name"]
    (change,) = compare(old, default)
    assert (change.path, change.old) == ("task.name", ABSENT)


def test_an_empty_record_lacks_everything(default: ExperimentConfig) -> None:
    assert all(change.old is ABSENT for change in compare({}, default))


_DATA = {"task.train_data": {"array 0": "a", "array 1": "b"}, "task.validation_data": {"array 0": "c"}}


def test_other_data_is_a_mistake_that_names_what_differs() -> None:
    now = {"task.train_data": {"array 0": "a", "array 1": "other"}, "task.validation_data": {"array 0": "c"}}
    (mistake,) = data_mistakes(_DATA, now, [], [])
    assert mistake.path == "task.train_data"
    assert mistake.problem.endswith(": array 1 was b and is other")
    assert "--allow_config_change=task.train_data.identity (" in mistake.advice


@pytest.mark.parametrize("allowed", ["task.train_data.identity", "task.train_data", "task"])
def test_other_data_is_allowed_by_its_path_or_a_section(allowed: str) -> None:
    assert not list(data_mistakes(_DATA, {"task.train_data": {"array 1": "other"}}, [], [allowed]))
    assert list(data_mistakes(_DATA, {"task.train_data": {"array 1": "other"}}, [], ["task.validation_data"]))


def test_data_that_one_side_does_not_know_is_not_compared() -> None:
    assert not [*data_mistakes({}, _DATA, [], []), *data_mistakes(_DATA, {}, [], [])]
    assert not list(data_mistakes(_DATA, {"task.train_data": {"files": "1"}}, [], []))


@pytest.mark.parametrize(
    ("path", "is_judged"),
    [("train_data.seed", True), ("train_data.cache", False), ("validation_data.cache", True)],
)
def test_data_whose_config_was_judged_is_not_compared(path: str, is_judged: bool) -> None:
    change = Change(f"task.{path}", 1, 2, kind_of(f"task.{path}"))
    section = f"task.{path.partition('.')[0]}"
    assert (not list(data_mistakes(_DATA, {section: {"array 0": "other"}}, [change], []))) == is_judged


def test_the_identity_of_data_can_be_allowed_by_name() -> None:
    allowed = ["task.train_data.identity", "task.validation_data.identity", "task.tain_data.identity"]
    (mistake,) = unknown_paths(allowed, ExperimentConfig())
    assert "task.tain_data.identity" in mistake.problem
