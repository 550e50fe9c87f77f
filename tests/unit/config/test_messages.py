"""What a refused setting is told: the value that was given, what is allowed, and near names."""

from __future__ import annotations

import pytest

from tests.config_builders import collect_mistakes, override_setting


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.train_steps", "abc", "'abc' is not a whole number of at least -1"),
        ("trainer.train_steps", "'500'", "write 500 without quotes"),
        ("trainer.train_steps", "null", "null is not a whole number"),
        ("trainer.max_to_keep", "0", "of at least 1"),
        ("trainer.train_tf_function", "yes", "true or false"),
        ("trainer.loss_upper_bound", "'1e-3'", "write 1e-3 without quotes"),
        ("trainer.loss_upper_bound", ".nan", "finite"),
        ("trainer.best_checkpoint_metric_comp", "hihger", "did you mean higher?"),
        ("trainer.optimizer_config.optimizer.adam.beta_1", "1.5", "of at least 0 and below 1"),
        ("trainer.optimizer_config.optimizer.sgd.decay", "0.5", "that is 0"),
        ("trainer.optimizer_config.optimizer.type", "adma", "one of sgd, adam, adamw, lamb"),
        ("trainer.optimizer_config.optimizer.type", "adma", "did you mean adam"),
        ("runtime.distribution_strategy", "false", "false is not one of auto, off"),
        ("runtime.distribution_strategy", "mirored", "did you mean mirrored?"),
        ("runtime", "5", "5 is not a section; give its fields (distribution_strategy, "),
        ("task.train_data.input_path", "7", "7 is not text"),
        ("task.train_data.input_path", "{a: 7}", "a mapping"),
        ("task.weights", "[1, x]", "a list (each item a number)"),
        ("task.model.blocks", "{a: {}}", "a list"),
        ("task.model.name", "null", "text"),
    ],
)
def test_a_wrong_value_is_shown_with_what_is_allowed(path: str, value: str, said: str) -> None:
    mistake = collect_mistakes(override_setting, f"{path}={value}")[path]

    assert said in str(mistake)
    assert mistake.origin == "--params_override"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("trainer.train_step", "did you mean trainer.train_steps?"),
        ("trainer.zzz", "there are:"),
        ("trainer.optimizer_config.optimizer.lambda", "lamb"),
        ("train_steps", "did you mean trainer.train_steps"),
        ("task.modle", "task.model"),
        ("trainer.epochs", "did you mean trainer.train_steps='5 epochs'?"),
        ("lr", "did you mean learning_rate?"),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(path: str, said: str) -> None:
    mistake = collect_mistakes(override_setting, f"{path}=5")[path]

    assert "no such" in mistake.problem
    assert said in str(mistake)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("trainer.train_steps", "3 epocs", "is not a whole number of at least -1, or a duration"),
        ("trainer.train_steps", "3 epocs", "did you mean '3 epochs'?"),
        ("trainer.train_steps", "30 min", "or a duration such as '3 epochs'"),
        ("trainer.checkpoint_interval", "0 epochs", "give an amount above 0, and at most 100 %"),
        ("trainer.checkpoint_interval", "120 %", "give an amount above 0, and at most 100 %"),
        ("trainer.checkpoint_interval", "0.2", "such as '3 epochs', '20 %' or '30 min'"),
        ("trainer.checkpoint_interval", "30 mins", "did you mean '30 min'?"),
        ("trainer.max_time", "2", "2 is not a duration such as '30 min' or null"),
    ],
)
def test_a_wrong_duration_is_told_with_the_nearest(path: str, value: str, said: str) -> None:
    assert said in str(collect_mistakes(override_setting, f"{path}={value}")[path])


