"""Finds the fields that --params_override names by the last part of their paths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer_kit.config.allowed_values import NO_SUCH_KEY
from trainer_kit.config.fields import get_fields, list_field_paths
from trainer_kit.config.merge import merge_layers
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.config_files import OVERRIDE_FLAG
from trainer_kit.config.sources.layer import ConfigLayer, is_inside, unflatten_values
from trainer_kit.errors import Mistake, suggest_names


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
      The layers to use in place of `layer`, and a mistake for each name of no field or of several.
    """
    sections = get_fields(type(config))
    names = [key for key in layer.values if str(key).isidentifier() and key not in sections]
    if not names:
        return [layer], []

    whole_paths = {key: value for key, value in layer.values.items() if key not in names}
    first_layer = replace(layer, values=whole_paths)
    layers = [first_layer]
    below = [*previous_layers, first_layer]
    # Mistakes in these layers are reported when all layers are merged.
    current, _, _ = merge_layers(config, below)
    paths_by_name = _group_paths(current)

    mistakes = []
    for name in names:
        paths = paths_by_name.get(name, [])
        origin = layer.find_origin(name) or OVERRIDE_FLAG
        if len(paths) == 1:
            path = paths[0]
            value = layer.values[name]
            values = unflatten_values({path: value})
            new_layer = ConfigLayer(values, {path: origin})
            layers.append(new_layer)
            continue

        problem = "several fields have this name; write the whole path"
        advice = suggest_names("", paths, max_listed=5)
        if not paths:
            problem = NO_SUCH_KEY
            advice = suggest_names(name, list(paths_by_name), max_listed=5)
        mistake = Mistake(name, problem, advice, origin)
        mistakes.append(mistake)
    return layers, mistakes


def _group_paths(config: ExperimentConfig) -> dict[str, list[str]]:
    """Returns the paths that each last name may stand for."""
    paths_by_name: dict[str, list[str]] = {}
    for path in list_field_paths(config):
        *_, name = path.split(".")
        paths = paths_by_name.setdefault(name, [])
        # A section stands for the fields of the same name in it, such as the base learning rate.
        is_covered = any(is_inside(path, section) for section in paths)
        if not is_covered:
            paths.append(path)
    return paths_by_name
