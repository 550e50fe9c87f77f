"""Reads values from gin, which only this module imports.

In gin a section is called by the name of its config class, and a scope named after its field
distinguishes it from others of that class: `TrainerConfig.train_steps = 500`,
`validation_data/DataConfig.global_batch_size = 8` (which wins over `DataConfig.global_batch_size`).
The branch of a "oneof" goes by its own class: `AdamConfig.beta_1 = 0.8`. A section that is None by
default (ema) needs its field's name when another section has the same class.

An experiment's factory is called by the experiment's name: `digits.learning_rate = 3e-4`. For
`vision/cifar-10` write `vision/cifar_10.learning_rate`, or with dots, or the last part alone: a
character that gin does not allow in a name becomes `_`, and a part that begins with a digit gets
one in front.

Only names of other code are bound in gin itself, whose state belongs to the process: a second run
of the process may not leave out a name that the first one has bound.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trainer_kit.config.allowed_values import format_value
from trainer_kit.config.discovery import import_user_module
from trainer_kit.config.experiment_registry import experiments, get_experiment
from trainer_kit.config.fields import get_fields, list_sections
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.sources.gin_internals import find_matching_names, list_registered_names
from trainer_kit.config.sources.gin_scan import Binding, GinStatements, scan_gin
from trainer_kit.config.sources.layer import ConfigLayer, insert_value, join_keys
from trainer_kit.errors import ConfigError, Mistake, UsageError, find_similar_names, suggest_names

# The module parts of our selectors.
_SECTIONS = "trainer_kit"
_EXPERIMENTS = "experiment"

# The selectors of the experiment of the last first pass, and the scopes in which each is read.
_scopes_by_selector: dict[str, list[str]] = {}
# The names of other code that this process has bound, as (scope, selector, argument). gin cannot
# unbind a single one.
_bound_external_names: set[tuple[str, str, str]] = set()


@dataclass(frozen=True)
class GinFirstPass:
    """The result of the first reading of gin.

    Attributes:
      config: The experiment's default config, made with the factory arguments that gin binds.
      layer: The values for its sections.
      argument_origins: The place of each bound argument of the factory, by its name in gin.
      mistakes: The mistakes so far. Names that are not known yet are left to the second pass.
      near_misses: Mistakes about unknown names that look like a name of trainer_kit. They are
        reported only together with other mistakes: a module that is imported later may register
        such a name.
    """

    config: ExperimentConfig
    layer: ConfigLayer
    argument_origins: dict[str, str] = field(default_factory=dict)
    mistakes: tuple[Mistake, ...] = ()
    near_misses: tuple[Mistake, ...] = ()


def run_gin_first_pass(files: Sequence[str], bindings: Sequence[str], name: str) -> GinFirstPass:
    """Reads what gin binds for the experiment `name`: its factory's arguments and its sections.

    Unknown names and gin's imports are left to the second pass. Files go before bindings, and the
    last binding of a value wins.

    Args:
      files: The paths of gin files.
      bindings: The values of --gin_params, such as "TrainerConfig.train_steps = 500".
      name: The name of a registered experiment.

    Raises:
      UsageError: When there is no such experiment, or its factory fails without the bindings.
      ConfigError: When the factory passes wrong values to its config. It also contains the mistakes
        of gin that were found before.
    """
    experiments.lookup(name)
    gin = importlib.import_module("gin")
    with gin.unlock_config():
        reader = _BindingReader(gin, scan_gin(gin, files, bindings))
        try:
            config = reader.create_config(name)
        except ConfigError as error:
            raise ConfigError([*reader.mistakes, *error.mistakes]) from error
        layer = reader.read_sections(config)
        reader.add_unread_mistakes()

    return GinFirstPass(
        config=config,
        layer=layer,
        argument_origins=reader.argument_origins,
        # Sections of one class may have the same mistake.
        mistakes=tuple(dict.fromkeys(reader.mistakes)),
        near_misses=tuple(reader.find_near_misses()),
    )


def run_gin_second_pass(files: Sequence[str], bindings: Sequence[str]) -> None:
    """Binds all other names.

    It is called after the task's modules are imported, and before their code runs. Modules that a
    gin file imports are imported here.

    Raises:
      ConfigError: For each name that is still unknown, with its file:line or flag and near names,
        and for bindings that gin itself refuses.
    """
    if not files and not bindings:
        return

    gin = importlib.import_module("gin")
    mistakes: list[Mistake] = []
    with gin.unlock_config():
        for module, origin in scan_gin(gin, files, bindings).imports:
            try:
                import_user_module(module, origin)
            except UsageError as error:
                mistakes.append(Mistake("", str(error)))

        # The text is read again: the imported modules have registered further names.
        statements = scan_gin(gin, files, bindings)
        mistakes += statements.mistakes
        mistakes += _bind_external_names(gin, statements, strict=True)
        if not mistakes:
            try:
                gin.finalize()
            except (ValueError, RuntimeError) as error:
                mistakes.append(Mistake("", f"gin refuses the bindings: {error}", "", "gin"))
    if mistakes:
        raise ConfigError(mistakes)


def get_operative_gin_config() -> str:
    """Returns gin's list of the bindings and defaults that have been used so far.

    It is empty when gin is not in use.
    """
    if "gin" not in sys.modules:
        return ""
    gin = sys.modules["gin"]
    return str(gin.operative_config_str())


def format_gin_selector(name: str) -> str:
    """Returns the complete name of an experiment in gin.

    That of `vision/cifar-10` is experiment.vision.cifar_10.
    """
    selector_parts = [_EXPERIMENTS]
    for part in name.split("/"):
        word = re.sub(r"\W", "_", part)
        if word[0].isdigit():
            word = f"_{word}"
        selector_parts.append(word)
    return ".".join(selector_parts)


class _BindingReader:
    """Reads the values for an experiment from gin statements, and collects the mistakes in them."""

    def __init__(self, gin: ModuleType, statements: GinStatements) -> None:
        self._gin = gin
        self._statements = statements
        # The scopes and selectors of the bindings that something reads.
        self._used_bindings: set[tuple[str, str]] = set()
        self.mistakes = list(statements.mistakes)
        self.argument_origins: dict[str, str] = {}

    def create_config(self, name: str) -> ExperimentConfig:
        """Returns the config of the experiment's factory, called with its bound arguments.

        If the factory fails with them, it is called without.
        """
        selector = format_gin_selector(name)
        _, *modules, _ = selector.split(".")
        scope = "/".join(modules)
        _scopes_by_selector.clear()
        _scopes_by_selector[selector] = [scope]

        # A name that this run does not bind keeps the value of an earlier run.
        previous_names = set(_bound_external_names)
        _bound_external_names.clear()
        self.mistakes += _bind_external_names(self._gin, self._statements, strict=False)
        stale_names = previous_names - _bound_external_names
        for stale_name in sorted(stale_names):
            problem = "an earlier run of this process has bound it, and gin keeps it"
            left_side = "{}/{}.{}".format(*stale_name).lstrip("/")
            advice = "start each run in a new process"
            self.mistakes.append(Mistake(left_side, problem, advice, "gin"))
        _bound_external_names.update(previous_names)

        # Arguments that the factory does not have are mistakes, and are left out.
        values, origins = self._read_values(selector, scope)
        factory = experiments.lookup(name)
        parameters = inspect.signature(factory).parameters
        kinds = [parameter.kind for parameter in parameters.values()]
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        for argument in list(values):
            if argument in parameters or takes_any:
                continue
            problem = "the experiment's factory has no such argument"
            advice = suggest_names(argument, list(parameters))
            origin = origins.pop(argument)
            self.mistakes.append(Mistake(f"{name}.{argument}", problem, advice, origin))
            del values[argument]

        self.argument_origins = {}
        for argument, origin in origins.items():
            self.argument_origins[f"{name}.{argument}"] = origin
        if values:
            try:
                return get_experiment(name, **values)
            except Exception as error:
                arguments = []
                for argument, value in values.items():
                    arguments.append(f"{argument}={format_value(value)}")
                all_arguments = ", ".join(arguments)
                problem = f"the factory fails with {all_arguments}"
                advice = _format_error(error)
                # Several arguments may come from one place.
                places = ", ".join(dict.fromkeys(origins.values()))
                self.mistakes.append(Mistake(name, problem, advice, places))
        return get_experiment(name)

    def read_sections(self, config: ExperimentConfig) -> ConfigLayer:
        """Returns the values that are bound for the sections of `config`."""
        # A section is read in the scope of its own name.
        sections = []
        for path, config_class, is_present in list_sections(config):
            if not get_fields(config_class):
                continue
            selector = f"{_SECTIONS}.{config_class.__name__}"
            scope = path.rpartition(".")[2]
            sections.append((path, selector, scope, is_present))
            _scopes_by_selector.setdefault(selector, []).append(scope)
        uses = Counter(selector for _, selector, _, _ in sections)

        layer = ConfigLayer({}, {})
        for path, selector, scope, is_present in sections:
            is_named = any(
                binding.scope == scope and _find_selector(binding) == selector
                for binding in self._statements.bindings
            )

            # A binding for other sections of this class must not create a section that is None.
            if not is_present and uses[selector] > 1 and not is_named:
                continue

            values, origins = self._read_values(selector, scope)
            for argument, value in values.items():
                value_path = join_keys(path, argument)
                origin = origins[argument]
                if problem := insert_value(layer.values, value_path, value):
                    self.mistakes.append(Mistake(value_path, problem, "keep one", origin))
                layer.origins[value_path] = origin
        return layer

    def add_unread_mistakes(self) -> None:
        """Adds a mistake for each binding of a section that no section has read.

        The scope of such a binding is wrong.
        """
        for binding in self._statements.bindings:
            selector = _find_selector(binding)
            if not selector or (binding.scope, selector) in self._used_bindings:
                continue

            all_scopes = dict.fromkeys(_scopes_by_selector[selector])
            scopes = [scope for scope in all_scopes if scope]
            if binding.scope:
                place = f"in the scope {binding.scope}"
                advice = "write it without a scope"
                if scopes:
                    advice = suggest_names(binding.scope, scopes)
            else:
                place = "without a scope: several have this class"
                examples = [f"{scope}/{binding.name}" for scope in scopes]
                all_examples = ", ".join(examples)
                advice = f"name one: {all_examples}"
            problem = f"no section reads {binding.selector} {place}"
            self.mistakes.append(Mistake(binding.name, problem, advice, binding.origin))

    def find_near_misses(self) -> list[Mistake]:
        """Returns a mistake for each binding of an unknown name that looks like one of ours.

        A module that is imported later may register such a name.
        """
        class_names = [selector.rpartition(".")[2] for selector in _scopes_by_selector]
        mistakes = []
        for binding in self._statements.bindings:
            # A macro has no argument.
            name = binding.selector.rpartition(".")[2]
            similar_names = find_similar_names(name, class_names)
            if not similar_names or not binding.argument:
                continue
            is_known = _find_selector(binding) or find_matching_names(self._gin, binding.selector)
            if not is_known:
                problem = f"nothing called {binding.selector} is registered"
                suggestion = " or ".join(similar_names)
                advice = f"did you mean {suggestion}?"
                mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
        return mistakes

    def _read_values(self, selector: str, scope: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the values, and their origins, that are bound for one of our selectors."""
        # A binding counts in its scope and in the scopes inside it, and without a scope everywhere.
        bindings = []
        for binding in self._statements.bindings:
            prefix = f"{binding.scope}/".lstrip("/")
            is_in_scope = f"{scope}/".startswith(prefix)
            if _find_selector(binding) == selector and is_in_scope:
                bindings.append(binding)
                self._used_bindings.add((binding.scope, selector))

        # The longest scope wins, and of equal ones the last binding. The sort is stable.
        bindings.sort(key=lambda binding: len(binding.scope))
        last_bindings = {binding.argument: binding for binding in bindings}

        values: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for argument, binding in last_bindings.items():
            if binding.unknown_names:
                problem = f"refers to @{binding.unknown_names[0]}, which is not registered yet"
                advice = "give a plain value, or import its module first"
                self.mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
                continue

            # gin evaluates a reference when it is copied.
            scopes = scope.split("/") if scope else None
            try:
                with self._gin.config_scope(scopes):
                    values[argument] = copy.deepcopy(binding.value)
                origins[argument] = binding.origin
            except Exception as error:
                problem = "gin cannot make the value"
                advice = _format_error(error)
                # These are gin's words for a macro without a value.
                if "macro() missing" in advice:
                    problem = "the value uses a macro that is not defined"
                    advice = "define each %name in it: name = ..."
                self.mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
        return values, origins


