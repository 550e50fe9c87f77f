"""Reads YAML and JSON text into plain values with the line of each, and writes plain values as YAML.

YAML 1.1 turns `off` into a truth value, `1e-3` into text, `010` into 8 and `12:30` into 750. Here a
scalar means what it looks like: only true and false are truth values, 1e-3 is a number, 010 is ten,
12:30 and 2024-01-01 stay words. Text is written in quotes wherever a YAML 1.1 reader would misread
it, so that other tools read the same values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer_kit.config.sources.layer import join_keys
from trainer_kit.errors import ConfigError, Mistake

_TAG = "tag:yaml.org,2002:"
_MAP, _SEQ, _STR, _MERGE = _TAG + "map", _TAG + "seq", _TAG + "str", _TAG + "merge"
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|[-+]?0x[0-9a-fA-F]+|[-+]?0o[0-7]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)
_TUPLE = (
    _TAG + "python/tuple"
)  # as TF Model Garden writes its lists; read as a list, which makes no object
MAX_CHARACTERS = 2**18  # of a text; PyYAML takes some seconds for so many
_MAX_VALUES = 30_000  # of a document, with each alias replaced by what it stands for
_MAX_DEPTH = 64
_MAX_DIGITS = 300
_TOO_DEEP = f"is nested more than {_MAX_DEPTH} levels deep"
_TOO_LARGE = "a config is a few kilobytes; keep data in separate files, and name those files here"
_CONTROL_CHARACTERS = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufeff]")


class _Loader(yaml.SafeLoader):
    """Safe: makes plain values only, never objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own form

    def construct_whole_number(self, node: yaml.ScalarNode) -> int | str:
        text = str(self.construct_scalar(node)).replace("_", "")
        if len(text) > _MAX_DIGITS:
            return (
                text  # no field takes so large a number, and Python itself refuses it with an error
            )
        return int(text, 0 if re.match(r"[-+]?0[xo]", text) else 10)


class _Dumper(yaml.SafeDumper):
    """Writes a word in quotes when our reader or one of YAML 1.1 would take it for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: list(resolvers)
        for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Equal lists are written twice: a reader should not have to follow anchors."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """In double quotes, with escapes, where another form would lose a line break that only Unicode knows."""
        return self.represent_scalar(
            _STR, text, style='"' if _CONTROL_CHARACTERS.search(text) else None
        )


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor(_TAG + "int", _Loader.construct_whole_number)
for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _firsts = [*_first, ""] if _kind == "null" else [*_first]
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _firsts)


@dataclass
class ParsedYaml:
    """Plain values, and the line (from 1) on which each key or item stands by its dotted path."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)


