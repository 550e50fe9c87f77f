"""Reads values from gin, which only this module imports.

In gin a section is called by the name of its config class, and a scope named after its field distinguishes it from
others of that class: `TrainerConfig.train_steps = 500`, `validation_data/DataConfig.global_batch_size = 8` (which wins
over `DataConfig.global_batch_size`). The branch of a "oneof" goes by its own class: `AdamConfig.beta_1 = 0.8`. A
section that is None by default (ema) needs its field's name when another section has the same class.

An experiment's factory is called by the experiment's name: `digits.learning_rate = 3e-4`. For `vision/cifar-10` write
`vision/cifar_10.learning_rate`, or with dots, or the last part alone: a character that gin does not allow in a name
becomes `_`, and a part that begins with a digit gets one in front.

gin's state belongs to the process. A first pass removes the bindings of the one before; bindings of other code stay.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from trainer_kit.config.allowed_values import show
from trainer_kit.config.discovery import exits

from trainer_kit.config.experiments import experiments, get_experiment, make_config
from trainer_kit.config.fields import fields_of, sections
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources import gin_binding
from trainer_kit.config.sources.gin_scan import Scan, scan
from trainer_kit.config.sources.layer import Layer, join
from trainer_kit.errors import ConfigError, Mistake, suggestion

@dataclass(frozen=True)
class FirstPass:
    """The result of the first reading of gin.

    Attributes:
      config: The experiment's default config, made with the factory arguments that gin binds.
      layer: The values for its sections.
      arguments: The bound factory arguments and the place of each.
      mistakes: The mistakes so far; names that are not known yet are left to the second pass.
      near_misses: Mistakes about unknown names that look like a name of trainer_kit. They are reported only together
        with other mistakes: a module that is imported later may register such a name.
    """

    config: ExperimentConfig
    layer: Layer
    arguments: dict[str, str]
    mistakes: tuple[Mistake, ...]
    near_misses: tuple[Mistake, ...] = ()

def gin_first_pass(files: Sequence[str], bindings: Sequence[str], name: str) -> FirstPass:
    """Reads what gin binds for the experiment `name`: its factory's arguments and its sections; skips unknown names.

    gin's imports are left to the second pass. Files go before bindings; the last binding of a value wins.

    Args:
      files: The paths of gin files.
      bindings: The values of --gin_params, such as "TrainerConfig.train_steps = 500".
      name: The name of a registered experiment.

    Raises:
      UsageError: when there is no such experiment, or its factory fails without the bindings.
      ConfigError: when the factory passes wrong values to its config; it also has the mistakes of gin found before.
    """
    experiments.lookup(name)
    gin = importlib.import_module("gin")
    with gin.unlock_config():
        gin_binding.forget(gin)
        reading = _Reading(gin, scan(gin, files, bindings))
        try:
            config = reading.make_config(name)
        except ConfigError as error:
            raise ConfigError([*reading.mistakes, *error.mistakes]) from error
        layer = reading.read_sections(config)
        reading.note_unread()
        near = gin_binding.near_misses(gin, reading.found)
    return FirstPass(config, layer, reading.arguments, tuple(reading.mistakes), tuple(near))

def gin_second_pass(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Binds all other names. Called after the task's modules are imported, before their code runs.

    Modules that a gin file imports are imported here.

    Raises:
      ConfigError: for each name that is still unknown, with its file:line or flag and near names; for bindings that
        gin itself refuses.
    """
    if not files and not bindings:
        return
    gin = importlib.import_module("gin")
    mistakes: list[Mistake] = []
    with gin.unlock_config():
        for module, origin in scan(gin, files, bindings).imports:
            try:
                importlib.import_module(module)
            except ImportError as error:
                mistakes.append(Mistake("", f"{module} cannot be imported: {error}", "correct or install it", origin))
            except SystemExit as error:
                mistakes.append(Mistake("", exits(module, error), origin=origin))
        found = scan(gin, files, bindings)
        mistakes += [*found.mistakes, *gin_binding.bind_others(gin, found, strict=True)]
        if not mistakes:
            try:
                gin.finalize()
            except (ValueError, RuntimeError) as error:
                mistakes.append(Mistake("", f"gin refuses the bindings: {error}", "", "gin"))
    if mistakes:
        raise ConfigError(mistakes)

def operative_gin() -> str:
    """Returns gin's list of the bindings and defaults that have been used so far; "" when gin is not in use."""
    return str(sys.modules["gin"].operative_config_str()) if "gin" in sys.modules else ""

