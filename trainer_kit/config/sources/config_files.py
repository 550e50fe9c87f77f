"""Reads config files and --params_override into layers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.layer import ConfigLayer, insert_value
from trainer_kit.errors import ConfigError, Mistake, suggest_paths
from trainer_kit.files import is_remote

if TYPE_CHECKING:
    from pydantic import JsonValue

OVERRIDE_FLAG = "--params_override"
_SUFFIXES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"\s*([\w.\-]+)\s*=")
_PAIRS = {"[": "]", "{": "}", "(": ")"}


def read_config_file(path: str | os.PathLike[str]) -> ConfigLayer:
    """Reads a YAML or JSON file whose keys are sections and fields: `trainer: {train_steps: 5}`.

    Args:
      path: A local file.

    Raises:
      ConfigError: When the file is missing (with the near names in its folder) or unreadable, when
        the text is broken or has a key twice (all of them, as file:line:column), or when its top
        level is not a mapping.
    """
    name = os.fspath(path)
    text = read_text(name)
    parsed = yaml_loader.parse(text, name)
    values = _check_mapping(parsed.values, f"{name}:1:1")
    origins = {}
    for value_path, line in parsed.lines.items():
        origins[value_path] = f"{name}:{line}"
    return ConfigLayer(values, origins)


def read_params_override(text: str) -> ConfigLayer:
    """Reads the value of --params_override in any of its three spellings.

    - `a.b=c,d=[1,2]`, with dotted keys. A value is a bare word, a quoted text, a list or a mapping.
      A comma inside brackets or quotes belongs to the value.
    - YAML or JSON text with nested keys.
    - The path of a file with a name that ends in .yaml, .yml or .json.

    Nothing is evaluated.

    Raises:
      ConfigError: When the text is none of them, is broken, or is too long.
    """
    yaml_loader.check_length(text, OVERRIDE_FLAG)
    stripped = text.strip()
    if not stripped:
        return ConfigLayer()

    # `a.b=data.yaml` is an assignment, unless a file has this name.
    is_assignment = _ASSIGNMENT.match(text) is not None
    is_one_line = "\n" not in stripped
    if is_one_line and stripped.endswith(_SUFFIXES) and not stripped.startswith("{"):
        if os.path.exists(stripped) or not is_assignment:
            return read_config_file(stripped)

    if is_assignment:
        return _read_assignments(text)

    parsed = yaml_loader.parse(text, OVERRIDE_FLAG)
    values = _check_mapping(parsed.values, OVERRIDE_FLAG)
    origins = dict.fromkeys(parsed.lines, OVERRIDE_FLAG)
    return ConfigLayer(values, origins)


def read_text(name: str) -> str:
    """Returns the text of the local file `name`.

    Raises:
      ConfigError: When the file does not exist (with near names), is a folder, cannot be read, is
        not UTF-8, or is too long.
    """
    if is_remote(name):
        raise ConfigError([Mistake("", "is not a local file", "copy it here first", name)])

    # A file may have no end, so no more is read than shows that it is too long.
    try:
        with open(name, encoding="utf-8") as stream:
            text = stream.read(yaml_loader.MAX_CHARACTERS + 1)
    except FileNotFoundError:
        path = Path(name)
        suffixes = (path.suffix, *_SUFFIXES, ".gin")
        files = path.parent.glob("[!.]*")
        file_names = [file.name for file in files if file.suffix in suffixes]
        advice = suggest_paths(path, file_names, "config files")
        raise ConfigError([Mistake("", "there is no such file", advice, name)]) from None
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        raise ConfigError([Mistake("", problem, "", name)]) from None
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (byte {error.start})"
        raise ConfigError([Mistake("", problem, "save it as UTF-8", name)]) from None
    yaml_loader.check_length(text, name)
    return text


def _check_mapping(values: JsonValue, origin: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        problem = f"{values!r} is not a setting"
        if isinstance(values, list):
            problem = "is a list, not settings"
        advice = (
            "write a.b=c, nested keys such as {trainer: {train_steps: 5}},"
            " or the path of a YAML or JSON file"
        )
        raise ConfigError([Mistake("", problem, advice, origin)])
    return values


def _read_assignments(text: str) -> ConfigLayer:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    mistakes: list[Mistake] = []
    for assignment in _split_assignments(text):
        key, equals, value_text = (part.strip() for part in assignment.partition("="))
        if not equals or not all(key.split(".")):
            problem = f"{assignment.strip()!r} is not a setting"
            advice = "write a.b=c,d=e; put a value with commas in brackets or quotes"
            mistakes.append(Mistake("", problem, advice, OVERRIDE_FLAG))
            continue

        try:
            value: Any = ""
            if value_text and value_text[0] in "[{'\"":
                value = yaml_loader.parse(value_text, OVERRIDE_FLAG).values
            elif value_text:
                value = yaml_loader.parse_scalar(value_text)
            if problem := insert_value(values, key, value):
                mistakes.append(Mistake(key, problem, "keep one", OVERRIDE_FLAG))
        except ConfigError as error:
            for mistake in error.mistakes:
                mistakes.append(Mistake(key, mistake.problem, mistake.advice, OVERRIDE_FLAG))
        origins[key] = OVERRIDE_FLAG

    if mistakes:
        raise ConfigError(mistakes)
    return ConfigLayer(values, origins)


def _split_assignments(text: str) -> list[str]:
    """Splits at the commas that are outside of brackets and quotes.

    Raises:
      ConfigError: When a bracket or quote is not closed.
    """
    assignments = []
    begin = 0
    open_quote = ""
    # The closing brackets that are still to come, the innermost one first.
    closing_brackets = ""
    # The character before, spaces left out.
    previous = ""

    for index, char in enumerate(text):
        if open_quote:
            if char == open_quote and previous != "\\":
                open_quote = ""
        # A quote opens where a value can begin. YAML doubles a quote inside quotes, so it also
        # opens after one that has just closed.
        elif char in "'\"" and previous in ("", char, *"=,[{(:"):
            open_quote = char
        elif char in _PAIRS:
            closing_brackets = _PAIRS[char] + closing_brackets
        elif closing_brackets and char == closing_brackets[0]:
            closing_brackets = closing_brackets[1:]
        elif char == "," and not closing_brackets:
            assignments.append(text[begin:index])
            begin = index + 1
        if not char.isspace():
            previous = char

    if open_quote or closing_brackets:
        missing = open_quote or closing_brackets[0]
        problem = f"{missing} is missing at the end"
        raise ConfigError([Mistake("", problem, "close every bracket and quote", OVERRIDE_FLAG)])

    # A comma may stand at the end.
    rest = text[begin:]
    if rest.strip():
        assignments.append(rest)
    return assignments
