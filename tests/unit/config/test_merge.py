"""Layers on a config: what wins, what is refused, and that one report names all of it.

What a single wrong value is told is in test_messages.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.config_builders import apply_values, collect_mistakes, nest_value
from trainer_kit.config.fields import flatten_values
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.schema.configclass import Config, configclass
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TaskConfig
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError

EMA = "trainer.optimizer_config.ema"
OPTIMIZER = "trainer.optimizer_config.optimizer"
SETS = "task.validation_data"


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


def test_without_layers_every_value_is_a_default(default: ExperimentConfig) -> None:
    resolved = apply_layers(default, [])

    assert resolved.config == default
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.origins.keys() == flatten_values(default).keys()


def test_a_later_layer_wins_and_other_fields_stay(default: ExperimentConfig) -> None:
    before = default.as_dict()
    values = {"trainer": {"train_steps": 1, "max_to_keep": 2}}
    first = ConfigLayer(values, {"trainer.train_steps": "a:1", "trainer": "a:9"})
    second = ConfigLayer({"trainer": {"train_steps": 3}}, {"trainer.train_steps": "b:1"})

    resolved = apply_layers(default, [first, second])

    assert resolved.config.trainer == default.trainer.replace(train_steps=3, max_to_keep=2)
    assert resolved.origins["trainer.train_steps"] == "b:1"
    assert resolved.origins["trainer.max_to_keep"] == "a:9"
    assert resolved.origins["trainer.steps_per_loop"] == "default"
    assert default.as_dict() == before


def test_lists_none_and_free_dicts_replace(default: ExperimentConfig) -> None:
    before = {
        "task": {
            "weights": [7, 8, 9],
            "train_data": {"seed": 3, "input_path": {"a": "x", "b": "y"}},
        }
    }
    after = {"task": {"weights": [1], "train_data": {"seed": None, "input_path": {"c": "z"}}}}

    task: Any = apply_values(default, before, after).config.task

    assert task.weights == (1.0,)
    assert task.train_data.seed is None
    assert task.train_data.input_path == {"c": "z"}


def test_a_layer_can_create_and_remove_an_optional_section(default: ExperimentConfig) -> None:
    decay = nest_value(f"{EMA}.average_decay", 0.5)
    nothing = nest_value(EMA, None)

    resolved = apply_values(default, decay)

    assert resolved.config.trainer.optimizer_config.ema.average_decay == 0.5
    assert resolved.origins[f"{EMA}.average_decay"] == "layer 0"
    assert resolved.origins[f"{EMA}.start_step"] == "default"

    gone = apply_values(default, decay, nothing)
    assert gone.config == default
    assert gone.origins[EMA] == "layer 1"

    again = apply_values(default.replace(**decay), nothing, nest_value(f"{EMA}.start_step", 5))
    assert again.config.trainer.optimizer_config.ema.average_decay == 0.99


def test_lists_and_dicts_of_sections_are_checked_item_by_item(default: ExperimentConfig) -> None:
    values = {
        "task": {
            "model": {"blocks": [{"width": 3}, {"kind": "conv"}]},
            "named_data": {"dev": {"seed": 4}},
        }
    }
    resolved = apply_values(default, values)

    task: Any = resolved.config.task

    assert resolved.origins["task.model.blocks"] == "layer 0"
    assert [(block.width, block.kind) for block in task.model.blocks] == [(3, "dense"), (8, "conv")]
    assert task.named_data["dev"].seed == 4

    blocks = [{"widht": 3}, {"width": 0}, 5]
    wrong = {"model": {"blocks": blocks}, "named_data": {"dev": {"seed": "x"}}}

    mistakes = collect_mistakes(apply_values, default, {"task": wrong})

    assert mistakes.keys() == {
        "task.model.blocks.0.widht",
        "task.model.blocks.1.width",
        "task.model.blocks.2",
        "task.named_data.dev.seed",
    }
    assert "task.model.blocks.0.width" in mistakes["task.model.blocks.0.widht"].advice


def test_a_task_is_checked_against_the_experiments_class(default: ExperimentConfig) -> None:
    values = {"task": {"weights": [1], "model": {"rate": 0.25}}}

    assert type(apply_values(default, values).config.task) is type(default.task)
    assert collect_mistakes(apply_values, ExperimentConfig(), values).keys() == {
        "task.weights",
        "task.model",
    }


@pytest.mark.parametrize("value", [5, "x", [1], True, None])
def test_a_section_has_to_be_a_mapping(default: ExperimentConfig, value: object) -> None:
    mistakes = collect_mistakes(
        apply_values, default, {"task": {"train_data": value}, "trainer": value}
    )

    assert mistakes.keys() == {"task.train_data", "trainer"}
    assert "is not a section" in mistakes["trainer"].problem


def test_keys_that_are_paths_or_no_text_are_refused(default: ExperimentConfig) -> None:
    mistakes = collect_mistakes(apply_values, default, {"trainer.max_to_keep": 3, 5: 6})

    assert "a.b=c" in mistakes["trainer.max_to_keep"].advice
    assert "task" in mistakes["5"].advice


def test_one_report_has_all_mistakes_with_their_origins(default: ExperimentConfig) -> None:
    file = ConfigLayer(
        {"trainer": {"train_step": 5, "max_to_keep": "x"}}, {"trainer.train_step": "conf.yaml:2"}
    )
    flag = ConfigLayer(
        {"runtime": {"num_gpu": 1}, "trainer": {"max_to_keep": 2}},
        {"runtime.num_gpu": "--params_override"},
    )

    mistakes = collect_mistakes(apply_layers, default, [file, flag])

    assert {path: mistake.origin for path, mistake in mistakes.items()} == {
        "trainer.train_step": "conf.yaml:2",
        "trainer.max_to_keep": "",
        "runtime.num_gpu": "--params_override",
    }


def test_the_same_key_wrong_in_two_layers_is_reported_for_both(default: ExperimentConfig) -> None:
    layers = [
        ConfigLayer({"trainer": {"max_to_keep": value}}, {"trainer": f"file:{value}"})
        for value in (0, -1)
    ]

    with pytest.raises(ConfigError) as caught:
        apply_layers(default, layers)

    assert [mistake.origin for mistake in caught.value.mistakes] == ["file:0", "file:-1"]


def test_broken_rules_are_reported_beside_wrong_fields(default: ExperimentConfig) -> None:
    optimization = {
        "optimizer": {"adam": {"clipnorm": 1.0, "clipvalue": 1.0}},
        "learning_rate": {"type": None},
    }
    trainer = {
        "optimizer_config": optimization,
        "validation_steps": 0,
        "max_to_keep": "x",
        "nope": 1,
    }

    assert collect_mistakes(apply_values, default, {"trainer": trainer}).keys() == {
        f"{OPTIMIZER}.adam.clipvalue",
        "trainer.optimizer_config.learning_rate.type",
        "trainer.validation_steps",
        "trainer.max_to_keep",
        "trainer.nope",
    }


def test_a_broken_rule_names_the_field_that_was_changed(default: ExperimentConfig) -> None:
    base = default.replace(trainer={"steps_per_loop": 5, "summary_interval": 500})
    mistake = collect_mistakes(apply_values, base, nest_value("trainer.steps_per_loop", 300))[
        "trainer.summary_interval"
    ]

    assert mistake.origin == "with trainer.steps_per_loop from layer 0"
    assert "steps_per_loop (300)" in mistake.problem


def test_an_uneven_batch_is_reported_with_both_origins(default: ExperimentConfig) -> None:
    path = "task.train_data.global_batch_size"
    batch = nest_value(path, 32)
    cpus = nest_value("runtime.virtual_cpus", 3)

    assert collect_mistakes(apply_values, default, batch, cpus)[path].origin == "layer 0"

    mistake = collect_mistakes(apply_values, default.replace(**batch), cpus)[path]
    assert mistake.origin == "with runtime.virtual_cpus from layer 0"


@pytest.mark.parametrize(
    ("values", "path"),
    [
        ({"trainer": {"steps_per_loop": "x", "summary_interval": 14}}, "trainer.steps_per_loop"),
        (
            {"runtime": {"virtual_cpus": "3"}, "task": {"train_data": {"global_batch_size": 32}}},
            "runtime.virtual_cpus",
        ),
    ],
)
def test_a_rule_about_a_refused_value_is_not_reported(
    default: ExperimentConfig, values: dict[str, Any], path: str
) -> None:
    assert collect_mistakes(apply_values, default, values).keys() == {path}


def test_a_layer_can_break_a_rule_that_a_later_one_mends(default: ExperimentConfig) -> None:
    trainer = apply_values(
        default,
        nest_value("trainer.steps_per_loop", 300),
        nest_value("trainer.summary_interval", 600),
    ).config.trainer

    assert trainer.steps_per_loop == 300
    assert trainer.summary_interval == 600


def test_a_menu_of_branches_with_a_chosen_one_is_fine(default: ExperimentConfig) -> None:
    menu = nest_value(
        OPTIMIZER, {"adam": {"beta_1": 0.8}, "sgd": {"momentum": 0.9}, "type": "adam"}
    )
    chosen = apply_values(default, menu, nest_value(f"{OPTIMIZER}.type", "sgd"))
    optimizer = chosen.config.trainer.optimizer_config.optimizer

    assert optimizer.type == "sgd"
    assert optimizer.get().momentum == 0.9
    assert optimizer.adam is None
    assert not any(".adam." in path for path in chosen.origins)


def test_a_branch_that_nobody_chose_is_reported(default: ExperimentConfig) -> None:
    values = {"optimizer": {"sgd": {"momentum": 0.9}}, "warmup": {"linear": {"warmup_steps": 10}}}
    mistakes = collect_mistakes(
        apply_values, default, nest_value("trainer.optimizer_config", values)
    )

    assert mistakes.keys() == {f"{OPTIMIZER}.sgd", "trainer.optimizer_config.warmup.linear"}
    assert "optimizer.type=sgd" in mistakes[f"{OPTIMIZER}.sgd"].advice


def test_named_validation_sets_start_as_the_single_set(default: ExperimentConfig) -> None:
    first = nest_value(SETS, {"dev": {"global_batch_size": 7}, "test": {}})
    two = apply_values(default, first, nest_value(f"{SETS}.dev.shuffle_buffer_size", 3))
    single = default.task.validation_data

    assert isinstance(single, DataConfig)

    dev = single.replace(global_batch_size=7, shuffle_buffer_size=3)
    assert two.config.task.validation_data == {"dev": dev, "test": single}
    assert two.origins[f"{SETS}.dev.global_batch_size"] == "layer 0"
    assert two.origins[f"{SETS}.dev.shuffle_buffer_size"] == "layer 1"
    assert two.origins[f"{SETS}.test.global_batch_size"] == "default"

    without = apply_values(two.config, nest_value(f"{SETS}.dev", None)).config.task.validation_data
    assert without == {"test": single}

    smaller = apply_values(
        default, nest_value(f"{SETS}.global_batch_size", 5)
    ).config.task.validation_data
    assert smaller == single.replace(global_batch_size=5)


def test_a_mistake_in_a_named_set_has_the_sets_name(default: ExperimentConfig) -> None:
    two = apply_values(default, nest_value(SETS, {"dev": {}, "test": {}})).config
    wrong = {"dev": {"global_batchsize": 5}, "tst": None, "global_batch_size": 5}
    mistakes = collect_mistakes(apply_values, two, nest_value(SETS, wrong))
    names = ("dev.global_batchsize", "tst", "global_batch_size")

    assert mistakes.keys() == {f"{SETS}.{name}" for name in names}
    assert "did you mean test?" in mistakes[f"{SETS}.tst"].advice
    assert f"{SETS}.dev.global_batch_size" in mistakes[f"{SETS}.global_batch_size"].advice


@pytest.mark.parametrize(
    ("trainer", "path"),
    [
        ({"validation_sets": {"dve": {"steps": 3}}}, "trainer.validation_sets"),
        (
            {"continuous_eval": {"validation_sets": ["dve"]}},
            "trainer.continuous_eval.validation_sets",
        ),
    ],
)
def test_settings_of_unknown_validation_sets_are_refused(
    default: ExperimentConfig, trainer: dict[str, Any], path: str
) -> None:
    sets = nest_value(SETS, {"dev": {}, "test": {}})
    mistakes = collect_mistakes(apply_values, default, {"trainer": trainer, **sets})

    assert "did you mean dev?" in mistakes[path].advice


def test_a_set_needs_a_name_that_can_be_in_a_metrics_name(default: ExperimentConfig) -> None:
    assert SETS in collect_mistakes(apply_values, default, nest_value(SETS, {"a|b": {}}))


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ("there", "there"),
        (None, None),
        ({"depth": 2}, Place(depth=2)),
        (Place(depth=3), Place(depth=3)),
    ],
)
def test_a_union_field_takes_a_section_or_a_plain_value(value: object, place: object) -> None:
    config = ExperimentConfig(task=PlacesConfig())
    assert apply_values(config, nest_value("task.place", value)).config.task == PlacesConfig(
        place=place
    )


def test_a_union_field_refuses_what_none_of_its_types_takes() -> None:
    config = ExperimentConfig(task=PlacesConfig())
    mistakes = collect_mistakes(
        apply_values, config, nest_value("task.place", 3), nest_value("task.place", {"deepth": 2})
    )

    assert "3 is not a section or text or null" in mistakes["task.place"].problem
    assert "did you mean task.place.depth" in mistakes["task.place.deepth"].advice


def test_the_class_decides_whether_mappings_merge_or_replace() -> None:
    config = ExperimentConfig(task=PlacesConfig())
    merged = apply_values(
        config, nest_value("task.sizes", {"a": 1, "b": 2}), nest_value("task.sizes", {"b": 3})
    )

    assert merged.config.task == PlacesConfig(sizes={"a": 1, "b": 3})


def test_lists_of_sections_merge_by_item_if_the_class_says_so() -> None:
    config = ExperimentConfig(task=PlacesConfig())
    layers = [{}, {"folder": "x"}], [{"depth": 5}, {}]

    merged = apply_values(config, *(nest_value("task.places", layer) for layer in layers))

    assert merged.config.task == PlacesConfig(places=(Place(depth=5), Place(folder="x", depth=2)))

    other = apply_values(config, nest_value("task.places", [{"folder": "x"}]))
    assert other.config.task == PlacesConfig(places=(Place(folder="x"),))

    mistakes = collect_mistakes(
        apply_values, config, nest_value("task.places", [{}, {"folder": 1}])
    )
    assert mistakes.keys() == {"task.places.1.folder"}
