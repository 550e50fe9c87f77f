"""Model Garden's config fields exist here with their names and defaults, with listed exceptions."""

from __future__ import annotations

import ast
import importlib.util
import operator
from pathlib import Path
from typing import Any

import pytest

from tests.config_builders import collect_mistakes, wrong_fields
from trainer_kit.config.fields import find_section_class, get_fields
from trainer_kit.config.schema import evaluation, optimization, schedules
from trainer_kit.config.schema import experiment as schema
from trainer_kit.config.schema import optimizer_configs as optimizers
from trainer_kit.config.schema.configclass import Config, OneOfConfig
from trainer_kit.config.schema.open_choice import OpenOneOfConfig
from trainer_kit.errors import ConfigError

# Where a field differs from Model Garden's, and why.
MODEL_GARDEN_EXCEPTIONS: dict[str, str] = {
    "RuntimeConfig.distribution_strategy": (
        "'auto': mirroring over a single device costs up to 3 times"
    ),
    "TrainerConfig.best_checkpoint_export_subdir": (
        "'best_ckpt': naming the metric is enough to keep the best"
    ),
    "TaskConfig.validation_data": "drop_remainder is False: validation keeps its last batch",
    "OptimizerConfig": (
        "types we do not build (slide, *_experimental, adafactor_keras) are refused by name"
    ),
    "TaskConfig.differential_privacy_config": "deprecated there; refused here rather than ignored",
}

REFUSED_OPTIMIZERS = {
    "sgd_experimental",
    "adam_experimental",
    "adamw_experimental",
    "slide",
    "adafactor_keras",
}
REFUSED_CLASSES = {
    "SGDExperimentalConfig",
    "AdamExperimentalConfig",
    "AdamWeightDecayExperimentalConfig",
    "SLIDEConfig",
    "AdafactorKerasConfig",
}


class FactoryDefault:
    """A default such as `dataclasses.field(default_factory=DataConfig)`."""

    def __init__(self, factory: str) -> None:
        self.factory = factory.rpartition(".")[2]


def read_model_garden() -> dict[str, dict[str, Any]]:
    """Class name -> field name -> default, read from Model Garden's sources without an import."""
    (root,) = importlib.util.find_spec("official").submodule_search_locations  # type: ignore[union-attr, misc]
    configs = Path(root) / "modeling" / "optimization" / "configs"
    classes: dict[str, dict[str, Any]] = {}
    for path in (
        *(configs / f"{name}_config.py" for name in ("optimizer", "learning_rate", "optimization")),
        Path(root) / "core" / "config_definitions.py",
    ):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                inherited = [classes.get(ast.unparse(base), {}) for base in node.bases]
                own = {
                    ast.unparse(item.target): read_default(item.value)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and item.value is not None
                }
                classes[node.name] = {
                    name: value for fields in (*inherited, own) for name, value in fields.items()
                }

    return classes


