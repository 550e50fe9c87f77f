"""Reads YAML and JSON text into plain values with the line of each, and writes plain values as YAML.

YAML 1.1 turns `off` into a truth value, `1e-3` into text, `010` into 8 and `12:30` into 750. Here a scalar means what
it looks like: only true and false are truth values, 1e-3 is a number, 010 is ten, 12:30 and 2024-01-01 stay words. Text
is written in quotes wherever a YAML 1.1 reader would misread it, so that other tools read the same values.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from trainer_kit.config.sources.layer import join
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
_TUPLE = _TAG + "python/tuple"  # as TF Model Garden writes its lists; read as a list, which makes no object
MOST_CHARACTERS = 2**20  # of a text; PyYAML takes some seconds for so many
_MOST_VALUES = 30_000  # of a document, with each alias replaced by what it stands for; PyYAML takes a second for them
_MOST_LEVELS = 64
_MOST_DIGITS = 300
_TOO_LARGE = "a config is a few kilobytes; keep data in separate files, and name those files here"
_LOSSY = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\ufeff]")


class _TooMuchError(yaml.MarkedYAMLError):
    """The document would become too many values, or too deep."""


class _Loader(yaml.SafeLoader):
    """Safe: makes plain values only, never objects, and no more of them than a config can need."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own form

    def __init__(self, stream: str, most_values: int = _MOST_VALUES) -> None:
        super().__init__(stream)
        self._levels, self._most_values = 0, most_values
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # values and levels in a node, aliases counted each time

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuses aliases that multiply ("billion laughs") before anything is made of them."""
        self._levels += 1
        self._check(len(self._sizes), self._levels, self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._levels -= 1
        if node is not None and node not in self._sizes:
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = [one for pair in parts for one in pair] if isinstance(node, yaml.MappingNode) else parts
            sizes = [self._sizes.get(one, (1, 1)) for one in parts]  # one that holds itself is not known yet
            values, levels = 1 + sum(size[0] for size in sizes), 1 + max((size[1] for size in sizes), default=0)
            self._check(values, levels, node.start_mark)
            self._sizes[node] = values, levels
        return node

    def _check(self, values: int, levels: int, mark: yaml.error.Mark) -> None:
        if values > self._most_values:
            problem = f"has more than {self._most_values:,} values, aliases counted each time"
            raise _TooMuchError(None, None, problem, mark)
        if levels > _MOST_LEVELS:
            raise _TooMuchError(None, None, f"is nested more than {_MOST_LEVELS} levels deep", mark)

    def construct_whole_number(self, node: yaml.ScalarNode) -> int:
        text = str(self.construct_scalar(node)).replace("_", "")
        if len(text) > _MOST_DIGITS:
            raise ValueError(f"a number of more than {_MOST_DIGITS} digits")
        return int(text, 0 if re.match(r"[-+]?0[xo]", text) else 10)


class _Dumper(yaml.SafeDumper):
    """Writes a word in quotes when our reader or one of YAML 1.1 would take it for something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own form
        first: list(resolvers) for first, resolvers in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Equal lists are written twice: a reader should not have to follow anchors."""
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """In double quotes, with escapes, where another form would lose a line break that only Unicode knows."""
        return self.represent_scalar(_STR, text, style='"' if _LOSSY.search(text) else None)


_Dumper.add_representer(str, _Dumper.represent_text)
_Loader.add_constructor(_TAG + "int", _Loader.construct_whole_number)
for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _firsts = [*_first, ""] if _kind == "null" else [*_first]
        _class.add_implicit_resolver(_TAG + _kind, re.compile(f"^(?:{_pattern})$"), _firsts)


@dataclass
class Parsed:
    """Plain values, the line (from 1) on which each key or item stands by its dotted path, and what is wrong."""

    values: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)


def parse(text: str, name: str, as_json: bool = False, own: bool = False) -> Parsed:
    """Reads one YAML document, or JSON.

    Args:
      text: The document; an empty one gives None.
      name: The name of the document in messages.
      as_json: Whether the text has to be JSON.
      own: Whether trainer_kit wrote the file, such as params.yaml: it may be of any length, and may hold as many values
        as can be written in it.

    Raises:
      ConfigError: when the text is not YAML (or JSON), has a key twice, is too long, or would become too many values;
        every place as name:line:column.
    """
    if not own:
        check_length(text, name)
    if as_json:
        values = _parse_json(text, name)
        text = text.replace("\t", " ")  # in JSON a tab is always between tokens; YAML refuses it there
    parsed = Parsed()
    try:
        loader = _Loader(text, max(_MOST_VALUES, len(text)) if own else _MOST_VALUES)
        node = loader.get_single_node()
        if node is not None:
            parsed.values = _Reader(loader, name, parsed).read(node, "")
    except yaml.YAMLError as error:
        raise ConfigError([_broken(error, text, name)]) from None
    except RecursionError:
        raise ConfigError([Mistake("", "it is nested too deeply", origin=name)]) from None
    if parsed.mistakes:
        raise ConfigError(parsed.mistakes)
    if as_json:
        parsed.values = values
    return parsed


def check_length(text: str, name: str) -> None:
    """Raises ConfigError when `text` is longer than a config can be; `name` is its name in the message."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError([Mistake("", f"is longer than {MOST_CHARACTERS:,} characters", _TOO_LARGE, name)])


