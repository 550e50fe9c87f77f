"""Reads Python files as text, and measures them.

Code lines are neither blank nor comment nor docstring. A function is fully annotated when every
parameter but self or cls and the return value are; `__init__` needs no return type.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class SourceFile:
    """One module: its dotted name and its text."""

    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text, self.module)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, which several rules look at. To walk it takes most of the time."""
        return list(ast.walk(self.tree))

    @cached_property
    def code_lines(self) -> int:
        """The number of lines of code."""
        lines = {
            number
            for number, line in enumerate(self.text.split("\n"), start=1)
            if line.strip() and not line.lstrip().startswith("#")
        }
        # Inside of a text, a blank line and one that begins with # are code.
        for node in self.nodes:
            if isinstance(node, ast.Constant | ast.JoinedStr):
                lines.update(_list_lines(node))

        return len(lines - {n for node in self.nodes for n in _docstring_lines(node)})

    @cached_property
    def functions(self) -> list[Function]:
        """All functions and methods, inner ones included; overload declarations are left out."""
        nodes = [node for node in self.nodes if isinstance(node, Function)]
        return [
            node
            for node in nodes
            if not any("overload" in ast.unparse(d) for d in node.decorator_list)
        ]


def read_source_files(*folders: str, root: Path = ROOT) -> list[SourceFile]:
    """Returns every Python file below `folders` of `root`.

    A folder that does not exist has none.
    """
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    return [
        SourceFile(_module_name(path.relative_to(root)), path.read_text(encoding="utf-8"))
        for path in paths
    ]


def is_annotated(function: Function) -> bool:
    """Whether all parameters and the return value have a type.

    self, cls and the return value of `__init__` need none.
    """
    arguments = function.args
    ordered = [*arguments.posonlyargs, *arguments.args]
    if ordered and ordered[0].arg in ("self", "cls", "mcs"):
        ordered = ordered[1:]
    every = [*ordered, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    typed = all(argument is None or argument.annotation is not None for argument in every)
    return typed and (function.returns is not None or function.name == "__init__")


def find_undocumented(sources: Sequence[SourceFile]) -> tuple[int, list[str]]:
    """Returns the number of public modules, classes and functions, and the undocumented ones."""
    names = [(name, node) for source in sources for name, node in _iterate_public_names(source)]
    return len(names), [name for name, node in names if not ast.get_docstring(node)]


def _iterate_public_names(
    source: SourceFile,
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | Function]]:
    if source.tree.body:
        yield source.module, source.tree
    yield from _public_members(source.module, source.tree)


def _public_members(
    inside: str, parent: ast.Module | ast.ClassDef
) -> Iterator[tuple[str, ast.ClassDef | Function]]:
    for node in parent.body:
        if isinstance(
            node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ) and not node.name.startswith("_"):
            if any(ast.unparse(d).endswith(("overload", ".setter")) for d in node.decorator_list):
                continue
            yield f"{inside}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public_members(f"{inside}.{node.name}", node)


def _docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", None)
    if (
        not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        or not body
    ):
        return range(0)
    first = body[0]
    if not (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        return range(0)
    return _list_lines(first)


def _list_lines(node: ast.expr | ast.stmt) -> range:
    assert node.end_lineno is not None
    return range(node.lineno, node.end_lineno + 1)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
