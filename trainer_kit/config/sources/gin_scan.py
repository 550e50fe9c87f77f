"""Reads gin text into statements with their places. Nothing is bound and nothing imported here.

gin's own reader stops at the first mistake and keeps no lines; this one uses gin's grammar and
keeps both. The gin module is passed in: only gin_source.py imports it.
"""

from __future__ import annotations

import os
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_kit.config.sources.config_files import read_text
from trainer_kit.errors import ConfigError, Mistake

PARAMS_FLAG = "--gin_params"
_ADVICE = "write values as in Python: words in quotes, True, False, None, numbers, lists"


@dataclass(frozen=True)
class Binding:
    """One `scope/selector.argument = value`; a macro, `name = value`, has no argument.

    Attributes:
      scope, selector, argument: The parts of the left side, as written.
      value: The value as gin reads it; references and macros in it are not followed.
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
        return "/".join(
            filter(None, [self.scope, ".".join(filter(None, [self.selector, self.argument]))])
        )


@dataclass
class GinStatements:
    """The statements of all gin sources, in order. `imports` are (module, origin)."""

    bindings: list[Binding] = field(default_factory=list)
    imports: list[tuple[str, str]] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)


def scan_gin(gin: Any, files: Sequence[str], bindings: Sequence[str]) -> GinStatements:
    """Returns the statements of gin files, of the files that they include, and then of binding texts."""
    found = GinStatements()
    for path in files:
        _scan_file(gin, path, found, ())
    for text in bindings:
        _scan_text(gin, text, "", found, ())
    return found


def _scan_file(
    gin: Any, path: str, statements: GinStatements, including_files: tuple[str, ...]
) -> None:
    if os.path.abspath(path) in including_files:
        statements.mistakes.append(
            Mistake("", "includes itself", "remove one of the include lines", path)
        )
        return
    try:
        text = read_text(path)
    except ConfigError as error:
        statements.mistakes += error.mistakes
        return
    _scan_text(gin, text, path, statements, (*including_files, os.path.abspath(path)))


def _scan_text(
    gin: Any, text: str, path: str, statements: GinStatements, including_files: tuple[str, ...]
) -> None:
    try:
        for statement in gin.config_parser.ConfigParser(
            text, gin.config.ParserDelegate(skip_unknown=True)
        ):
            _add_statement(gin, statement, path, statements, including_files)
    except (SyntaxError, tokenize.TokenError, ValueError) as error:
        line, problem = _locate_error(error)
        place = PARAMS_FLAG if not path else path if line is None else f"{path}:{line}"
        problem = f"is not gin: {problem}" if path else f"{text.strip()!r} is not gin: {problem}"
        statements.mistakes.append(Mistake("", problem, _ADVICE, place))


def _add_statement(
    gin: Any, statement: Any, path: str, statements: GinStatements, including_files: tuple[str, ...]
) -> None:
    parser = gin.config_parser
    origin = f"{path}:{statement.location.line_num}" if path else PARAMS_FLAG
    if isinstance(statement, parser.BindingStatement):
        names = statement.scope, statement.selector, statement.arg_name
        statements.bindings.append(
            Binding(*names, statement.value, origin, _find_unknown_names(gin, statement.value))
        )
    elif isinstance(statement, parser.ImportStatement):
        if statement.module.startswith("__gin__."):
            problem = f"{statement.module} is not supported"
            statements.mistakes.append(
                Mistake("", problem, "register with @gin.configurable instead", origin)
            )
        else:
            statements.imports.append((statement.module, origin))
    elif isinstance(statement, parser.IncludeStatement):
        beside = os.path.join(os.path.dirname(path), statement.filename)
        _scan_file(
            gin,
            beside if os.path.exists(beside) else statement.filename,
            statements,
            including_files,
        )


def _find_unknown_names(gin: Any, value: Any) -> tuple[str, ...]:
    """Returns the names that a value refers to, and that nothing is registered under."""
    unknown, inside = [], [value]
    for item in inside:
        if isinstance(item, dict):
            inside += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            inside += item
        elif type(item).__module__ == "gin.config" and not isinstance(
            item, gin.config.ConfigurableReference
        ):
            unknown.append(item.selector)
    return tuple(unknown)


def _locate_error(error: Exception) -> tuple[int | None, str]:
    """Returns the line of a mistake, and what is wrong."""
    if isinstance(error, SyntaxError):
        unread = re.search(r"Failed to parse token '(.*)'", str(error.msg), re.DOTALL)
        problem = f"{unread[1]} is not a value" if unread else " ".join(str(error.msg).split())
        return error.lineno, problem
    if isinstance(error, tokenize.TokenError):
        return error.args[1][0], str(error.args[0])
    return None, " ".join(str(error).split())
