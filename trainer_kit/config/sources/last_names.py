"""Finds the fields that --params_override names by the last part of their paths alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer_kit.config.allowed_values import NO_SUCH_KEY, OTHER_NAMES
from trainer_kit.config.fields import get_fields, list_sections
from trainer_kit.config.merge import merge_layers
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.optimization import OptimizationConfig
from trainer_kit.config.sources.layer import ConfigLayer, is_inside, join_keys, unflatten_values
from trainer_kit.errors import Mistake, suggest_names


def find_last_names(
    layer: ConfigLayer, config: ExperimentConfig, previous_layers: Sequence[ConfigLayer]
) -> tuple[list[ConfigLayer], list[Mistake]]:
    """Puts whole paths in place of last names, such as trainer.train_steps for train_steps.

    The sections of an experiment are whole paths, and never last names. The order of the values
    does not matter: momentum=0.9,optimizer=sgd sets the momentum of sgd.

    Args:
      layer: The values of one --params_override.
      config: The config of the experiment.
      previous_layers: The layers below this one. They decide which fields the config has, since
        only chosen branches have some.

    Returns:
      The layers to use in place of `layer`, and a mistake for each name of no field, of several, or
      of one whose whole path `layer` has too.
    """
    sections = get_fields(type(config))
    names = []
    whole_paths = {}
    for key, value in layer.values.items():
        if str(key).isidentifier() and key not in sections:
            names.append(key)
        else:
            whole_paths[key] = value
    layers = [replace(layer, values=whole_paths)]
    paths_by_name: dict[str, list[str]] = {}

    # One name may choose a branch, and the next one may be a field of that branch.
    for _ in names:
        # Mistakes in these layers are reported when all layers are merged.
        current, _, _ = merge_layers(config, [*previous_layers, *layers])
        paths_by_name = _group_paths(current)
        previous = layers
        layers = [replace(layer, values=whole_paths)]
        for name, paths in paths_by_name.items():
            if name not in names or len(paths) > 1:
                continue
            path = paths[0]
            values = unflatten_values({path: layer.values[name]})
            new_layer = ConfigLayer(values, {path: layer.find_origin(name)})

            # The schedule comes before the base rate, which may be among the whole paths.
            is_alias = name in dict(OptimizationConfig.aliases)
            position = 0 if is_alias else len(layers)
            layers.insert(position, new_layer)
        if layers == previous:
            break

    mistakes = []
    for name in names:
        paths = paths_by_name.get(name, [])
        if len(paths) == 1 and paths[0] not in layer.origins:
            continue
        problem = "several fields have this name; write the whole path"
        if len(paths) == 1:
            problem = "is given twice; keep one"
        advice = suggest_names("", paths, max_listed=5)
        if not paths:
            problem = NO_SUCH_KEY
            if name in OTHER_NAMES:
                advice = f"did you mean {OTHER_NAMES[name]}?"
            else:
                advice = suggest_names(name, list(paths_by_name), max_listed=5)
        mistakes.append(Mistake(name, problem, advice, layer.find_origin(name)))
    return layers, mistakes


def _group_paths(config: ExperimentConfig) -> dict[str, list[str]]:
    """Returns the paths that each last name may stand for, outer sections first."""
    paths_by_name: dict[str, list[str]] = {}
    for section_path, section_class, is_present in list_sections(config):
        if not is_present:
            continue
        names = [*get_fields(section_class), *dict(section_class.aliases)]
        for name in names:
            path = join_keys(section_path, name)
            paths = paths_by_name.setdefault(name, [])
            # A section stands for the fields of the same name in it, such as the base rate.
            is_covered = any(is_inside(path, section) for section in paths)
            if not is_covered:
                paths.append(path)
    return paths_by_name