class _Reading:
    """Reads the bindings for trainer_kit from gin files, and collects those that were used and the mistakes in them."""

    def __init__(self, gin: Any, found: Scan) -> None:
        self._gin, self.found = gin, found
        self._read: set[tuple[str, str, str]] = set()  # scope, selector, argument
        self.mistakes = list(found.mistakes)
        self.arguments: dict[str, str] = {}

    def make_config(self, name: str) -> ExperimentConfig:
        """Returns the config of the experiment's factory with its bound arguments; without them if it fails."""
        selector = gin_binding.experiment_selector(name)
        scope = "/".join(selector.split(".")[1:-1])
        gin_binding.collect(self._gin, selector, scope)
        self.mistakes += gin_binding.bind_others(self._gin, self.found, strict=False)
        self.mistakes += gin_binding.bind_ours(self._gin, self.found, selector)
        bound, origins = self._bound(selector, scope, name)
        for argument, advice in _unknown_arguments(experiments.lookup(name), bound):
            problem = "the experiment's factory has no such argument"
            self.mistakes.append(Mistake(f"{name}.{argument}", problem, advice, origins.pop(argument)))
            del bound[argument]
        self.arguments = {f"{name}.{argument}": origin for argument, origin in origins.items()}
        if bound:
            try:
                return get_experiment(name, **bound)
            except Exception as error:
                given = ", ".join(f"{argument}={show(value)}" for argument, value in bound.items())
                self._note_failure(name, f"the factory fails with {given}", error, origins)
        return make_config(name)

    def read_sections(self, config: ExperimentConfig) -> Layer:
        """Returns the values that are bound for the sections of `config`."""
        parts = [part for part in sections(config) if fields_of(part[1])]
        for path, config_class, _ in parts:
            gin_binding.collect(self._gin, gin_binding.section_selector(config_class), path.rpartition(".")[2])
        self.mistakes += gin_binding.bind_ours(self._gin, self.found, f"{gin_binding.SECTIONS}.")
        uses = Counter(config_class for _, config_class, _ in parts)
        layer = Layer({}, {})
        for path, config_class, is_there in parts:
            selector, scope = gin_binding.section_selector(config_class), path.rpartition(".")[2]
            shared = not is_there and uses[config_class] > 1
            if shared and not any(b.scope == scope and gin_binding.ours(b) == selector for b in self.found.bindings):
                continue  # a binding for others of this class must not bring this one into being
            bound, origins = self._bound(selector, scope, path)
            if bound:
                _section_in(layer.values, path).update(bound)
                layer.origins.update({join(path, argument): origin for argument, origin in origins.items()})
        return layer

    def note_unread(self) -> None:
        """Notes a mistake for each binding of a section that no section has read: its scope is wrong."""
        for binding in self.found.bindings:
            selector = gin_binding.ours(binding)
            refused = any((wrong.path, wrong.origin) == (binding.name, binding.origin) for wrong in self.mistakes)
            if not selector or refused or (binding.scope, selector, binding.argument) in self._read:
                continue
            scopes = [scope for scope in gin_binding.scopes(selector) if scope]
            if binding.scope:
                problem = f"no section reads {binding.selector} in the scope {binding.scope}"
                advice = suggestion(binding.scope, scopes) if scopes else "write it without a scope"
            else:
                problem = "several sections have this class, and none of them is set"
                advice = f"name one: {', '.join(f'{scope}/{binding.name}' for scope in scopes)}"
            self.mistakes.append(Mistake(binding.name, problem, advice, binding.origin))

    def _bound(self, selector: str, scope: str, path: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the keywords bound for `selector` in `scope`, and where each was written."""
        with self._gin.config_scope(scope.split("/") if scope else None):
            if not self._gin.get_bindings(selector, resolve_references=False):
                return {}, {}
            origins = self._note_read(selector, scope)
            try:
                return gin_binding.call(selector), origins
            except Exception as error:
                self._note_failure(path, "gin cannot make the values", error, origins)
        return {}, {}

    def _note_read(self, selector: str, scope: str) -> dict[str, str]:
        read = [b for b in self.found.bindings if gin_binding.ours(b) == selector and _holds(b.scope, scope)]
        self._read |= {(binding.scope, selector, binding.argument) for binding in read}
        return {b.argument: b.origin for b in sorted(read, key=lambda b: len(b.scope))}  # the longest scope wins

    def _note_failure(self, path: str, problem: str, error: Exception, origins: dict[str, str]) -> None:
        lines = [f"{join(*e['loc'])}: {e['msg']}" for e in error.errors()] if isinstance(error, ValidationError) else []
        reason = "; ".join(lines) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        self.mistakes.append(Mistake(path, problem, reason, ", ".join(dict.fromkeys(origins.values()))))

def _holds(scope: str, inner: str) -> bool:
    return not scope or f"{inner}/".startswith(f"{scope}/")

def _unknown_arguments(factory: Callable[..., Any], bound: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the bound arguments that `factory` does not have, each with advice."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    known = list(parameters)
    return [(argument, suggestion(argument, known)) for argument in bound if argument not in parameters]

def _section_in(values: dict[str, Any], path: str) -> dict[str, Any]:
    """Returns the dict at the dotted `path` in nested dicts, making it where it is missing."""
    for part in filter(None, path.split(".")):
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    return values