def parse_scalar(text: str) -> Any:
    """Returns what a bare word means: "1e-3" a number, "true" a truth value, "off" and "*.txt" themselves.

    Raises:
      ConfigError: for a number of too many digits.
    """
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    try:
        return loader.construct_object(yaml.ScalarNode(_STR if tag == _MERGE else tag, text))
    except ValueError as error:
        raise ConfigError([Mistake("", f"{text[:20]}... is {error}", "write a smaller one")]) from None


def dump(values: Any) -> str:
    """Returns `values` (dicts, lists and scalars) as YAML in the order of the keys; floats keep every bit."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False)


class _Reader:
    """Turns YAML nodes into values; PyYAML itself lets the last of equal keys win and forgets the lines."""

    def __init__(self, loader: _Loader, name: str, parsed: Parsed) -> None:
        self._loader, self._name, self._parsed = loader, name, parsed
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, path: str) -> Any:
        if node in self._open:
            self._note(node, path, "holds itself", "an alias cannot stand inside what it names")
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode) and node.tag == _MAP:
                return self._mapping(node, path)
            if isinstance(node, yaml.SequenceNode) and node.tag in (_SEQ, _TUPLE):
                return [self._item(item, join(path, index)) for index, item in enumerate(node.value)]
            return self._scalar(node, path)
        finally:
            self._open.pop()

    def _item(self, node: yaml.Node, path: str) -> Any:
        self._parsed.lines[path] = node.start_mark.line + 1
        return self.read(node, path)

    def _scalar(self, node: yaml.Node, path: str) -> Any:
        try:
            if isinstance(node, yaml.ScalarNode):
                return self._loader.construct_object(node)
        except (ValueError, yaml.constructor.ConstructorError):
            pass
        self._note(node, path, f"{node.tag!r} cannot be read", "use plain values: text, numbers, lists and mappings")
        return None

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in reversed(sources):
                    merged.update(self._merged(source, path))
        direct: dict[Any, Any] = {}
        first_line: dict[Any, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                continue
            key = self._scalar(key_node, path)
            if key in direct:
                self._note(key_node, join(path, key), f"is given twice, first on line {first_line[key]}", "keep one")
                continue
            first_line[key] = key_node.start_mark.line + 1
            self._parsed.lines[join(path, key)] = first_line[key]
            direct[key] = self.read(value_node, join(path, key))
        return {**merged, **direct}

    def _merged(self, node: yaml.Node, path: str) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            self._note(node, path, "<< needs a mapping, or a list of mappings", "merge an anchor of a mapping")
            return {}
        return dict(self.read(node, path) or {})

    def _note(self, node: yaml.Node, path: str, problem: str, advice: str) -> None:
        self._parsed.mistakes.append(Mistake(path, problem, advice, _place(self._name, node.start_mark)))


def _parse_json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        raise ConfigError([Mistake("", f"is not JSON: {error.msg}", "correct it there", place)]) from None
    except RecursionError:
        raise ConfigError([Mistake("", f"is nested more than {_MOST_LEVELS} levels deep", _TOO_LARGE, name)]) from None
    except ValueError:  # Python's own limit
        raise ConfigError([Mistake("", "has a number of too many digits", "write a smaller one", name)]) from None


def _broken(error: yaml.YAMLError, text: str, name: str) -> Mistake:
    if isinstance(error, _TooMuchError) and error.problem_mark is not None:
        return Mistake("", str(error.problem), _TOO_LARGE, _place(name, error.problem_mark))
    mark = getattr(error, "problem_mark", None)
    position = getattr(error, "position", None)
    parts = (getattr(error, "context", None), getattr(error, "problem", None) or getattr(error, "reason", None))
    problem = ", ".join(part for part in parts if part) or str(error)
    advice = "indent with spaces, not tabs" if "\\t" in problem else "correct it there; words with : or # need quotes"
    if mark is not None:
        return Mistake("", f"is not YAML: {problem}", advice, _place(name, mark))
    if position is not None:
        line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
        return Mistake("", f"is not YAML: {problem}", advice, f"{name}:{line}:{column}")
    return Mistake("", f"is not YAML: {problem}", advice, name)


def _place(name: str, mark: yaml.error.Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"
