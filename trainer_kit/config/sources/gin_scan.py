"""Reads gin text into statements with their places.

Nothing is bound and nothing imported here. gin's own reader stops at the first mistake and keeps no
lines. This one uses gin's grammar, and keeps all mistakes and all lines. The gin module is passed
in: only gin_source.py imports it.
"""

from __future__ import annotations

import os
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trainer_kit.config.sources.config_files import read_text
from trainer_kit.errors import ConfigError, Mistake

PARAMS_FLAG = "--gin_params"
_ADVICE = "write values as in Python: words in quotes, True, False, None, numbers, lists"


@dataclass(frozen=True)
class Binding:
    """One `scope/selector.argument = value`. A macro, `name = value`, has no argument.

    Attributes:
      scope, selector, argument: The parts of the left side, as written.
      value: The value as gin reads it. References and macros in it are not followed.
      origin: "conf.gin:3" or "--gin_params".
      unknown_names: Names in the value under which nothing is registered.
    """

    scope: str
    selector: str
    argument: str
    value: Any
    origin: str
    unknown_names: tuple[str, ...]

    @property
    def name(self) -> str:
        """The left side, as written."""
        parameter = ".".join(filter(None, [self.selector, self.argument]))
        return "/".join(filter(None, [self.scope, parameter]))


@dataclass
class GinStatements:
    """The statements of all gin sources, in order.

    Attributes:
      bindings: The bindings and macros.
      imports: The module and the origin of each import.
      mistakes: The mistakes in the text.
    """

    bindings: list[Binding] = field(default_factory=list)
    imports: list[tuple[str, str]] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


def scan_gin(gin: ModuleType, files: Sequence[str], bindings: Sequence[str]) -> GinStatements:
    """Returns the statements of gin files, with the files that they include, and of binding texts.

    Args:
      gin: The gin module.
      files: The paths of gin files. Their statements come first.
      bindings: Texts such as "TrainerConfig.train_steps = 500".
    """
    statements = GinStatements()
    for path in files:
        _scan_file(gin, path, statements, ())
    for text in bindings:
        _scan_text(gin, text, "", statements, ())
    return statements


def _scan_file(
    gin: ModuleType, path: str, statements: GinStatements, including_files: tuple[str, ...]
) -> None:
    absolute_path = os.path.abspath(path)
    if absolute_path in including_files:
        advice = "remove one of the include lines"
        statements.mistakes.append(Mistake("", "includes itself", advice, path))
        return

    try:
        text = read_text(path)
    except ConfigError as error:
        statements.mistakes += error.mistakes
        return
    _scan_text(gin, text, path, statements, (*including_files, absolute_path))


def _scan_text(
    gin: ModuleType,
    text: str,
    path: str,
    statements: GinStatements,
    including_files: tuple[str, ...],
) -> None:
    """Adds the statements of a text. `path` is that of its file, or "" for a binding text."""
    try:
        delegate = gin.config.ParserDelegate(skip_unknown=True)
        for statement in gin.config_parser.ConfigParser(text, delegate):
            _add_statement(gin, statement, path, statements, including_files)
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        line, problem = _locate_error(error)
        if not path:
            place = PARAMS_FLAG
            problem = f"{text.strip()!r} is not gin: {problem}"
        else:
            place = path if line is None else f"{path}:{line}"
            problem = f"is not gin: {problem}"
        statements.mistakes.append(Mistake("", problem, _ADVICE, place))


def _add_statement(
    gin: ModuleType,
    statement: Any,
    path: str,
    statements: GinStatements,
    including_files: tuple[str, ...],
) -> None:
    parser = gin.config_parser
    origin = f"{path}:{statement.location.line_num}" if path else PARAMS_FLAG
    if isinstance(statement, parser.BindingStatement):
        binding = Binding(
            scope=statement.scope,
            selector=statement.selector,
            argument=statement.arg_name,
            value=statement.value,
            origin=origin,
            unknown_names=_find_unknown_names(gin, statement.value),
        )
        statements.bindings.append(binding)
    elif isinstance(statement, parser.ImportStatement):
        if statement.module.startswith("__gin__."):
            problem = f"{statement.module} is not supported"
            advice = "register with @gin.configurable instead"
            statements.mistakes.append(Mistake("", problem, advice, origin))
        else:
            statements.imports.append((statement.module, origin))
    elif isinstance(statement, parser.IncludeStatement):
        # A file beside the including one comes before one in the working directory.
        included_path = os.path.join(os.path.dirname(path), statement.filename)
        if not os.path.exists(included_path):
            included_path = statement.filename
        _scan_file(gin, included_path, statements, including_files)


def _find_unknown_names(gin: ModuleType, value: object) -> tuple[str, ...]:
    """Returns the names that a value refers to, and under which nothing is registered."""
    unknown_names = []

    # The list grows while the loop runs: it gets the items of each dict, list and tuple.
    pending: list[Any] = [value]
    for item in pending:
        if isinstance(item, dict):
            pending += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            pending += item
        elif type(item).__module__ == "gin.config" and not isinstance(
            item, gin.config.ConfigurableReference
        ):
            unknown_names.append(item.selector)
    return tuple(unknown_names)


def _locate_error(error: Exception) -> tuple[int | None, str]:
    """Returns the line of a mistake, or None if it is not known, and what is wrong."""
    if isinstance(error, SyntaxError):
        message = str(error.msg)
        unread = re.search(r"Failed to parse token '(.*)'", message, re.DOTALL)
        words = message.split()
        problem = " ".join(words)
        if unread:
            problem = f"{unread[1]} is not a value"
        return error.lineno, problem
    if isinstance(error, tokenize.TokenError):
        return error.args[1][0], str(error.args[0])
    return None, " ".join(str(error).split())
