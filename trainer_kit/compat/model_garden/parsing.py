"""Creates a Model Garden config from flags, with the names of official.core.train_utils."""

from __future__ import annotations

import logging
import os
import pprint
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from official.core import exp_factory
from official.modeling.hyperparams import ParamsDict

from trainer_kit.compat.model_garden.config_classes import original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.experiments import registered_names
from trainer_kit.config.merge import DEFAULT, apply
from trainer_kit.config.serialize import write_params
from trainer_kit.config.sources.config_files import read_config_file, read_params_override
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import UsageError, suggestion
from trainer_kit.process.run_directory import RunDirectory, check_model_dir

_LOG = logging.getLogger(__name__)
# The values that `convert` chooses where a Model Garden config leaves them at the default.
_CHOSEN = (("runtime", "distribution_strategy"), ("trainer", "best_checkpoint_export_subdir"))


class ExperimentParser:
    """Creates the config of a Model Garden experiment from flags, step by step.

    Args:
      flags_obj: absl's FLAGS, a ParseConfigOptions, or an object with the same attributes.
    """

    def __init__(self, flags_obj: Any) -> None:
        self._flags_obj = flags_obj

    def parse(self) -> Any:
        """Returns the config: the experiment's defaults, config files in order, flags, overrides; the last one wins.

        Raises:
          ConfigError: for unknown keys, wrong types and broken rules.
        """
        params = self.base_experiment()
        if all(getattr(type(self), name) is getattr(ExperimentParser, name) for name in _STEPS):
            # All at once: a later source may repair what an earlier one breaks, and one report has all mistakes.
            return _overridden(params, [layer for read in _STEPS.values() for layer in read(self._flags_obj, params)])
        for name in _STEPS:
            params = getattr(self, name)(params)
        return params

    def base_experiment(self) -> Any:
        """Returns the config that the experiment's factory returns.

        Raises:
          UsageError: when no experiment is named, or none has this name.
        """
        if self._flags_obj.experiment is None:
            raise UsageError("The flag --experiment must be specified. Give the name of a registered experiment")
        name = self._flags_obj.experiment
        try:
            return exp_factory.get_exp_config(name)
        except LookupError as error:
            advice = suggestion(name, registered_names())
            raise UsageError(f"--experiment: no experiment is called {name!r}; {advice}") from error

    def parse_config_file(self, params: Any) -> Any:
        """Returns `params` with the values of the config files applied."""
        return _overridden(params, _of_files(self._flags_obj, params))

    def parse_runtime(self, params: Any) -> Any:
        """Returns `params` with the TPU that the flags name."""
        return _overridden(params, _of_runtime(self._flags_obj, params))

    def parse_data_service(self, params: Any) -> Any:
        """Returns `params` with the address of the tf.data service, if the flags name one."""
        return _overridden(params, _of_data_service(self._flags_obj, params))

    def parse_params_override(self, params: Any) -> Any:
        """Returns `params` with the values of --params_override applied; the flag may be repeated."""
        return _overridden(params, _of_override(self._flags_obj, params))


def _of_files(flags: Any, _: Any) -> list[Layer]:
    return [_layer(one, read_config_file, "config_file") for one in flags.config_file or ()]


def _of_runtime(flags: Any, _: Any) -> list[Layer]:
    return [Layer({"runtime": {"tpu": flags.tpu}}, {"runtime.tpu": "--tpu"})]


def _of_data_service(flags: Any, params: Any) -> list[Layer]:
    if "tf_data_service" not in flags or not flags.tf_data_service:
        return []
    address = {"tf_data_service_address": flags.tf_data_service}
    parts = [part for part in ("train_data", "validation_data") if hasattr(params.task, part)]
    return [Layer({"task": dict.fromkeys(parts, address)}, {"task": "--tf_data_service"})]


def _of_override(flags: Any, _: Any) -> list[Layer]:
    given = flags.params_override or ()
    listed = given if isinstance(given, (list, tuple)) else [given]
    return [_layer(one, read_params_override, "params_override") for one in listed]


_STEPS = {  # ExperimentParser's methods in order, each with the function that reads its values
    "parse_config_file": _of_files,
    "parse_runtime": _of_runtime,
    "parse_data_service": _of_data_service,
    "parse_params_override": _of_override,
}


def parse_configuration(flags_obj: Any, lock_return: bool = True, print_return: bool = True) -> Any:
    """Returns the Model Garden config that the flags describe.

    Args:
      flags_obj: absl's FLAGS, a ParseConfigOptions, or an object with the same attributes.
      lock_return: Whether to lock the config against changes.
      print_return: Whether to log the config.

    Raises:
      ConfigError: for unknown keys, wrong types and broken rules.
      KeyError, ValueError: when the config breaks a restriction of the experiment.
    """
    params = ExperimentParser(flags_obj).parse()
    params.validate()
    if lock_return:
        params.lock()
    if print_return:
        _LOG.info("the config of %s:\n%s", flags_obj.experiment, pprint.pformat(params.as_dict()))
    return params


def serialize_config(params: Any, model_dir: str) -> None:
    """Writes `params`, a config of either framework, to `model_dir/params.yaml`; run_experiment does this too.

    Raises:
      UsageError: when `model_dir` is None.
      ConfigError: when the run in `model_dir` was started with another config.
      StorageError: when the file cannot be written.
    """
    config = convert(params)
    directory = RunDirectory(model_dir, config.trainer)
    check_model_dir(directory, config, "", ())
    os.makedirs(model_dir, exist_ok=True)
    write_params(directory.params, config)


def _layer(given: Any, read: Callable[[str], Layer], origin: str) -> Layer:
    """Returns the values of a flag; programs may set a mapping instead of text."""
    values = given.as_dict() if isinstance(given, ParamsDict) else given
    if isinstance(values, Mapping):
        return Layer(dict(values), dict.fromkeys(values, origin))
    return read(values)


def _overridden(params: Any, layers: Sequence[Layer]) -> Any:
    """Returns a Model Garden config like `params` with the values of `layers` applied and checked."""
    if not layers:
        return params
    resolved = apply(convert(params), layers)
    made = original(resolved.config)
    for section, name in _CHOSEN:  # an explicit value counts, even if it equals the one that `convert` chooses
        if not resolved.origins[f"{section}.{name}"].startswith(DEFAULT):
            setattr(getattr(made, section), name, getattr(getattr(resolved.config, section), name))
    return made
