"""Reads YAML and JSON text into plain values with their lines, and writes plain values as YAML.

YAML 1.1 turns `off` into a truth value, `1e-3` into text, `010` into 8 and `12:30` into 750. Here a
scalar means what it looks like: only true and false are truth values, 1e-3 is a number, 010 is ten,
and 12:30 and 2024-01-01 stay words. Text is written in quotes wherever a YAML 1.1 reader would
misread it, so that other tools read the same values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer_kit.config.sources.layer import join_keys
from trainer_kit.errors import ConfigError, Mistake

_TAG = "tag:yaml.org,2002:"
_MAP = _TAG + "map"
_SEQ = _TAG + "seq"
_STR = _TAG + "str"
_MERGE = _TAG + "merge"
# TF Model Garden writes its lists as tuples. They are read as lists, which creates no object.
_TUPLE = _TAG + "python/tuple"

# The type of a scalar, the words that have it, and the characters that these can begin with.
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|[-+]?0x[0-9a-fA-F]+|[-+]?0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)

# PyYAML takes some seconds for a text of so many characters.
MAX_CHARACTERS = 2**18
# Of a document, with each alias replaced by what it stands for.
_MAX_VALUES = 30_000
_MAX_DEPTH = 64
_MAX_DIGITS = 300
_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep"
_TOO_LARGE = "a config is a few kilobytes; keep data in separate files, and name those files here"
_CONTROL_CHARACTERS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufeff]")


class _Loader(yaml.SafeLoader):
    """Reads plain values only, never objects."""

    # PyYAML itself has the resolvers in a class attribute.
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        scalar = str(self.construct_scalar(node))
        text = scalar.replace("_", "")

        # No field takes a larger number, and Python itself refuses it with an error.
        if len(text) > _MAX_DIGITS:
            return text

        # With base 0, Python reads the base from the prefix.
        has_prefix = re.match(r"[-+]?0[xo]", text)
        return int(text, 0 if has_prefix else 10)


class _Dumper(yaml.SafeDumper):
    """Writes a word in quotes when our reader or a YAML 1.1 reader would misread it."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: object) -> bool:
        """Writes equal lists twice, so that a reader does not have to follow anchors."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Writes text with control characters in double quotes, with escapes.

        Another form would lose a line break that only Unicode has.
        """
        style = '"' if _CONTROL_CHARACTERS.search(text) else None
        return self.represent_scalar(_STR, text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor(_TAG + "int", _Loader.construct_whole_number)
for _kind, _pattern, _characters in _SCALARS:
    _whole_word = re.compile(f"^(?:{_pattern})$")
    _firsts = list(_characters)
    if _kind == "null":
        # The empty word has no first character.
        _firsts.append("")
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_TAG + _kind, _whole_word, _firsts)


