"""Creates a Model Garden config from flags, with the names of official.core.train_utils."""

from __future__ import annotations

import logging
import os
import pprint
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from official.core import exp_factory
from official.modeling.hyperparams import ParamsDict

from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.experiments import registered_names
from trainer_kit.config.merge import DEFAULT_ORIGIN, apply_layers
from trainer_kit.config.serialize import write_params
from trainer_kit.config.sources.config_files import read_config_file, read_params_override
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import UsageError, suggest_names
from trainer_kit.process.run_directory import RunDirectory, check_model_dir

if TYPE_CHECKING:
    from absl.flags import FlagValues
    from official.core.train_utils import ParseConfigOptions

    from trainer_kit.compat.model_garden.garden_types import ExperimentParams, GardenConfig

_LOG = logging.getLogger(__name__)

# The values that `convert` chooses where a Model Garden config leaves them at the default.
_CONVERTED_FIELDS = (
    ("runtime", "distribution_strategy"),
    ("trainer", "best_checkpoint_export_subdir"),
)


def parse_configuration(
    flags_obj: FlagValues | ParseConfigOptions,
    lock_return: bool = True,
    print_return: bool = True,
) -> GardenConfig:
    """Returns the Model Garden config that the flags describe.

    The experiment's defaults come first, then config files in order, flags and overrides. The last
    one wins.

    Args:
      flags_obj: absl's FLAGS, a ParseConfigOptions, or an object with the same attributes.
      lock_return: Whether to lock the config against changes.
      print_return: Whether to log the config.

    Raises:
      UsageError: When no experiment is named, or none has this name.
      ConfigError: For unknown keys, wrong types and broken rules.
      KeyError, ValueError: When the config breaks a restriction of the experiment.
    """
    name = flags_obj.experiment
    if name is None:
        raise UsageError(
            "The flag --experiment must be specified. Give the name of a registered experiment"
        )
    try:
        params = exp_factory.get_exp_config(name)
    except LookupError as error:
        advice = suggest_names(name, registered_names())
        raise UsageError(f"--experiment: no experiment is called {name!r}; {advice}") from error

    # All at once: a later source may repair what an earlier one breaks, and one report has all
    # mistakes.
    layers = []
    for path in flags_obj.config_file or ():
        layers.append(_layer(path, read_config_file, "config_file"))

    tpu_values = {"runtime": {"tpu": flags_obj.tpu}}
    layers.append(ConfigLayer(tpu_values, {"runtime.tpu": "--tpu"}))

    # Not every program defines this flag.
    if "tf_data_service" in flags_obj and flags_obj.tf_data_service:
        address = {"tf_data_service_address": flags_obj.tf_data_service}
        sections = {}
        for section in ("train_data", "validation_data"):
            if hasattr(params.task, section):
                sections[section] = address
        layers.append(ConfigLayer({"task": sections}, {"task": "--tf_data_service"}))

    overrides = flags_obj.params_override or ()
    if not isinstance(overrides, (list, tuple)):
        overrides = [overrides]
    for override in overrides:
        layers.append(_layer(override, read_params_override, "params_override"))

    resolved = apply_layers(convert(params), layers)
    params = build_original(resolved.config)

    # An explicit value counts, even if it equals the one that `convert` chooses.
    for section, field in _CONVERTED_FIELDS:
        origin = resolved.origins[f"{section}.{field}"]
        if not origin.startswith(DEFAULT_ORIGIN):
            resolved_section = getattr(resolved.config, section)
            value = getattr(resolved_section, field)
            setattr(getattr(params, section), field, value)

    params.validate()
    if lock_return:
        params.lock()
    if print_return:
        _LOG.info("the config of %s:\n%s", name, pprint.pformat(params.as_dict()))
    return params


def serialize_config(params: ExperimentParams, model_dir: str) -> None:
    """Writes `params`, a config of either framework, to `model_dir/params.yaml`.

    run_experiment does this, too.

    Raises:
      UsageError: When `model_dir` is None.
      ConfigError: When the run in `model_dir` was started with another config.
      StorageError: When the file cannot be written.
    """
    config = convert(params)
    directory = RunDirectory(model_dir, config.trainer)
    check_model_dir(directory, config, "", ())
    os.makedirs(model_dir, exist_ok=True)
    write_params(directory.params_path, config)


def _layer(
    flag_value: str | Mapping[str, object] | ParamsDict,
    read: Callable[[str], ConfigLayer],
    origin: str,
) -> ConfigLayer:
    """Returns the values of a flag. Programs may set a mapping instead of text."""
    values = flag_value
    if isinstance(flag_value, ParamsDict):
        values = flag_value.as_dict()
    if isinstance(values, Mapping):
        return ConfigLayer(dict(values), dict.fromkeys(values, origin))
    return read(values)
