"""Binds values in gin and removes trainer_kit's bindings again. gin_source.py passes the gin module in.

gin's state belongs to the process, and gin can only clear all bindings, those of other code too. So this module keeps
a list of its own bindings, and binds all others again.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer_kit.config.schema.section import Section
from trainer_kit.config.sources import gin_internals
from trainer_kit.config.sources.gin_scan import Binding, Scan
from trainer_kit.errors import Mistake, UsageError, near_names, suggestion

SECTIONS, _EXPERIMENTS = "trainer_kit", "experiment"  # the module parts of our selectors in gin
_MACRO = "gin.macro"
_HEADING = re.compile(r"^# Parameters for (\S+):$", re.MULTILINE)  # in gin's config_str
_STATEMENT = re.compile(r"^([\w./]+) = ", re.MULTILINE)
_IMPORT = re.compile(r"^(?:import|from) .+$", re.MULTILINE)
_LOG = logging.getLogger(__name__)


@dataclass
class _State:
    """trainer_kit's configurables and bindings in this process, by gin's complete selectors."""

    collectors: dict[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    current: dict[str, list[str]] = field(default_factory=dict)  # of the present experiment: the scopes it is read in
    bound: list[tuple[tuple[str, str], str]] = field(default_factory=list)  # ((scope, selector), argument)


_state = _State()


def section_selector(config_class: type[Section]) -> str:
    """Returns gin's complete name of a section."""
    return f"{SECTIONS}.{config_class.__name__}"


def experiment_selector(name: str) -> str:
    """Returns gin's complete name of an experiment: `vision/cifar-10` is experiment.vision.cifar_10."""
    words = [re.sub(r"\W", "_", part) for part in name.split("/")]
    return ".".join([_EXPERIMENTS, *(f"_{word}" if word[0].isdigit() else word for word in words)])


def forget(gin: Any) -> None:
    """Removes all bindings of this module. Before the first run of a process it does nothing.

    gin's record of used values and its singletons are cleared too. Bindings and imports of other code stay; a warning
    names an import that now fails.

    Raises:
      UsageError: when gin lists a binding of other code that cannot be found; gin then keeps all bindings.
    """
    if _state.collectors:
        listed = gin.config_str()
        others, imports = _bound_by_others(gin, listed), _IMPORT.findall(listed)
        with gin.unlock_config():
            gin.clear_config()
            for (scope, selector), argument, value in others:
                gin.bind_parameter((scope, selector, argument), value)
            _import_again(gin, imports)
    _state.bound.clear()
    _state.current.clear()


def _bound_by_others(gin: Any, listed: str) -> list[tuple[tuple[str, str], str, Any]]:
    """Returns the bindings that this module did not make, each as ((scope, complete selector), argument, value).

    Args:
      gin: The gin module.
      listed: The text of `gin.config_str()`. It leaves out values that gin cannot write, such as objects, but has a
        heading for each selector and scope with bindings, and a line for each macro.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    unread = []
    for name in dict.fromkeys([*_HEADING.findall(listed), *_STATEMENT.findall(listed)]):
        if macro := _bound_in(gin, name, _MACRO):
            found[name, _MACRO] = macro
        scope, _, selector = name.rpartition("/")
        known = gin_internals.matching(gin, selector) or gin_internals.matching(gin, selector.rpartition(".")[0])
        if len(known) == 1:
            found[scope, known[0]] = _bound_in(gin, scope, known[0])
        elif not macro:
            unread.append(name)
    if unread:
        raise UsageError(f"gin cannot list the bindings of this process ({unread[0]}); start each run in a new process")
    return [
        (key, argument, value)
        for key, arguments in found.items()
        for argument, value in arguments.items()
        if (key, argument) not in _state.bound
    ]


def _bound_in(gin: Any, scope: str, selector: str) -> dict[str, Any]:
    """Returns the values that are bound in just this scope, by their arguments; references are not followed."""
    with gin.config_scope(scope.split("/") if scope else None):  # a list is the whole scope, a text goes inside another
        return dict(gin.get_bindings(selector, resolve_references=False, inherit_scopes=False))


def _import_again(gin: Any, statements: list[str]) -> None:
    """Repeats the imports of other code that gin's config_str lists; a warning names each that fails."""
    dynamic = [statement for statement in statements if statement.startswith("from __gin__ ")]  # how to read others
    for statement in statements:
        try:
            gin.parse_config(list(dict.fromkeys([*dynamic, statement])))
        except Exception as error:
            _LOG.warning("gin could not repeat `%s` and no longer knows this import: %s", statement, error)


