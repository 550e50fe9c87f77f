"""Offers Model Garden's experiments in trainer_kit.

An experiment is called `tfm/<name>`, and `<name>` where that name is free. The names are known
without an import. Model Garden is imported, which takes ten seconds, when a config is created.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer_kit.config.experiment_registry import experiments
from trainer_kit.errors import UsageError, get_install_command

if TYPE_CHECKING:
    from trainer_kit.config.schema.experiment import ExperimentConfig

PREFIX = "tfm/"
_VISION = ("official.vision",)
_NLP = ("official.nlp.tasks", "official.nlp.configs.experiment_configs")

# The experiments that the installed release registers, and the modules that register them.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "mock": ("official.utils.testing.mock_task",),
    **dict.fromkeys(
        (
            "bert/pretraining",
            "bert/pretraining_dynamic",
            "bert/sentence_prediction",
            "bert/sentence_prediction_text",
            "bert/squad",
            "bert/tagging",
            "bert/text_wiki_pretraining",
            "electra/pretraining",
            "wmt_transformer/large",
        ),
        _NLP,
    ),
    **dict.fromkeys(
        (
            "image_classification",
            "resnet_imagenet",
            "resnet_rs_imagenet",
            "revnet_imagenet",
            "mobilenet_imagenet",
            "deit_imagenet_pretrain",
            "vit_imagenet_pretrain",
            "vit_imagenet_finetune",
            "fasterrcnn_resnetfpn_coco",
            "maskrcnn_resnetfpn_coco",
            "maskrcnn_spinenet_coco",
            "maskrcnn_mobilenet_coco",
            "cascadercnn_spinenet_coco",
            "retinanet",
            "retinanet_resnetfpn_coco",
            "retinanet_spinenet_coco",
            "retinanet_mobile_coco",
            "semantic_segmentation",
            "seg_deeplabv3_pascal",
            "seg_deeplabv3plus_pascal",
            "seg_resnetfpn_pascal",
            "mnv2_deeplabv3_pascal",
            "seg_deeplabv3plus_cityscapes",
            "mnv2_deeplabv3_cityscapes",
            "mnv2_deeplabv3plus_cityscapes",
            "video_classification",
            "video_classification_ucf101",
            "video_classification_kinetics400",
            "video_classification_kinetics600",
            "video_classification_kinetics700",
            "video_classification_kinetics700_2020",
        ),
        _VISION,
    ),
}


def find(name: str) -> None:
    """Registers Model Garden's experiment `name`, if it exists. For "", all of its experiments.

    Imports nothing. Experiments that a module of `official.projects` or of a user registers are
    known once that module is imported.
    """
    modules_by_name = {**EXPERIMENTS, **dict.fromkeys(registered_names(), ())}
    for garden_name, modules in modules_by_name.items():
        full_names = [PREFIX + garden_name]
        # Only an experiment that is asked for is also called by its own name.
        if garden_name == name:
            full_names.append(garden_name)
        for full_name in full_names:
            if name in ("", full_name) and full_name not in experiments:
                experiments.register(full_name)(_factory(garden_name, modules))


def _factory(name: str, modules: tuple[str, ...]) -> Callable[[], ExperimentConfig]:
    """Returns the function that creates the config of an experiment, after its modules' import."""

    def factory() -> ExperimentConfig:
        try:
            for module in modules:
                importlib.import_module(module)
            from official.core import exp_factory

            from trainer_kit.compat.model_garden.conversion import convert
        except ImportError as error:
            raise UsageError(
                f"{PREFIX}{name} is an experiment of TF Model Garden, which cannot be imported"
                f" ({error}): {get_install_command('model-garden')}"
            ) from error
        return convert(exp_factory.get_exp_config(name))

    source = modules[0] if modules else "an imported module"
    factory.__doc__ = f"An experiment of Model Garden ({source})."
    factory.__name__ = f"get_exp_config({name!r})"
    factory.__qualname__ = factory.__name__
    return factory


def registered_names() -> list[str]:
    """Returns the names that are currently registered with Model Garden.

    [] while it is not imported.
    """
    module = sys.modules.get("official.core.exp_factory")
    if module is None:
        return []
    return _flatten_names(module._REGISTERED_CONFIGS, "")


def _flatten_names(entries: dict[str, Any], path: str) -> list[str]:
    """Returns the full names in nested dicts, with a slash between their parts."""
    names: list[str] = []
    for name, entry in entries.items():
        if isinstance(entry, dict):
            names += _flatten_names(entry, f"{path}{name}/")
        else:
            names.append(f"{path}{name}")
    return names
