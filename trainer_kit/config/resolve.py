"""Resolves all sources of an experiment's config to one checked config with origins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from trainer_kit.config.experiment_registry import get_experiment
from trainer_kit.config.fields import flatten_values, get_fields, is_section_mapping
from trainer_kit.config.merge import DEFAULT_ORIGIN, ResolvedConfig, apply_layers
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import Section
from trainer_kit.config.sources.config_files import read_config_file, read_params_override
from trainer_kit.config.sources.gin_source import GinFirstPass, run_gin_first_pass
from trainer_kit.config.sources.last_names import find_last_names
from trainer_kit.config.sources.layer import ConfigLayer, join_keys
from trainer_kit.errors import ConfigError, Mistake, UsageError


@dataclass(frozen=True)
class ConfigSources:
    """Where the values of a run come from, as the command line names them.

    Later sources win, in the order of the attributes.

    Attributes:
      config_files: The paths of YAML or JSON files, in order.
      gin_files, gin_params: The paths of gin files, and single bindings.
      params_overrides: The values of --params_override, in order.
      flags: The values that other flags set, such as --tpu.
    """

    config_files: tuple[str, ...] = ()
    gin_files: tuple[str, ...] = ()
    gin_params: tuple[str, ...] = ()
    params_overrides: tuple[str, ...] = ()
    flags: ConfigLayer = field(default_factory=ConfigLayer)


def resolve_config(name: str, sources: ConfigSources) -> ResolvedConfig[ExperimentConfig]:
    """Returns the config of the experiment `name`: its factory's defaults, changed by all sources.

    Names that gin does not know yet are left to `sources.run_gin_second_pass`. TensorFlow is not
    imported here.

    Raises:
      ConfigError: With every mistake of every source.
    """
    # A source that cannot be read does not hide the mistakes in the other ones.
    mistakes: list[Mistake] = []
    file_layers: list[ConfigLayer] = []
    for path in sources.config_files:
        try:
            file_layers.append(read_config_file(path))
        except ConfigError as error:
            mistakes += error.mistakes
    override_layers: list[ConfigLayer] = []
    for text in sources.params_overrides:
        try:
            override_layers.append(read_params_override(text))
        except ConfigError as error:
            mistakes += error.mistakes

    # gin can bind arguments of the factory, so its files are read before the factory is called.
    try:
        if sources.gin_files or sources.gin_params:
            first_pass = run_gin_first_pass(sources.gin_files, sources.gin_params, name)
        else:
            first_pass = GinFirstPass(get_experiment(name), ConfigLayer())
    except ConfigError as error:
        raise ConfigError([*mistakes, *error.mistakes]) from None
    except UsageError as error:
        raise ConfigError([Mistake("experiment", str(error)), *mistakes]) from None
    mistakes += first_pass.mistakes

    # The last layer wins.
    all_layers = [*file_layers, first_pass.layer]
    for layer in override_layers:
        layers, name_mistakes = find_last_names(layer, first_pass.config, all_layers)
        all_layers += layers
        mistakes += name_mistakes
    all_layers.append(sources.flags)
    try:
        resolved = apply_layers(first_pass.config, all_layers)
    except ConfigError as error:
        mistakes += error.mistakes
    if mistakes:
        raise ConfigError([*mistakes, *first_pass.near_misses])
    if not first_pass.argument_origins:
        return resolved

    # The origin of what a bound argument of the factory has changed is that argument.
    defaults = flatten_values(get_experiment(name))
    bound_arguments = []
    for argument, place in first_pass.argument_origins.items():
        bound_arguments.append(f"{argument} of {place}")
    arguments_origin = ", ".join(bound_arguments)

    origins = dict(resolved.origins)
    values = flatten_values(first_pass.config)
    for path, value in values.items():
        is_changed = path not in defaults or defaults[path] != value
        if is_changed and origins.get(path) == DEFAULT_ORIGIN:
            origins[path] = arguments_origin
    return replace(resolved, origins=origins)


def list_resolved_values(
    resolved: ResolvedConfig[ExperimentConfig], baseline: ExperimentConfig | None = None
) -> list[tuple[str, Any, str]]:
    """Returns (dotted path, plain value, origin) of every value, in the order of the config.

    The origin of what no source sets is "experiment", or "default" where the value is the default
    of its class.

    Args:
      resolved: A checked config.
      baseline: A config, usually that of `get_experiment(name)`. If given, only values that differ
        from it are returned.
    """
    origins = dict(resolved.origins)
    for path in non_default_paths(resolved.config):
        if origins.get(path) == DEFAULT_ORIGIN:
            origins[path] = "experiment"

    baseline_values = {}
    if baseline is not None:
        baseline_values = flatten_values(baseline)
    rows = []
    values = flatten_values(resolved.config)
    for path, value in values.items():
        is_in_baseline = path in baseline_values and baseline_values[path] == value
        if not is_in_baseline:
            rows.append((path, value, origins[path]))
    return rows


def non_default_paths(config: Section, default: object = None, path: str = "") -> Iterator[str]:
    """Yields the dotted paths of the values that differ from their defaults or have no default.

    Args:
      config: A section, or a whole config.
      default: The section as the class around it has it by default. If it is None or has another
        class, the defaults of the section's own class count.
      path: The dotted path of the section.
    """
    fields = get_fields(type(config))
    for name in config.get_active_fields():
        value = getattr(config, name)

        # Without a default, the value is compared with an object that equals no value.
        default_value: Any = object()
        field_info = fields[name]
        if type(default) is type(config):
            # A branch that was registered later is missing in a default.
            default_value = getattr(default, name, default_value)
        elif not field_info.is_required():
            default_value = field_info.get_default(call_default_factory=True)

        value_path = join_keys(path, name)
        if isinstance(value, Config):
            yield from non_default_paths(value, default_value, value_path)
        elif is_section_mapping(value):
            default_sections = default_value if is_section_mapping(default_value) else {}
            for key, section in value.items():
                section_path = join_keys(value_path, key)
                yield from non_default_paths(section, default_sections.get(key), section_path)
        elif value != default_value:
            yield value_path
