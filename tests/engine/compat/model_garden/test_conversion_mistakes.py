"""Mistakes in configs of Model Garden's experiments are told by path; their YAML is read as they
read it.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from official.core import config_definitions, exp_factory
from official.modeling.hyperparams import params_dict

from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert, find_broken_rules
from trainer_kit.compat.model_garden.experiments import PREFIX
from trainer_kit.compat.model_garden.optimizers import check_values
from trainer_kit.config.discovery import import_experiment
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.resolve import ConfigSources, resolve_config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError

RESNET = "resnet_imagenet"
BERT = "bert/pretraining"
OPTIMIZER = "trainer.optimizer_config"

MISTAKES = [
    (
        RESNET,
        "task.train_data.inputpath=x",
        "there is no such key; did you mean task.train_data.input_path?",
    ),
    (RESNET, "task.model.backbon.type=resnet", "did you mean task.model.backbone?"),
    (
        RESNET,
        "task.train_data.global_batch_size='32'",
        "'32' is not a whole number; write 32 without quotes",
    ),
    (RESNET, "task.train_data.is_training=yes", "'yes' is not true or false"),
    (RESNET, "task.losses.l2_weight_decay=[0.1]", "[0.1] is not a number"),
    (RESNET, "task.model.backbone.type=resnett", "did you mean resnet?"),
    (RESNET, f"{OPTIMIZER}.learning_rate.type=cosin", "did you mean cosine?"),
    (RESNET, f"{OPTIMIZER}.learning_rate.cosine.decay_steps=5", "learning_rate.type is 'stepwise'"),
    (
        RESNET,
        f"{OPTIMIZER}.learning_rate=0.1",
        "0.1 is not a section; give its fields (type, constant, stepwise",
    ),
    (RESNET, "task.train_data=null", "null is not a section"),
    (RESNET, "task=null", "null is not a section"),
    (RESNET, "task.model.input_size=224", "(each item a whole number or null)"),
    (RESNET, "task.train_data.restrictions=1", "there is no such key"),
    (BERT, "task.model.cls_heads=3", "3 is not a list"),
    (
        BERT,
        "task.model.cls_heads=[{inner_dims: 3}]",
        "did you mean task.model.cls_heads.0.inner_dim?",
    ),
    ("bert/tagging", "task.class_names=a", "'a' is not a list (each item text) or null"),
]

# In the manner of the files in their repository, which the package does not hold.
FILES = {
    "retinanet_mobile_coco": """
runtime: {distribution_strategy: 'mirrored', mixed_precision_dtype: 'bfloat16'}
task:
  losses: {l2_weight_decay: 3.0e-05}
  model:
    anchor: {anchor_size: 3, aspect_ratios: [0.5, 1.0, 2.0]}
    backbone: {spinenet_mobile: {model_id: '49XS', se_ratio: 0.2}, type: 'spinenet_mobile'}
    decoder: {type: 'identity'}
    input_size: !!python/tuple [256, 256, 3]
  train_data: {dtype: 'bfloat16', global_batch_size: 256, parser: {aug_scale_max: 2.0}}
trainer:
  optimizer_config:
    learning_rate: {stepwise: {boundaries: [20, 40], values: [0.3, 0.03, 0.003]}, type: 'stepwise'}
    warmup: {linear: {warmup_learning_rate: 0, warmup_steps: 10}}
  train_steps: 60
""",
    "mobilenet_imagenet": """
task:
  model:
    backbone: {mobilenet: {model_id: 'MobileNetV4ConvSmall'}, type: 'mobilenet'}
    dropout_rate: 0
  train_data:
    aug_type: {randaug: {cutout_const: 20, exclude_ops: ['Cutout'], magnitude: 9}, type: 'randaug'}
trainer:
  optimizer_config:
    ema: {average_decay: 0.9999, trainable_weights_only: false}
    learning_rate:
      cosine: {decay_steps: 300, initial_learning_rate: 0.002, name: 'CosineDecay'}
      type: 'cosine'
    optimizer:
      adamw: {beta_1: 0.6, exclude_from_weight_decay: ['batch_normalization']}
      type: 'adamw'
""",
    "semantic_segmentation": """
task:
  model: {input_size: [null, null, 3], decoder: {type: aspp, aspp: {pool_kernel_size: [512, 1024]}}}
trainer: {optimizer_config: {ema: null}}
""",
    "bert/pretraining": """
task:
  init_checkpoint: ''
  model:
    encoder: {type: albert, albert: {hidden_size: 768, dropout_rate: 0.0}}
    cls_heads:
    - {activation: tanh, dropout_rate: 0.1, inner_dim: 768, name: next_sentence, num_classes: 2}