def read_default(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return FactoryDefault(
            next(ast.unparse(word.value) for word in node.keywords if word.arg == "default_factory")
        )
    if isinstance(node, ast.BinOp):
        assert isinstance(node.op, ast.Mult)
        return operator.mul(read_default(node.left), read_default(node.right))

    return ast.literal_eval(node)


THEIRS = read_model_garden()
OURS = {
    name: value
    for module in (schema, evaluation, optimization, optimizers, schedules)
    for name, value in vars(module).items()
    if isinstance(value, type)
    and issubclass(value, Config)
    and get_fields(value)
    and not name.startswith("_")
    if value is not OpenOneOfConfig
}


def test_model_gardens_sources_were_read() -> None:
    assert THEIRS["TrainerConfig"]["continuous_eval_timeout"] == 3600
    assert THEIRS["AdamConfig"]["clipnorm"] is None
    assert len(THEIRS) > 25


def test_every_class_is_here() -> None:
    assert THEIRS.keys() - OURS.keys() == REFUSED_CLASSES


@pytest.mark.parametrize("name", sorted(OURS.keys() & THEIRS.keys()))
def test_every_field_is_here(name: str) -> None:
    missing = THEIRS[name].keys() - get_fields(OURS[name]).keys()
    assert missing == (REFUSED_OPTIMIZERS if name == "OptimizerConfig" else set())


@pytest.mark.parametrize("name", sorted(OURS.keys() & THEIRS.keys()))
def test_the_defaults_are_the_same(name: str) -> None:
    for field, theirs in THEIRS[name].items():
        info = get_fields(OURS[name]).get(field)
        if info is None:
            continue
        ours = info.get_default(call_default_factory=True)
        if f"{name}.{field}" in MODEL_GARDEN_EXCEPTIONS and not isinstance(theirs, FactoryDefault):
            assert ours != theirs or field == "differential_privacy_config"
        elif isinstance(theirs, FactoryDefault):
            inner = find_section_class(info.annotation)
            assert inner is not None
            assert inner.__name__ == theirs.factory
            assert ours is None if issubclass(OURS[name], OneOfConfig) else type(ours) is inner
        else:
            assert ours == theirs, (name, field)


def test_the_default_summary_interval_fits_any_loop() -> None:
    assert schema.TrainerConfig(steps_per_loop=300).summary_interval == 1000


def test_validation_keeps_its_last_batch_and_training_does_not() -> None:
    task = schema.TaskConfig()

    assert task.train_data.drop_remainder is True
    assert task.validation_data.drop_remainder is False
    assert task.validation_data.replace(drop_remainder=True) == schema.DataConfig()


@pytest.mark.parametrize(
    ("config_class", "values", "field"),
    [
        (
            schema.TrainerConfig,
            {"steps_per_loop": 300, "summary_interval": 500},
            "summary_interval",
        ),
        (schema.TrainerConfig, {"validation_steps": 0}, "validation_steps"),
        (schema.TrainerConfig, {"train_tf_function": False}, "train_tf_while_loop"),
        (
            schema.TrainerConfig,
            {"eval_tf_while_loop": True, "eval_tf_function": False},
            "eval_tf_while_loop",
        ),
        (
            schema.TrainerConfig,
            {"best_checkpoint_eval_metric": "accuracy", "best_checkpoint_export_subdir": ""},
            "best_checkpoint_export_subdir",
        ),
        (schema.TrainerConfig, {"eval_recreate_iterator": False}, "eval_recreate_iterator"),
        (
            schema.TrainerConfig,
            {"best_checkpoint_export_subdir": "one", "validation_summary_subdir": "one"},
            "best_checkpoint_export_subdir",
        ),
        (
            schema.TrainerConfig,
            {
                "require_exact_resume": True,
                "early_stopping": {"metric": "a", "patience": 1, "eval_name": "side"},
            },
            "early_stopping.eval_name",
        ),
        (schema.TrainerConfig, {"early_stopping": {"patience": 3}}, "early_stopping.metric"),
        *(
            (
                evaluation.EarlyStoppingConfig,
                {"metric": "a", "patience": 1, "eval_name": name},
                "eval_name",
            )
            for name in ("validation", "eval", "a/b")
        ),
        *(
            (
                schema.TrainerConfig,
                {"best_checkpoints": {name: {"metric": "accuracy"}}},
                "best_checkpoints",
            )
            for name in ("", "..", "a/b")
        ),
        (
            schema.TrainerConfig,
            {"best_checkpoint_export_subdir": "best_checkpoints"},
            "best_checkpoint_export_subdir",
        ),
        (evaluation.BestCheckpointConfig, {"metric": ""}, "metric"),
        (schema.DataConfig, {"input_path": "a", "tfds_name": "b"}, "tfds_name"),
        (schema.RuntimeConfig, {"loss_scale": "dynamic"}, "loss_scale"),
        (
            schema.RuntimeConfig,
            {"loss_scale": 0.0, "mixed_precision_dtype": "float16"},
            "loss_scale",
        ),
        (schema.RuntimeConfig, {"num_cores_per_replica": 2}, "num_cores_per_replica"),
        (schema.RuntimeConfig, {"virtual_cpus": 2, "num_gpus": 1}, "virtual_cpus"),
        (schema.RuntimeConfig, {"virtual_cpus": 2, "executor": "single_threaded"}, "executor"),
    ],
)
def test_rules_across_fields(
    config_class: type[Config], values: dict[str, Any], field: str
) -> None:
    assert field in wrong_fields(config_class, values)


@pytest.mark.parametrize("field", ["best_checkpoint_export_subdir", "validation_summary_subdir"])
@pytest.mark.parametrize(
    "name", [".", "..", "/etc", "a/b", "a\\b", "../other", "train", "evals", "params.yaml"]
)
def test_a_folder_of_the_run_has_a_plain_name_of_its_own(field: str, name: str) -> None:
    assert wrong_fields(schema.TrainerConfig, {field: name}) == [field]


def test_only_an_unused_folder_of_the_best_may_be_empty() -> None:
    assert (
        schema.TrainerConfig(best_checkpoint_export_subdir="").best_checkpoint_export_subdir == ""
    )
    assert wrong_fields(schema.TrainerConfig, {"validation_summary_subdir": ""}) == [
        "validation_summary_subdir"
    ]


def test_rules_allow_what_does_something() -> None:
    assert (
        schema.TrainerConfig(eval_recreate_iterator=False, validation_steps=5).validation_steps == 5
    )
    assert schema.TrainerConfig(recovery_max_trials=-1).recovery_max_trials == -1

    folders = schema.TrainerConfig(
        best_checkpoint_export_subdir="best.v2", validation_summary_subdir="held-out"
    )
    assert folders.best_checkpoint_export_subdir == "best.v2"
    assert folders.validation_summary_subdir == "held-out"

    best = schema.TrainerConfig(
        best_checkpoints={"top": {"metric": "far|loss", "keep": 3, "min_delta": 0.5}}
    )
    assert best.best_checkpoints["top"].keep == 3


def _build_experiment(
    runtime: dict[str, Any], batch: int, section: str = "train_data"
) -> schema.ExperimentConfig:
    data = {"global_batch_size": batch, "is_training": True}
    return schema.ExperimentConfig().replace(runtime=runtime, task={section: data})


@pytest.mark.parametrize("section", ["train_data", "validation_data"])
@pytest.mark.parametrize("strategy", ["auto", "mirrored"])
def test_a_batch_that_cpus_cannot_share_names_near_sizes(section: str, strategy: str) -> None:
    runtime = {"virtual_cpus": 3, "distribution_strategy": strategy}
    mistake = collect_mistakes(_build_experiment, runtime, 32, section)[
        f"task.{section}.global_batch_size"
    ]

    assert "batch 32 on 3 replicas (runtime.virtual_cpus) leaves 2 over" in mistake.problem
    assert mistake.advice.endswith("30 or 33")


def test_a_batch_smaller_than_the_cpus_names_their_number() -> None:
    mistake = collect_mistakes(_build_experiment, {"virtual_cpus": 4}, 3)[
        "task.train_data.global_batch_size"
    ]
    assert mistake.advice.endswith("shared equally: 4")


@pytest.mark.parametrize(
    ("runtime", "batch"),
    [
        ({"virtual_cpus": 3, "tpu": "local"}, 32),
        ({"virtual_cpus": 1}, 32),
        ({"virtual_cpus": 4}, 0),
        ({"virtual_cpus": 4}, 32),
        ({}, 32),
    ],
)
def test_batches_that_are_shared_or_of_unknown_size_are_allowed(
    runtime: dict[str, Any], batch: int
) -> None:
    assert _build_experiment(runtime, batch).task.train_data.global_batch_size == batch


def test_virtual_cpus_share_any_batch_to_evaluate_on() -> None:
    config = schema.ExperimentConfig().replace(
        runtime={"virtual_cpus": 3}, task={"validation_data": {"global_batch_size": 32}}
    )

    assert list(config.get_training_batch_sizes()) == []


@pytest.mark.parametrize(("steps", "batch"), [(8, 8), (9, 0), (1, 1)])
def test_micro_batches_have_an_example_each(steps: int, batch: int) -> None:
    config = _build_experiment({}, batch).replace(trainer={"accumulate_steps": steps})
    assert config.trainer.accumulate_steps == steps


def test_more_micro_batches_than_examples_are_refused() -> None:
    mistakes = collect_mistakes(_build_experiment({}, 8).replace, trainer={"accumulate_steps": 9})
    assert "set at most 8" in mistakes["trainer.accumulate_steps"].advice


@pytest.mark.parametrize(
    "values",
    [
        {"steps_per_loop": 0},
        {"checkpoint_interval": 0},
        {"validation_interval": -1},
        {"max_to_keep": 0},
        {"train_steps": -2},
        {"continuous_eval_timeout": -1},
        {"best_checkpoint_metric_comp": "best"},
        {"allow_tpu_summary": True},
        {"best_checkpoints": {"top": {}}},
        {"best_checkpoints": {"top": {"metric": "accuracy", "keep": 0}}},
        {"best_checkpoints": {"top": {"metric": "accuracy", "min_delta": -0.1}}},
        {"best_checkpoints": {"top": {"metric": "accuracy", "metric_comp": "more"}}},
    ],
)
def test_intervals_and_counts_are_bounded(values: dict[str, Any]) -> None:
    (path,) = wrong_fields(schema.TrainerConfig, values)
    assert path.partition(".")[0] in values


def test_input_paths_have_four_spellings() -> None:
    for path in ("a", ("a", "b"), {"en": "a"}, {"en": ("a", "b")}):
        assert schema.DataConfig(input_path=path).input_path == path  # type: ignore[arg-type]

    assert schema.DataConfig(input_path=["a"]).input_path == ("a",)  # type: ignore[arg-type]

    with pytest.raises(ConfigError):
        schema.DataConfig(input_path=5)  # type: ignore[arg-type]