def parse(text: str, name: str, is_trusted: bool = False) -> ParsedYaml:
    """Reads one YAML document, or JSON, which is YAML too.

    Args:
      text: The document; an empty one gives None.
      name: The name of the document in messages.
      is_trusted: Whether trainer_kit wrote the file, such as params.yaml: it may be of any length,
        and may hold as many values as can be written in it.

    Raises:
      ConfigError: when the text is not YAML, has a key twice, is too long, or would become too many
        values; every place as name:line:column.
    """
    if not is_trusted:
        check_length(text, name)
    if text.lstrip().startswith("{"):  # JSON may be indented with tabs, which YAML refuses
        text = re.sub(
            r"^[ \t]+", lambda indent: indent[0].replace("\t", " "), text, flags=re.MULTILINE
        )
    try:
        loader = _Loader(text)
        reader = _Reader(loader, name, max(_MAX_VALUES, len(text)) if is_trusted else _MAX_VALUES)
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
    """Raises ConfigError when `text` is longer than a config can be; `name` is its name in the message."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(
            [Mistake("", f"is longer than {MAX_CHARACTERS:,} characters", _TOO_LARGE, name)]
        )


def parse_scalar(text: str) -> Any:
    """Returns what a bare word means: "1e-3" a number, "true" a truth value, "off" and "*.txt" themselves."""
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return loader.construct_object(yaml.ScalarNode(_STR if tag == _MERGE else tag, text))


def dump(values: Any) -> str:
    """Returns `values` (dicts, lists and scalars) as YAML in the order of the keys; floats keep every bit."""
    return yaml.dump(
        values,
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=100,
        default_flow_style=False,
    )


class _Reader:
    """Turns YAML nodes into values; PyYAML itself lets the last of equal keys win and forgets the lines.

    It counts what an alias stands for each time, and stops before aliases have multiplied ("billion
    laughs").
    """

    def __init__(self, loader: _Loader, name: str, max_values: int) -> None:
        self._loader = loader
        self._name = name
        self._max_values = max_values
        self._value_count = 0
        self._open_nodes: list[yaml.Node] = []
        self.lines: dict[str, int] = {}
        self.mistakes: list[Mistake] = []

    def read(self, node: yaml.Node, path: str) -> Any:
        if node in self._open_nodes:
            self._add_mistake(
                node, path, "holds itself", "an alias cannot stand inside what it names"
            )
            return None
        self._value_count += 1
        if self._value_count > self._max_values:
            problem = f"has more than {self._max_values:,} values, aliases counted each time"
            raise ConfigError([Mistake("", problem, _TOO_LARGE, self._format_location(node))])
        if len(self._open_nodes) >= _MAX_DEPTH:
            raise ConfigError([Mistake("", _TOO_DEEP, _TOO_LARGE, self._format_location(node))])
        self._open_nodes.append(node)
        if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
            value: Any = self._read_mapping(node, path)
        elif isinstance(node, yaml.SequenceNode) and node.tag in (_SEQ, _TUPLE):
            value = []
            for index, item in enumerate(node.value):
                self.lines[join_keys(path, index)] = item.start_mark.line + 1
                value.append(self.read(item, join_keys(path, index)))
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
                reason = f" ({getattr(error, 'problem', None) or error})"
            else:
                # JSON may write a character as a pair of escapes.
                return (
                    value.encode("utf-16", "surrogatepass").decode("utf-16")
                    if isinstance(value, str)
                    else value
                )
        advice = "use plain values: text, numbers, lists and mappings"
        self._add_mistake(node, path, f"{node.tag!r} cannot be read{reason}", advice)
        return None

    def _read_mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        values: dict[Any, Any] = {}
        first_line: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                sources = (
                    value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                )
                for source in reversed(sources):
                    if isinstance(source, yaml.MappingNode):
                        merged.update(self.read(source, path) or {})
                    else:
                        problem = "<< needs a mapping, or a list of mappings"
                        self._add_mistake(source, path, problem, "merge an anchor of a mapping")
                continue
            key = self._read_scalar(key_node, path)
            where = join_keys(path, key)
            if key in values:
                self._add_mistake(
                    key_node, where, f"is given twice, first on line {first_line[key]}", "keep one"
                )
                continue
            first_line[key] = key_node.start_mark.line + 1
            values[key] = self.read(value_node, where)
            self.lines[where] = first_line[key]
        return {**merged, **values}

    def _add_mistake(self, node: yaml.Node, path: str, problem: str, advice: str) -> None:
        self.mistakes.append(Mistake(path, problem, advice, self._format_location(node)))

    def _format_location(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"


def _create_syntax_mistake(error: yaml.YAMLError, text: str, name: str) -> Mistake:
    place = name
    if isinstance(error, yaml.reader.ReaderError):
        place = f"{name}:{text.count(chr(10), 0, error.position) + 1}"
    elif isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        place = f"{name}:{error.problem_mark.line + 1}:{error.problem_mark.column + 1}"
    parts = (
        getattr(error, "context", None),
        getattr(error, "problem", None) or getattr(error, "reason", None),
    )
    problem = ", ".join(part for part in parts if part) or str(error)
    advice = (
        "indent with spaces, not tabs"
        if "\\t" in problem
        else "correct it there; words with : or # need quotes"
    )
    return Mistake("", f"is not YAML: {problem}", advice, place)
