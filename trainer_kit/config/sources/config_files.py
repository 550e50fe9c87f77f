"""Reads config files and --params_override into layers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from trainer_kit.config.sources import yaml_loader
from trainer_kit.config.sources.layer import ConfigLayer, insert_value
from trainer_kit.errors import ConfigError, Mistake, suggest_paths
from trainer_kit.files import is_remote

OVERRIDE_FLAG = "--params_override"
_SUFFIXES = (".yaml", ".yml", ".json")
_ASSIGNMENT = re.compile(r"\s*([\w.\-]+)\s*=")
_PAIRS = {"[": "]", "{": "}", "(": ")"}


def read_config_file(path: str | os.PathLike[str]) -> ConfigLayer:
    """Reads a YAML or JSON file whose keys are sections and fields: `trainer: {train_steps: 5}`.

    Args:
      path: A local file.

    Raises:
      ConfigError: when the file is missing (with the near names in its folder) or unreadable, when
        the text is broken or has a key twice (all of them, as file:line:column), or when its top
        level is not a mapping.
    """
    name = os.fspath(path)
    text = read_text(name)
    parsed = yaml_loader.parse(text, name)
    values = _check_mapping(parsed.values, f"{name}:1:1")
    return ConfigLayer(values, {where: f"{name}:{line}" for where, line in parsed.lines.items()})


def read_params_override(text: str) -> ConfigLayer:
    """Reads the value of --params_override in any of its three spellings.

    They are `a.b=c,d=[1,2]` (dotted keys; a value is a bare word, a quoted text, a list or a
    mapping; a comma inside brackets or quotes belongs to the value), YAML or JSON text with nested
    keys, and the path of a file with a name that ends in .yaml, .yml or .json. Nothing is
    evaluated.

    Raises:
      ConfigError: when the text is none of them, is broken, or is too long.
    """
    yaml_loader.check_length(text, OVERRIDE_FLAG)
    if not text.strip():
        return ConfigLayer()
    one_line = "\n" not in text.strip()
    if one_line and text.strip().endswith(_SUFFIXES) and not text.lstrip().startswith("{"):
        if os.path.exists(text.strip()) or not _ASSIGNMENT.match(text):
            return read_config_file(text.strip())
    if _ASSIGNMENT.match(text):
        return _read_assignments(text)
    parsed = yaml_loader.parse(text, OVERRIDE_FLAG)
    values = _check_mapping(parsed.values, OVERRIDE_FLAG)
    return ConfigLayer(values, dict.fromkeys(parsed.lines, OVERRIDE_FLAG))


def read_text(name: str) -> str:
    """Returns the text of the local file `name`.

    Raises:
      ConfigError: when it is not there (with near names), is a folder, cannot be read, is not
        UTF-8, or is too long.
    """
    if is_remote(name):
        raise ConfigError([Mistake("", "is not a local file", "copy it here first", name)])
    try:
        with open(name, encoding="utf-8") as stream:
            text = stream.read(yaml_loader.MAX_CHARACTERS + 1)  # of a file that has no end, no more
    except FileNotFoundError:
        near = [
            file.name
            for file in Path(name).parent.glob("[!.]*")
            if file.suffix in (Path(name).suffix, *_SUFFIXES, ".gin")
        ]
        advice = suggest_paths(Path(name), near, "config files")
        raise ConfigError([Mistake("", "there is no such file", advice, name)]) from None
    except OSError as error:
        raise ConfigError(
            [Mistake("", f"cannot be read: {error.strerror or error}", "", name)]
        ) from None
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (byte {error.start})"
        raise ConfigError([Mistake("", problem, "save it as UTF-8", name)]) from None
    yaml_loader.check_length(text, name)
    return text


def _check_mapping(values: Any, origin: str) -> dict[str, Any]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        problem = (
            f"{values!r} is not a setting"
            if not isinstance(values, list)
            else "is a list, not settings"
        )
        advice = (
            "write a.b=c, nested keys such as {trainer: {train_steps: 5}}, or the path of a YAML or"
            " JSON file"
        )
        raise ConfigError([Mistake("", problem, advice, origin)])
    return values


def _read_assignments(text: str) -> ConfigLayer:
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    mistakes: list[Mistake] = []
    for piece in _split_assignments(text):
        key, equals, written = (part.strip() for part in piece.partition("="))
        if not equals or not all(key.split(".")):
            advice = "write a.b=c,d=e; put a value with commas in brackets or quotes"
            mistakes.append(
                Mistake("", f"{piece.strip()!r} is not a setting", advice, OVERRIDE_FLAG)
            )
            continue
        try:
            value: Any = ""
            if written and written[0] in "[{'\"":
                value = yaml_loader.parse(written, OVERRIDE_FLAG).values
            elif written:
                value = yaml_loader.parse_scalar(written)
            if problem := insert_value(values, key, value):
                mistakes.append(Mistake(key, problem, "keep one", OVERRIDE_FLAG))
        except ConfigError as error:
            mistakes += [Mistake(key, m.problem, m.advice, OVERRIDE_FLAG) for m in error.mistakes]
        origins[key] = OVERRIDE_FLAG
    if mistakes:
        raise ConfigError(mistakes)
    return ConfigLayer(values, origins)


def _split_assignments(text: str) -> list[str]:
    """Splits at the commas that are outside of brackets and quotes.

    Raises:
      ConfigError: when a bracket or quote is not closed.
    """
    pieces, begin, expected, quote, before = [], 0, "", "", ""
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote and before != "\\" else quote
        elif char in "'\"" and before in (
            "",
            char,
            *"=,[{(:",
        ):  # after `char`: YAML doubles a quote inside quotes
            quote = char
        elif char in _PAIRS:
            expected = _PAIRS[char] + expected
        elif expected and char == expected[0]:
            expected = expected[1:]
        elif char == "," and not expected:
            pieces.append(text[begin:index])
            begin = index + 1
        before = char if not char.isspace() else before
    if quote or expected:
        problem = f"{quote or expected[0]} is missing at the end"
        raise ConfigError([Mistake("", problem, "close every bracket and quote", OVERRIDE_FLAG)])
    return [*pieces, text[begin:]] if text[begin:].strip() else pieces