def _find_selector(binding: Binding) -> str:
    """Returns the complete selector of the present experiment that a binding is for, or ""."""
    if not binding.argument:
        return ""
    # A binding may name the last parts of a selector only.
    suffix = f".{binding.selector}"
    for selector in _scopes_by_selector:
        if f".{selector}".endswith(suffix):
            return selector
    return ""


def _bind_external_names(gin: ModuleType, statements: GinStatements, strict: bool) -> list[Mistake]:
    """Binds macros and names that other code has registered, and returns the mistakes.

    Unknown names are mistakes only if `strict`.
    """
    mistakes = []
    for binding in statements.bindings:
        if not binding.argument:
            gin.bind_parameter((binding.name, "gin.macro", "value"), binding.value)
            continue
        if _find_selector(binding):
            continue

        matches = find_matching_names(gin, binding.selector)
        unknown_names = list(binding.unknown_names)
        if not matches:
            unknown_names.insert(0, binding.selector)
        if unknown_names:
            reported_names = unknown_names if strict else []
            for name in reported_names:
                all_selectors = (*list_registered_names(gin), *_scopes_by_selector)
                short_names = [selector.rpartition(".")[2] for selector in all_selectors]
                problem = f"nothing called {name} is registered"
                advice = suggest_names(name.rpartition(".")[2], short_names)
                mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
            continue

        # gin raises KeyError or ValueError for an argument that does not exist, and for an
        # ambiguous name.
        left_side = (binding.scope, binding.selector, binding.argument)
        try:
            gin.bind_parameter(left_side, binding.value)
            _bound_external_names.add((binding.scope, matches[0], binding.argument))
        except (KeyError, ValueError) as error:
            problem = "gin refuses the binding"
            advice = _format_error(error)
            mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
    return mistakes


def _format_error(error: Exception) -> str:
    error_name = type(error).__name__
    words = str(error).split()
    message = " ".join(words)
    return f"{error_name}: {message}"