trainer:
  optimizer_config:
    learning_rate:
      polynomial: {cycle: false, decay_steps: 10, initial_learning_rate: 0.0001, power: 1.0}
    warmup: {polynomial: {power: 1, warmup_steps: 3}, type: polynomial}
  best_checkpoint_export_subdir: 'best_ckpt'
  best_checkpoint_eval_metric: 'cls_accuracy'
""",
}


@pytest.fixture(autouse=True, scope="module")
def all_experiments_of_theirs() -> None:
    """Registers them. The import takes two seconds, which the workers without this file save."""
    importlib.import_module("official.common.registry_imports")


def _resolve(name: str, sources: ConfigSources) -> ExperimentConfig:
    import_experiment(PREFIX + name)
    return resolve_config(PREFIX + name, sources).config


def _replace_tuples(value: Any) -> Any:
    """Tuples as lists."""
    if isinstance(value, dict):
        return {key: _replace_tuples(item) for key, item in value.items()}
    return [_replace_tuples(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize(
    ("name", "override", "message"), MISTAKES, ids=[override for _, override, _ in MISTAKES]
)
def test_a_mistake_is_told_in_one_line(name: str, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        _resolve(name, ConfigSources(params_overrides=(override,)))

    assert "\n" not in str(error.value)
    path = override.partition("=")[0]
    assert str(error.value).startswith(path[:8])


def test_a_last_name_sets_the_base_rate_of_their_schedule() -> None:
    ours = _resolve(BERT, ConfigSources(params_overrides=("learning_rate=3e-4,warmup=null",)))

    optimizer_config = build_original(ours.trainer.optimizer_config)
    assert optimizer_config.learning_rate.polynomial.initial_learning_rate == 3e-4
    assert optimizer_config.warmup.type is None


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_theirs_gives_the_values_that_it_gives_them(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(FILES[name])

    theirs = params_dict.override_params_dict(
        exp_factory.get_exp_config(name), str(file), is_strict=True
    )
    ours = _resolve(name, ConfigSources(config_files=(str(file),)))

    task = build_original(ours.task)
    assert _replace_tuples(task.as_dict()) == _replace_tuples(theirs.task.as_dict())
    optimizer_config = build_original(ours.trainer.optimizer_config)
    assert optimizer_config.as_dict() == theirs.trainer.optimizer_config.as_dict()
    assert ours.trainer.train_steps == theirs.trainer.train_steps


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "task: {losses: {norm_activation: {activation: relu}}}",
            "task.losses.norm_activation (.*:1): there is no such",
        ),
        (
            "task: {model: !!python/object:os.system {}}",
            "task.model (.*:1:15): .* cannot be read; use plain values",
        ),
        ("task: [1]", r"task (.*): \[1\] is not a section"),
    ],
)
def test_a_file_that_does_not_fit_is_told_by_its_line(
    text: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)

    pattern = message.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        _resolve(RESNET, ConfigSources(config_files=(str(file),)))


def test_a_tuple_of_theirs_comes_to_them_as_a_tuple() -> None:
    text = "task.train_data.feature_shape=[8,64,64,3]"
    ours = _resolve("video_classification_kinetics400", ConfigSources(params_overrides=(text,)))
    assert build_original(ours.task).train_data.feature_shape == (8, 64, 64, 3)


def test_a_broken_restriction_is_reported_before_a_run() -> None:
    resnet = exp_factory.get_exp_config(RESNET)
    theirs = config_definitions.ExperimentConfig(
        task=resnet.task,
        trainer=resnet.trainer,
        runtime=resnet.runtime,
        restrictions=[
            "task.model.num_classes > 5",
            "task.train_data.dtype == task.validation_data.dtype",
        ],
    )
    ours = convert(theirs)
    assert not find_broken_rules(theirs)
    assert not find_broken_rules(ours)

    changes = {"model": {"num_classes": 3}, "train_data": {"dtype": "float16"}}
    changed = apply_layers(ours, [ConfigLayer({"task": changes}, {"task": "here"})]).config
    mistakes = find_broken_rules(changed)
    paths = [mistake.path for mistake in mistakes]
    assert paths == ["task.model.num_classes", "task.train_data.dtype"]
    message = "task.model.num_classes: breaks the experiment's rule 'task.model.num_classes >"
    assert str(mistakes[0]).startswith(message)

    theirs.task.model.num_classes = 3
    assert [mistake.path for mistake in find_broken_rules(theirs)] == ["task.model.num_classes"]


def test_a_trainer_refuses_a_config_that_breaks_a_restriction() -> None:
    theirs = exp_factory.get_exp_config("wmt_transformer/large")
    message = r"task\.sentencepiece_model_path: breaks the experiment's rule"

    with pytest.raises(ConfigError, match=message):
        check_values(SimpleNamespace(create_optimizer=None), theirs)