# PyYAML has libyaml in its wheels, but not where it was built without it.
class _TrustedLoader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """Reads the same values as _Loader seven times as fast. Its messages are shorter."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers
    yaml_constructors = _Loader.yaml_constructors


@dataclass
class ParsedYaml:
    """The values of a document, and where they stand.

    Attributes:
      values: The plain values.
      lines: The line of each key or item, counted from 1, by its dotted path.
    """

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, name: str, is_trusted: bool = False) -> ParsedYaml:
    """Reads one YAML document, or JSON, which is YAML too.

    Args:
      text: The document. An empty one gives None.
      name: The name of the document in messages.
      is_trusted: Whether trainer_kit wrote the file, such as params.yaml. Such a file may have any
        length, and may contain as many values as can be written in it.

    Raises:
      ConfigError: When the text is not YAML, has a key twice, is too long, or would become too many
        values. It names every place as name:line:column.
    """
    if not is_trusted:
        check_length(text, name)

    # JSON may be indented with tabs, which YAML refuses.
    if text.lstrip().startswith("{"):
        text = re.sub(
            r"^[ \t]+", lambda indent: indent[0].replace("\t", " "), text, flags=re.MULTILINE
        )

    max_values = max(_MAX_VALUES, len(text)) if is_trusted else _MAX_VALUES
    try:
        loader = _TrustedLoader(text) if is_trusted else _Loader(text)
        reader = _Reader(loader, name, max_values)
        node = loader.get_single_node()
        values = None if node is None else reader.read(node, "")
    except yaml.YAMLError as error:
        raise ConfigError([_create_syntax_mistake(error, text, name)]) from None
    except RecursionError:
        raise ConfigError([Mistake("", _TOO_DEEP, _TOO_LARGE, name)]) from None
    if reader.mistakes:
        raise ConfigError(reader.mistakes)
    return ParsedYaml(values, reader.lines)


def check_length(text: str, name: str) -> None:
    """Checks that a text is not longer than a config can be.

    Args:
      text: The text.
      name: Its name in the message.

    Raises:
      ConfigError: When it is too long.
    """
    if len(text) > MAX_CHARACTERS:
        problem = f"is longer than {MAX_CHARACTERS:,} characters"
        raise ConfigError([Mistake("", problem, _TOO_LARGE, name)])


def parse_scalar(text: str) -> Any:
    """Returns what a bare word means.

    "1e-3" is a number and "true" a truth value. "off" and "*.txt" stay words.
    """
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    # A bare << is text: there is nothing to merge.
    if tag == _MERGE:
        tag = _STR
    node = yaml.ScalarNode(tag, text)
    return loader.construct_object(node)


def dump(values: Mapping[str, object]) -> str:
    """Returns dicts, lists and scalars as YAML, in the order of the keys.

    Floats keep every bit.
    """
    return yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=False,
    )


class _Reader:
    """Turns YAML nodes into values, with their lines and the mistakes in them.

    PyYAML itself lets the last of equal keys win, and keeps no lines. The reader counts what an
    alias stands for each time, and stops before aliases have multiplied ("billion laughs").

    Attributes:
      lines: The line of each key or item that was read, counted from 1, by its dotted path.
      mistakes: The mistakes so far.
    """

    def __init__(self, loader: yaml.SafeLoader, name: str, max_values: int) -> None:
        self._loader = loader
        self._name = name
        self._max_values = max_values
        self._value_count = 0
        self._open_nodes: list[yaml.Node] = []
        self.lines: dict[str, int] = {}
        self.mistakes: list[Mistake] = []

    def read(self, node: yaml.Node, path: str) -> Any:
        """Returns the value of a node at a dotted path, or None on a mistake.

        Raises:
          ConfigError: When the document has too many values, or is nested too deep.
        """
        if node in self._open_nodes:
            advice = "an alias cannot stand inside what it names"
            self._add_mistake(node, path, "holds itself", advice)
            return None

        # A document that is too large or too deep is not read any further.
        self._value_count += 1
        problem = ""
        if self._value_count > self._max_values:
            problem = f"has more than {self._max_values:,} values, aliases counted each time"
        elif len(self._open_nodes) >= _MAX_DEPTH:
            problem = _TOO_DEEP
        if problem:
            location = self._format_location(node)
            raise ConfigError([Mistake("", problem, _TOO_LARGE, location)])

        self._open_nodes.append(node)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            value: Any = self._read_mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag in (_SEQ, _TUPLE):
            value = []
            for index, item in enumerate(node.value):
                item_path = join_keys(path, index)
                self.lines[item_path] = item.start_mark.line + 1
                value.append(self.read(item, item_path))
        else:
            value = self._read_scalar(node, path)
        self._open_nodes.pop()
        return value

    def _read_scalar(self, node: yaml.Node, path: str) -> Any:
        reason = ""
        if isinstance(node, yaml.ScalarNode):
            try:
                value = self._loader.construct_object(node)
            except (ValueError, yaml.constructor.ConstructorError) as error:
                problem = getattr(error, "problem", None) or error
                reason = f" ({problem})"
            else:
                # JSON may write a character as a pair of escapes.
                if isinstance(value, str):
                    utf_16 = value.encode("utf-16", "surrogatepass")
                    value = utf_16.decode("utf-16")
                return value

        advice = "use plain values: text, numbers, lists and mappings"
        self._add_mistake(node, path, f"{node.tag!r} cannot be read{reason}", advice)
        return None

    def _read_mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        values: dict[Any, Any] = {}
        first_lines: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                sources = [value_node]
                if isinstance(value_node, yaml.SequenceNode):
                    sources = value_node.value

                # The first of several mappings wins, so it is merged last.
                for source in reversed(sources):
                    if isinstance(source, yaml.MappingNode):
                        source_values = self.read(source, path)
                        merged.update(source_values or {})
                    else:
                        problem = "<< needs a mapping, or a list of mappings"
                        self._add_mistake(source, path, problem, "merge an anchor of a mapping")
                continue

            key = self._read_scalar(key_node, path)
            key_path = join_keys(path, key)
            if key in values:
                problem = f"is given twice, first on line {first_lines[key]}"
                self._add_mistake(key_node, key_path, problem, "keep one")
                continue
            first_lines[key] = key_node.start_mark.line + 1
            values[key] = self.read(value_node, key_path)
            self.lines[key_path] = first_lines[key]

        # The keys of a mapping win over those that << merges into it.
        return {**merged, **values}

    def _add_mistake(self, node: yaml.Node, path: str, problem: str, advice: str) -> None:
        location = self._format_location(node)
        self.mistakes.append(Mistake(path, problem, advice, location))

    def _format_location(self, node: yaml.Node) -> str:
        # PyYAML counts from 0.
        line = node.start_mark.line + 1
        column = node.start_mark.column + 1
        return f"{self._name}:{line}:{column}"


def _create_syntax_mistake(error: yaml.YAMLError, text: str, name: str) -> Mistake:
    # A ReaderError, for a character that YAML does not allow, has a position in place of a mark.
    place = name
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        place = f"{name}:{line}"
    elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        line = mark.line + 1
        column = mark.column + 1
        place = f"{name}:{line}:{column}"

    # PyYAML's errors have different parts of a message.
    context = getattr(error, "context", None)
    reason = getattr(error, "problem", None) or getattr(error, "reason", None)
    parts = [part for part in (context, reason) if part]
    problem = ", ".join(parts) or str(error)
    advice = "correct it there; words with : or # need quotes"
    if "\\t" in problem:
        advice = "indent with spaces, not tabs"
    return Mistake("", f"is not YAML: {problem}", advice, place)
