"""Layers on a config: what wins, what is refused, and that one report names all of it."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_kit.config.fields import leaves
from trainer_kit.config.merge import Resolved, apply
from trainer_kit.config.schema.base import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig
from trainer_kit.config.sources.config_files import read_params_override
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import ConfigError, Mistake


@configclass
class Place(Config):
    folder: str = "here"
    depth: int = 1


@configclass
class PlacesConfig(TaskConfig):
    """Fields that may be a section or something else, and mappings that merge."""

    merges_values = True
    place: Place | str | None = Place()
    sizes: dict[str, int] | None = None
    places: tuple[Place, ...] = (Place(), Place(depth=2))


def on(default: ExperimentConfig, *layers: dict[str, Any]) -> Resolved:
    return apply(default, [Layer(values, dict.fromkeys(values, f"layer {i}")) for i, values in enumerate(layers)])


def refused(default: ExperimentConfig, *layers: dict[str, Any]) -> dict[str, Mistake]:
    with pytest.raises(ConfigError) as caught:
        on(default, *layers)
    mistakes = {mistake.path: mistake for mistake in caught.value.mistakes}
    assert len(mistakes) == len(caught.value.mistakes), caught.value
    return mistakes


def test_without_layers_every_value_is_a_default(default: ExperimentConfig) -> None:
    resolved = apply(default, [])
    assert resolved.config == default
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.origins.keys() == leaves(default).keys()


def test_a_later_layer_wins_and_other_fields_stay(default: ExperimentConfig) -> None:
    first = {"trainer": {"train_steps": 1, "max_to_keep": 2}}
    second = {"trainer": {"train_steps": 3}}
    assert on(default, first, second).config.trainer == default.trainer.replace(train_steps=3, max_to_keep=2)
    assert on(default, second, first).config.trainer == default.trainer.replace(train_steps=1, max_to_keep=2)


def test_every_leaf_has_the_origin_of_the_layer_that_set_it_last(default: ExperimentConfig) -> None:
    layers = [
        Layer({"trainer": {"train_steps": 1, "max_to_keep": 2}}, {"trainer.train_steps": "a:1", "trainer": "a:9"}),
        Layer({"trainer": {"train_steps": 3}}, {"trainer.train_steps": "b:1"}),
    ]
    origins = apply(default, layers).origins
    assert origins["trainer.train_steps"] == "b:1"
    assert origins["trainer.max_to_keep"] == "a:9"
    assert origins["trainer.steps_per_loop"] == "default"


def test_lists_none_and_free_dicts_replace(default: ExperimentConfig) -> None:
    before = {"task": {"weights": [7, 8, 9], "train_data": {"seed": 3, "input_path": {"a": "x", "b": "y"}}}}
    after = {"task": {"weights": [1], "train_data": {"seed": None, "input_path": {"c": "z"}}}}
    task: Any = on(default, before, after).config.task
    assert task.weights == (1.0,)
    assert task.train_data.seed is None
    assert task.train_data.input_path == {"c": "z"}


def test_a_layer_can_create_and_remove_an_optional_section(default: ExperimentConfig) -> None:
    made = on(default, {"trainer": {"optimizer_config": {"ema": {"average_decay": 0.5}}}})
    assert made.config.trainer.optimizer_config.ema is not None
    assert made.config.trainer.optimizer_config.ema.average_decay == 0.5
    assert made.origins["trainer.optimizer_config.ema.average_decay"] == "layer 0"
    assert made.origins["trainer.optimizer_config.ema.start_step"] == "default"
    gone = on(
        default,
        {"trainer": {"optimizer_config": {"ema": {"average_decay": 0.5}}}},
        {"trainer": {"optimizer_config": {"ema": None}}},
    )
    assert gone.config == default
    assert gone.origins["trainer.optimizer_config.ema"] == "layer 1"
    again = on(
        default.replace(trainer={"optimizer_config": {"ema": {"average_decay": 0.25}}}),
        {"trainer": {"optimizer_config": {"ema": None}}},
        {"trainer": {"optimizer_config": {"ema": {"start_step": 5}}}},
    )
    assert again.config.trainer.optimizer_config.ema.average_decay == 0.99


def test_lists_and_dicts_of_sections_are_checked_item_by_item(default: ExperimentConfig) -> None:
    values = {"task": {"model": {"blocks": [{"width": 3}, {"kind": "conv"}]}, "named_data": {"dev": {"seed": 4}}}}
    task: Any = on(default, values).config.task
    assert [(block.width, block.kind) for block in task.model.blocks] == [(3, "dense"), (8, "conv")]
    assert task.named_data["dev"].seed == 4
    mistakes = refused(
        default,
        {"task": {"model": {"blocks": [{"widht": 3}, {"width": 0}, 5]}, "named_data": {"dev": {"seed": "x"}}}},
    )
    assert mistakes.keys() == {
        "task.model.blocks.0.widht",
        "task.model.blocks.1.width",
        "task.model.blocks.2",
        "task.named_data.dev.seed",
    }
    assert "task.model.blocks.0.width" in mistakes["task.model.blocks.0.widht"].advice


def test_a_list_field_refuses_a_mapping(default: ExperimentConfig) -> None:
    assert "a list" in refused(default, {"task": {"model": {"blocks": {"a": {}}}}})["task.model.blocks"].problem


def test_a_task_is_checked_against_the_experiments_class(default: ExperimentConfig) -> None:
    assert type(on(default, {"task": {"model": {"rate": 0.25}}}).config.task) is type(default.task)
    plain = ExperimentConfig()
    assert "no such key" in refused(plain, {"task": {"weights": [1]}})["task.weights"].problem
    assert "no such section" in refused(plain, {"task": {"model": {"rate": 0.25}}})["task.model"].problem


@pytest.mark.parametrize("value", [5, "x", [1], True])
def test_a_section_has_to_be_a_mapping(default: ExperimentConfig, value: object) -> None:
    mistakes = refused(default, {"task": {"train_data": value}, "trainer": value})
    assert mistakes.keys() == {"task.train_data", "trainer"}
    assert "is not a section" in mistakes["trainer"].problem
    assert "steps_per_loop" in mistakes["trainer"].advice or "optimizer_config" in mistakes["trainer"].advice


def test_a_section_that_is_needed_cannot_be_none(default: ExperimentConfig) -> None:
    assert "null is not a section" in refused(default, {"trainer": None})["trainer"].problem


def test_unknown_keys_name_the_nearest_or_those_that_exist(default: ExperimentConfig) -> None:
    mistakes = refused(
        default,
        {
            "trainer": {"train_step": 5, "zzz": 1, "optimizer_config": {"optimizer": {"lambda": {}}}},
            "train_steps": 5,
            "trainer.max_to_keep": 3,
            5: 6,
        },
    )
    assert "trainer.train_steps" in mistakes["trainer.train_step"].advice
    assert "there are:" in mistakes["trainer.zzz"].advice
    assert "lamb" in mistakes["trainer.optimizer_config.optimizer.lambda"].advice
    assert "trainer.train_steps" in mistakes["train_steps"].advice
    assert "a.b=c" in mistakes["trainer.max_to_keep"].advice
    assert "task" in mistakes["5"].advice


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.train_steps", "abc", "a whole number of at least -1"),
        ("trainer.train_steps", "500", "write 500 without quotes"),
        ("trainer.train_steps", 500.0, "a whole number"),
        ("trainer.train_steps", 0.5, "a whole number"),
        ("trainer.train_steps", True, "a whole number"),
        ("trainer.train_steps", None, "null is not a whole number"),
        ("trainer.train_steps", -2, "of at least -1"),
        ("trainer.max_to_keep", 0, "of at least 1"),
        ("trainer.train_tf_function", "yes", "true or false"),
        ("trainer.train_tf_function", 1, "true or false"),
        ("trainer.loss_upper_bound", "1e-3", "write 1e-3 without quotes"),
        ("trainer.loss_upper_bound", float("nan"), "finite"),
        ("trainer.loss_upper_bound", float("inf"), "finite"),
        ("trainer.best_checkpoint_metric_comp", "hihger", "did you mean higher?"),
        ("trainer.validation_summary_subdir", 5, "5 is not text"),
        ("trainer.optimizer_config.optimizer.adam.beta_1", 1.5, "of at least 0 and below 1"),
        ("trainer.optimizer_config.optimizer.sgd.decay", 0.5, "that is 0"),
        ("trainer.optimizer_config.optimizer.type", "adm", "sgd, adam, adamw, lamb, rmsprop, adagrad, adafactor"),
        ("trainer.continuous_eval_timeout", -1, "a number of at least 0 or null"),
        ("runtime.distribution_strategy", False, "false is not one of auto, off"),
        ("runtime.distribution_strategy", "mirored", "did you mean mirrored?"),
        ("runtime.loss_scale", "dynamical", "did you mean dynamic?"),
        ("task.train_data.input_path", 7, "7 is not text"),
        ("task.train_data.input_path", {"a": 7}, "a mapping"),
        ("task.weights", [1, "x"], "a list (each item a number)"),
        ("task.model.name", None, "text"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(
    default: ExperimentConfig, path: str, value: object, said: str
) -> None:
    values: Any = value
    for part in reversed(path.split(".")):
        values = {part: values}
    mistake = refused(default, values)[path]
    assert said in str(mistake)
    assert mistake.origin == "layer 0"


def test_one_report_has_all_mistakes_with_their_origins(default: ExperimentConfig) -> None:
    file = Layer({"trainer": {"train_step": 5, "max_to_keep": "x"}}, {"trainer.train_step": "conf.yaml:2"})
    flag = Layer({"runtime": {"num_gpu": 1}, "trainer": {"max_to_keep": 2}}, {"runtime.num_gpu": "--params_override"})
    with pytest.raises(ConfigError) as caught:
        apply(default, [file, flag])
    found = {(mistake.path, mistake.origin) for mistake in caught.value.mistakes}
    assert found == {
        ("trainer.train_step", "conf.yaml:2"),
        ("trainer.max_to_keep", ""),
        ("runtime.num_gpu", "--params_override"),
    }


def test_the_same_key_wrong_in_two_layers_is_reported_for_both(default: ExperimentConfig) -> None:
    layers = [Layer({"trainer": {"max_to_keep": value}}, {"trainer": f"file:{value}"}) for value in (0, -1)]
    with pytest.raises(ConfigError) as caught:
        apply(default, layers)
    assert [mistake.origin for mistake in caught.value.mistakes] == ["file:0", "file:-1"]


def test_a_broken_rule_is_reported_with_wrong_fields(default: ExperimentConfig) -> None:
    mistakes = refused(default, {"trainer": {"validation_steps": 0, "max_to_keep": "x", "nope": 1}})
    assert mistakes.keys() == {"trainer.validation_steps", "trainer.max_to_keep", "trainer.nope"}
    assert "-1 for all" in mistakes["trainer.validation_steps"].advice


def test_broken_rules_of_outer_and_inner_sections_are_reported(default: ExperimentConfig) -> None:
    optimization = {"optimizer": {"adam": {"clipnorm": 1.0, "clipvalue": 1.0}}, "learning_rate": {"type": None}}
    mistakes = refused(default, {"trainer": {"optimizer_config": optimization, "validation_steps": 0}})
    assert mistakes.keys() == {
        "trainer.optimizer_config.optimizer.adam.clipvalue",
        "trainer.optimizer_config.learning_rate.type",
        "trainer.validation_steps",
    }


def test_a_broken_rule_names_the_field_that_was_changed(default: ExperimentConfig) -> None:
    base = default.replace(trainer={"steps_per_loop": 5, "summary_interval": 500})
    mistake = refused(base, {"trainer": {"steps_per_loop": 300}})["trainer.summary_interval"]
    assert mistake.origin == "default, with trainer.steps_per_loop from layer 0"
    assert "steps_per_loop (300)" in mistake.problem


def test_an_uneven_batch_is_reported_with_both_origins(default: ExperimentConfig) -> None:
    batch = {"task": {"train_data": {"global_batch_size": 32}}}
    mistake = refused(default, batch, {"runtime": {"virtual_cpus": 3}})["task.train_data.global_batch_size"]
    assert mistake.origin == "layer 0"
    mistake = refused(default.replace(**batch), {"runtime": {"virtual_cpus": 3}})[mistake.path]
    assert mistake.origin == "default, with runtime.virtual_cpus from layer 0"
    assert refused(default, batch, {"runtime": {"virtual_cpus": "3"}}).keys() == {"runtime.virtual_cpus"}


def test_a_rule_about_a_refused_value_is_not_reported(default: ExperimentConfig) -> None:
    assert refused(default, {"trainer": {"steps_per_loop": "x", "summary_interval": 14}}).keys() == {
        "trainer.steps_per_loop"
    }


def test_a_layer_can_break_a_rule_that_a_later_one_mends(default: ExperimentConfig) -> None:
    config = on(default, {"trainer": {"steps_per_loop": 300}}, {"trainer": {"summary_interval": 600}}).config
    assert (config.trainer.steps_per_loop, config.trainer.summary_interval) == (300, 600)


def test_another_branch_has_its_own_defaults_and_values(default: ExperimentConfig) -> None:
    values = {"trainer": {"optimizer_config": {"optimizer": {"type": "sgd", "sgd": {"momentum": 0.9}}}}}
    optimizer = on(default, values).config.trainer.optimizer_config.optimizer
    assert (optimizer.type, optimizer.get().momentum, optimizer.adam) == ("sgd", 0.9, None)


def test_a_menu_of_branches_with_a_chosen_one_is_fine(default: ExperimentConfig) -> None:
    menu = {"adam": {"beta_1": 0.8}, "sgd": {"momentum": 0.9}, "type": "adam"}
    chosen = on(
        default,
        {"trainer": {"optimizer_config": {"optimizer": menu}}},
        {"trainer": {"optimizer_config": {"optimizer": {"type": "sgd"}}}},
    )
    assert chosen.config.trainer.optimizer_config.optimizer.get().momentum == 0.9
    assert not any(".adam." in path for path in chosen.origins)


def test_a_branch_that_nobody_chose_is_reported(default: ExperimentConfig) -> None:
    values = {"optimizer": {"sgd": {"momentum": 0.9}}, "warmup": {"linear": {"warmup_steps": 10}}}
    mistakes = refused(default, {"trainer": {"optimizer_config": values}})
    assert mistakes.keys() == {"trainer.optimizer_config.optimizer.sgd", "trainer.optimizer_config.warmup.linear"}
    sgd = mistakes["trainer.optimizer_config.optimizer.sgd"]
    assert "no effect" in sgd.problem and "optimizer.type=sgd" in sgd.advice


def test_the_given_config_is_left_as_it_was(default: ExperimentConfig) -> None:
    before = default.as_dict()
    on(default, {"trainer": {"train_steps": 7}, "task": {"model": {"blocks": []}}})
    assert default.as_dict() == before


def _sets(**sets: Any) -> dict[str, Any]:
    return {"task": {"validation_data": sets}}


def test_named_validation_sets_start_as_the_single_set(default: ExperimentConfig) -> None:
    two = on(default, _sets(dev={"global_batch_size": 7}, test={}), _sets(dev={"shuffle_buffer_size": 3}))
    single, sets = default.task.validation_data, two.config.task.validation_data
    assert isinstance(single, DataConfig)
    assert sets == {"dev": single.replace(global_batch_size=7, shuffle_buffer_size=3), "test": single}
    assert two.origins["task.validation_data.dev.global_batch_size"] == "layer 0"
    assert two.origins["task.validation_data.dev.shuffle_buffer_size"] == "layer 1"
    assert two.origins["task.validation_data.test.global_batch_size"] == "default"
    assert on(two.config, _sets(dev=None)).config.task.validation_data == {"test": single}
    assert on(default, _sets(global_batch_size=5)).config.task.validation_data == single.replace(global_batch_size=5)


def test_a_mistake_in_a_named_set_has_the_sets_name(default: ExperimentConfig) -> None:
    two = on(default, _sets(dev={}, test={})).config
    told = refused(two, _sets(dev={"global_batchsize": 5}, tst=None, global_batch_size=5))
    assert told.keys() == {
        f"task.validation_data.{name}" for name in ("dev.global_batchsize", "tst", "global_batch_size")
    }
    assert "did you mean test?" in told["task.validation_data.tst"].advice
    assert "task.validation_data.dev.global_batch_size" in told["task.validation_data.global_batch_size"].advice


def test_settings_of_unknown_validation_sets_are_refused(default: ExperimentConfig) -> None:
    told = refused(default, {**_sets(dev={}), "trainer": {"validation_sets": {"dve": {"steps": 3}}}})
    assert "did you mean dev?" in str(told["trainer.validation_sets"])
    assert "a single set" in str(refused(default, {"trainer": {"validation_sets": {"dev": {}}}}))
    named = {"trainer": {"continuous_eval": {"validation_sets": ["dev", "tset"]}}}
    assert "did you mean test?" in str(refused(default, _sets(dev={}, test={}), named))
    assert "cannot name" in str(refused(default, {"task": {"validation_data": {"a|b": {}}}}))


def test_a_union_field_takes_a_section_or_a_plain_value() -> None:
    config = ExperimentConfig(task=PlacesConfig())
    assert on(config, {"task": {"place": "there"}}).config.task == PlacesConfig(place="there")
    assert on(config, {"task": {"place": None}}).config.task == PlacesConfig(place=None)
    assert on(config, {"task": {"place": {"depth": 2}}}).config.task == PlacesConfig(place=Place(depth=2))
    later = on(config, {"task": {"place": "there"}}, {"task": {"place": {"folder": "x", "depth": 3}}})
    assert later.config.task == PlacesConfig(place=Place(folder="x", depth=3))
    found = refused(config, {"task": {"place": 3}}, {"task": {"place": {"deepth": 2}}})
    assert "3 is not a section or text or null" in str(found["task.place"])
    assert "did you mean task.place.depth" in str(found["task.place.deepth"])


def test_the_class_decides_whether_mappings_merge_or_replace() -> None:
    layers = {"sizes": {"a": 1, "b": 2}}, {"sizes": {"b": 3}}
    merged = on(ExperimentConfig(task=PlacesConfig()), *({"task": layer} for layer in layers))
    assert merged.config.task == PlacesConfig(sizes={"a": 1, "b": 3})
    paths = [{"task": {"train_data": {"input_path": path}}} for path in ({"a": "1", "b": "2"}, {"b": "3"})]
    assert on(ExperimentConfig(), *paths).config.task.train_data == DataConfig(input_path={"b": "3"})


def test_lists_of_sections_merge_by_item_if_the_class_says_so() -> None:
    config = ExperimentConfig(task=PlacesConfig())
    merged = on(config, {"task": {"places": [{}, {"folder": "x"}]}}, {"task": {"places": [{"depth": 5}, {}]}})
    assert merged.config.task == PlacesConfig(places=(Place(depth=5), Place(folder="x", depth=2)))
    other = on(config, {"task": {"places": [{"folder": "x"}]}})
    assert other.config.task == PlacesConfig(places=(Place(folder="x"),))
    found = refused(config, {"task": {"places": [{}, {"folder": 1}]}})
    assert set(found) == {"task.places.1.folder"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.gradient_spike_alarm=null", "there is no such key; it was removed; report_gradient_norm"),
        ("trainer.accumulate_steps=auto", "is not a whole number of at least 1; auto was removed; give a number"),
        ("runtime.executor=auto", "auto was removed; the default is default"),
    ],
)
def test_what_an_earlier_release_had_is_said_to_be_removed(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        apply(ExperimentConfig(), [read_params_override(setting)])
    assert message in str(caught.value)