@pytest.mark.parametrize(
    ("path", "value", "place", "said"),
    [
        ("gradient_processors", "[{type: nois}]", ".0.type", "did you mean noise"),
        ("gradient_processors", "[{type: noise}]", ".0.noise.stddev", "is needed"),
        (
            "gradient_processors",
            "[{type: clip_norm, clip_norm: {bound: 0}}]",
            ".0.clip_norm.bound",
            "above 0",
        ),
        ("gradient_processors", "[{type: check, variables: ['a(']}]", ".0.variables", "regular"),
        ("gradient_processors", "[{variables: [a]}]", ".0.type", "give one of scale, clip_value"),
        (
            "learning_rate_multipliers",
            "[{variables: 'a(', multiplier: 1}]",
            ".0.variables",
            "regular",
        ),
        (
            "learning_rate_multipliers",
            "[{variables: a, multiplier: -1}]",
            ".0.multiplier",
            "at least 0",
        ),
        ("learning_rate_multipliers", "[{variables: a}]", ".0.multiplier", "is needed"),
        ("layer_decay", "{decay: 0.9, layers: ['[']}", ".layers", "is not a regular"),
        ("layer_decay", "{decay: 0.9, layers: []}", ".layers", "from input to output"),
        ("layer_decay", "{decay: 0, layers: [a]}", ".decay", "above 0"),
        ("layer_decay", "{decay: 0.5}", ".layers", "is needed"),
        (
            "learning_rate",
            "{constant: {learning_rate: -1}}",
            ".constant.learning_rate",
            "at least 0",
        ),
        ("warmup.linear.warmup_steps", "5 percnt", "", "did you mean '5 percent'?"),
        ("ema", "{evaluate: []}", ".evaluate", "is empty"),
        ("ema", "{evaluate: [fats], more_decays: {fast: 0.9}}", ".evaluate", "did you mean fast"),
        ("ema", "{evaluate: [weights, weights]}", ".evaluate", "names weights 2 times"),
        ("ema", "{more_decays: {average: 0.9}}", ".more_decays", "is a name of trainer_kit"),
        ("ema", "{more_decays: {a|b: 0.9}}", ".more_decays", "'a|b' cannot be a name"),
        ("ema", "{more_decays: {fast: 1.5}}", ".more_decays", "at least 0 and of at most 1"),
    ],
)
def test_a_wrong_section_of_optimization_is_told_with_its_place(
    path: str, value: str, place: str, said: str
) -> None:
    path = f"trainer.optimizer_config.{path}"
    assert said in str(collect_mistakes(override_setting, f"{path}={value}")[f"{path}{place}"])


@pytest.mark.parametrize(
    ("path", "value", "place", "said"),
    [
        ("trainer.accumulate_steps", "auto", "", "'auto' is not a whole number of at least 1"),
        ("runtime.executor", "auto", "", "'auto' is not one of default, single_threaded"),
        ("trainer.validation_sets", "{dev: {}}", "", "a single set"),
        ("trainer.best_checkpoints", "{a/b: {metric: accuracy}}", "", "a/b"),
        ("trainer.metrics", "[{type: f2}]", ".0.type", "'f2' is not keras or null"),
        ("trainer.metrics", "[{type: keras}]", ".0.keras.metric", "is needed"),
        ("task.train_data.dataset.type", "moons", "", "no dataset is registered"),
        ("task.init_checkpoint", "[{}]", ".0.path", "is needed"),
        ("task.init_checkpoint", "[{path: ''}]", ".0.path", "is empty"),
        (
            "task.init_checkpoint",
            "[{path: a, variables: ['(']}]",
            ".0.variables",
            "'(' is not a regular",
        ),
        (
            "task.init_checkpoint",
            r"[{path: a, rename: {b: \1}}]",
            ".0.rename",
            "no replacement for 'b'",
        ),
        ("task.init_checkpoint", "[{path: a, renames: {}}]", ".0.renames", ".0.rename?"),
        (
            "task.init_checkpoint",
            "[{path: a, other_shapes: crop}]",
            ".0.other_shapes",
            "error, skip, slice",
        ),
        ("task.init_checkpoint", "{path: a}", "", "is not text or a list"),
    ],
)
def test_a_wrong_choice_or_list_is_told_with_its_place(
    path: str, value: str, place: str, said: str
) -> None:
    assert said in str(collect_mistakes(override_setting, f"{path}={value}")[f"{path}{place}"])
