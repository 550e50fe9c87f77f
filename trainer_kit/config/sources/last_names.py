"""Finds the fields that --params_override names by the last part of their paths alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainer_kit.config.allowed_values import NO_SUCH_KEY
from trainer_kit.config.fields import flatten_values, get_fields, list_field_paths
from trainer_kit.config.merge import merge_layers
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.config_files import OVERRIDE_FLAG
from trainer_kit.config.sources.layer import ConfigLayer, is_inside
from trainer_kit.errors import Mistake, find_similar_names

# Of several fields with a name, the message lists so many.
_MAX_LISTED = 5


def find_last_names(
    layer: ConfigLayer, config: ExperimentConfig, previous_layers: Sequence[ConfigLayer]
) -> tuple[list[ConfigLayer], list[Mistake]]:
    """Puts whole paths in place of last names, such as trainer.train_steps for train_steps.

    The sections of an experiment are whole paths, and always win. What the layer itself sets by
    whole paths counts first: with `learning_rate=0.1` it may also choose the schedule.

    Args:
      layer: The values of one --params_override.
      config: The config of the experiment.
      previous_layers: The layers below this one. They decide which fields the config has, since
        only chosen branches have some.

    Returns:
      The layers to use in place of `layer`, and a mistake for each name of several fields, or that
      looks like one of a field. Other unknown names stay as they are.
    """
    sections = get_fields(type(config))
    names = [key for key in layer.values if key not in sections]
    if not names:
        return [layer], []

    whole_paths = {key: value for key, value in layer.values.items() if key in sections}
    first_layer = replace(layer, values=whole_paths)
    current, _, earlier_mistakes = merge_layers(config, [*previous_layers, first_layer])
    if earlier_mistakes:
        current = config
    values = flatten_values(current)
    all_paths = list_field_paths(current)
    all_names = {path.rpartition(".")[2] for path in all_paths}

    layers = [first_layer]
    mistakes = []
    for name in names:
        paths = _select_paths(name, all_paths, values)
        similar_names = find_similar_names(name, all_names)
        origin = layer.find_origin(name) or OVERRIDE_FLAG
        if len(paths) == 1:
            layers.append(layer.select_value(name, paths[0]))
        elif paths:
            more = f", ... ({len(paths)} in all)" if len(paths) > _MAX_LISTED else ""
            first_paths = ", ".join(paths[:_MAX_LISTED])
            problem = "several fields have this name"
            mistakes.append(Mistake(name, problem, f"write one of {first_paths}{more}", origin))
        elif similar_names:
            suggestion = " or ".join(similar_names)
            mistakes.append(Mistake(name, NO_SUCH_KEY, f"did you mean {suggestion}?", origin))
        else:
            layers.append(layer.select_value(name, name))
    return layers, mistakes


def _select_paths(name: str, all_paths: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Returns the paths that a last name may stand for."""
    paths = [path for path in all_paths if path.rpartition(".")[2] == name]

    # A section of this name stands for the field of this name in it: the base learning rate.
    outer_paths = []
    for path in paths:
        sections = [section for section in paths if section != path and is_inside(path, section)]
        if not sections:
            outer_paths.append(path)

    # With several optimizers, optimizer_config chooses none.
    chosen_paths = [path for path in outer_paths if values.get(f"{path}.type", path) is not None]
    return chosen_paths or outer_paths