def collect(gin: Any, selector: str, scope: str) -> None:
    """Registers `selector` as a configurable that returns its bound keywords, and notes that it is read in `scope`."""
    if selector not in _state.collectors:

        def bound(**keywords: Any) -> dict[str, Any]:
            return keywords

        module, _, name = selector.rpartition(".")
        _state.collectors[selector] = gin.external_configurable(bound, name=name, module=module)
    known = _state.current.setdefault(selector, [])
    if scope not in known:
        known.append(scope)


def call(selector: str) -> dict[str, Any]:
    """Returns the keywords that are bound for one of our selectors in gin's present scope."""
    return _state.collectors[selector]()


def scopes(selector: str) -> list[str]:
    """Returns the scopes in which one of our selectors is read."""
    return _state.current[selector]


def ours(binding: Binding) -> str:
    """Returns the complete selector of the current experiment that a binding is for; "" if there is none."""
    if not binding.argument:
        return ""
    return next((known for known in _state.current if f".{known}".endswith(f".{binding.selector}")), "")


def bind_ours(gin: Any, found: Scan, beginning: str) -> list[Mistake]:
    """Binds values of our selectors that start with `beginning`; returns mistakes for those with unknown references."""
    mistakes = []
    macros = [binding.name for binding in found.bindings if not binding.argument]
    for binding in found.bindings:
        selector = ours(binding)
        if not selector.startswith(beginning):
            continue
        problems = [
            (f"refers to @{name}, which is not registered yet", "give a plain value, or import its module first")
            for name in binding.unknown
        ]
        undefined = [macro for macro in binding.macros if not _is_defined(gin, macro)]
        problems += [
            (f"%{macro} is not defined", suggestion(macro, macros) if macros else f"define it: {macro} = ...")
            for macro in undefined
        ]
        mistakes += [Mistake(binding.name, problem, advice, binding.origin) for problem, advice in problems]
        if not problems:
            _bind(gin, binding, selector)
    return mistakes


def bind_others(gin: Any, found: Scan, strict: bool) -> list[Mistake]:
    """Binds macros and names that other code has registered; returns mistakes, unknown names only if `strict`."""
    mistakes = []
    for binding in found.bindings:
        if not binding.argument:
            _bind(gin, binding, _MACRO)
        elif not ours(binding):
            mistakes += _bind_other(gin, binding, strict)
    return mistakes


def near_misses(gin: Any, found: Scan) -> list[Mistake]:
    """Returns the bindings of unknown names that look like one of ours. A module imported later may register them."""
    known = [selector.rpartition(".")[2] for selector in _state.current]
    mistakes = []
    for binding in found.bindings:
        near = near_names(binding.selector.rpartition(".")[2], known)
        if near and binding.argument and not ours(binding) and not gin_internals.matching(gin, binding.selector):
            problem, advice = f"nothing called {binding.selector} is registered", f"did you mean {' or '.join(near)}?"
            mistakes.append(Mistake(binding.name, problem, advice, binding.origin))
    return mistakes


def _bind_other(gin: Any, binding: Binding, strict: bool) -> list[Mistake]:
    matching = [known for known in gin_internals.matching(gin, binding.selector) if known not in _state.collectors]
    if len(matching) > 1:
        problem = f"{binding.selector} can be any of {', '.join(sorted(matching))}"
        return [Mistake(binding.name, problem, "write the whole name", binding.origin)]
    if not matching or binding.unknown:
        missing = (*([] if matching else [binding.selector]), *binding.unknown) if strict else ()
        return [
            Mistake(binding.name, f"nothing called {name} is registered", _nearest(gin, name), binding.origin)
            for name in missing
        ]
    try:
        _bind(gin, binding, matching[0])
    except ValueError:
        known = list(inspect.signature(gin.get_configurable(matching[0])).parameters)
        problem = f"{binding.selector} has no argument {binding.argument} that can be bound"
        return [Mistake(binding.name, problem, suggestion(binding.argument, known), binding.origin)]
    return []


def _bind(gin: Any, binding: Binding, selector: str) -> None:
    (scope, selector), argument = _key(binding, selector)
    gin.bind_parameter((scope, selector, argument), binding.value)
    _state.bound.append(((scope, selector), argument))


def _key(binding: Binding, selector: str) -> tuple[tuple[str, str], str]:
    """Returns ((scope, complete selector), argument); a macro is gin.macro in a scope of its own name."""
    if binding.argument:
        return (binding.scope, selector), binding.argument
    return (binding.name, selector), "value"


def _is_defined(gin: Any, macro: str) -> bool:
    try:
        gin.query_parameter(f"{macro}/{_MACRO}.value")
    except ValueError:
        return False
    return True


def _nearest(gin: Any, name: str) -> str:
    others = [known for known in gin_internals.all_registered(gin) if known not in _state.collectors]
    known = [known.rpartition(".")[2] for known in (*others, *_state.current) if not known.startswith("gin.")]
    return suggestion(name.rpartition(".")[2], known)
