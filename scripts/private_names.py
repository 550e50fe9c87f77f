"""Finds uses of names that are not public, in the text of modules.

`python -m scripts.private_names` counts them.

A name with a leading underscore is one's own in the module that defines it and, on `self`, in
subclasses that are part of the same code. Everywhere else it belongs to somebody who may change it.
Modules of TensorFlow and Keras that no public module shows are private too, whatever their names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scripts.source_files import SourceFile, read_source_files

HIDDEN = (
    "tensorflow.python",
    "tensorflow.core",
    "tensorflow.compiler",
    "keras.src",
    "tf_keras.src",
)
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_make"}  # of os, and of named tuples
_HIDDEN_NAMES = {hidden.rpartition(".")[2] for hidden in HIDDEN}
_BY_STRING = {"getattr", "setattr", "hasattr", "delattr"}
_ONESELF = ("self", "cls")


@dataclass(frozen=True)
class Use:
    """A use of a name that is not public: the name, its place, and the text."""

    name: str
    module: str
    line: int
    text: str


@dataclass(frozen=True)
class _ClassNames:
    """The names that a class defines, and its bases as they are written."""

    names: set[str]
    bases: list[str]


@dataclass(frozen=True)
class _ModuleNames:
    """A module's defined names, its classes, and its imports: name -> dotted target."""

    source: SourceFile
    imports: dict[str, str] = field(default_factory=dict)

    @cached_property
    def defined_names(self) -> set[str]:
        return _collect_defined_names(self.source.nodes)

    @cached_property
    def classes(self) -> dict[str, _ClassNames]:
        nodes = [node for node in self.source.nodes if isinstance(node, ast.ClassDef)]
        return {
            node.name: _ClassNames(
                _collect_defined_names(ast.walk(node)),
                [ast.unparse(base) for base in node.bases],
            )
            for node in nodes
        }


def find_private_uses(sources: Sequence[SourceFile]) -> list[Use]:
    """Returns all uses of names that are not public, in the order of the sources."""
    names_by_module = {source.module: _ModuleNames(source, _imports(source)) for source in sources}
    return [
        use
        for names in names_by_module.values()
        for use in _uses(names.source.tree, names, names_by_module, "")
    ]


def _uses(
    node: ast.AST, names: _ModuleNames, known: Mapping[str, _ModuleNames], inside: str
) -> Iterator[Use]:
    """Yields the uses below a node; `inside` is the class of `self`."""
    for child in ast.iter_child_nodes(node):
        for name in _find_private_names(child, names, known, inside):
            yield Use(name, names.source.module, getattr(child, "lineno", 0), ast.unparse(child))
        yield from _uses(
            child, names, known, child.name if isinstance(child, ast.ClassDef) else inside
        )


def _find_private_names(
    node: ast.AST, names: _ModuleNames, known: Mapping[str, _ModuleNames], inside: str
) -> list[str]:
    """Returns the names that are not public in one node, without those below it."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _private_imports(node)
    owner, name = _attribute(node)
    if owner is None or name in DOCUMENTED:
        return []
    if not name.startswith("_") and name not in _HIDDEN_NAMES:
        return []
    text = ast.unparse(owner)
    if (
        f"{text.split('.')[0]}.{name}" in HIDDEN
        or name == "__internal__"
        or (name == "src" and "keras" in text)
    ):
        return [name]
    if not name.startswith("_") or name.endswith("__") or name in names.defined_names:
        return []
    is_own = text in (*_ONESELF, "super()") and name in _collect_class_names(inside, names, known)
    return [] if is_own else [name]


def _private_imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    targets = [base + alias.name for alias in node.names]
    return [
        target
        for target in targets
        if any(target == hidden or target.startswith(f"{hidden}.") for hidden in HIDDEN)
        or any(part.startswith("_") and not part.endswith("__") for part in target.split("."))
    ]


def _attribute(node: ast.AST) -> tuple[ast.expr | None, str]:
    """Returns the object and the name of an attribute access, by a dot or by a string."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if (
        isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in _BY_STRING
        and len(node.args) > 1
    ):
        name = node.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return node.args[0], name.value
    return None, ""


def _collect_class_names(
    name: str, names: _ModuleNames, known: Mapping[str, _ModuleNames]
) -> set[str]:
    """Returns the names that a class and those of its bases that are in the sources define."""
    if name not in names.classes:
        module, _, name = names.imports.get(name, "").rpartition(".")
        if module not in known or name not in known[module].classes:
            return set()
        names = known[module]
    class_names = names.classes[name]
    return class_names.names.union(
        *(_collect_class_names(base, names, known) for base in class_names.bases if base != name)
    )


def _collect_defined_names(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names that nodes define.

    They are functions, classes, variables, and attributes of `self`.
    """
    defined_names = set()
    for child in nodes:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined_names.add(child.name)
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            defined_names.add(child.id)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            defined_names |= {child.attr} if ast.unparse(child.value) in _ONESELF else set()
    return defined_names


def _imports(source: SourceFile) -> dict[str, str]:
    nodes = [node for node in source.nodes if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        for alias in node.names
    }


if __name__ == "__main__":
    outside = [
        use
        for use in find_private_uses(read_source_files("trainer_kit"))
        if ".compat." not in use.module
    ]
    for use in outside:
        print(f"{use.module}:{use.line}: {use.name}   {use.text[:80]}")
    print(
        f"{len({use.name for use in outside})} distinct names, {len(outside)} uses, outside compat"
    )
