"""The limits on the pages of trainer_kit, as functions that return the breaches of each rule.

A limit on lines is met by packing, and a limit on statements by slicing. These limits count what a
reader has to take in: syntax nodes on a line and in a statement, functions that a constructor
takes, parameters without a type, and names that are bare participles.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Sequence

from scripts.source_files import Function, SourceFile

PACKAGE = "trainer_kit"

MAX_NODES_PER_LINE = 7.0
MAX_NODES_PER_STATEMENT = 9.0
MAX_FUNCTIONS_IN_CONSTRUCTOR = 3
# Of all parameters but self and cls: those that are exactly Any, and those that contain Any
# anywhere or are `object`.
MAX_ANY_SHARE = 0.08
MAX_LOOSE_SHARE = 0.15

_CALLABLE = re.compile(r"(collections\.abc\.|typing\.)?Callable\b")
_ANY = re.compile(r"\bAny\b")
_PARTICIPLE = re.compile(
    r"_?(told|kept|held|made|found|given|known|seen|lost|gone|taken|written|chosen|[a-z]+ed)"
)
# Verbs and nouns of one word that end like a participle.
_NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "speed", "succeed"}


@functools.cache
def count_nodes(source: SourceFile) -> int:
    """Returns the number of syntax nodes without annotations.

    Annotations are left out: types make a page easier to read, and must not count against it.
    """
    annotation_nodes = sum(
        1 for annotation in _iterate_annotations(source) for _ in ast.walk(annotation)
    )
    return len(source.nodes) - annotation_nodes


def nodes_per_line(sources: Sequence[SourceFile]) -> list[str]:
    """On average a line of the package has at most MAX_NODES_PER_LINE syntax nodes."""
    package = _select_package(sources)
    lines = sum(source.code_lines for source in package)
    nodes = sum(count_nodes(source) for source in package)
    return _check_average("a line", nodes, lines, MAX_NODES_PER_LINE)


def nodes_per_statement(sources: Sequence[SourceFile]) -> list[str]:
    """On average a statement of the package has at most MAX_NODES_PER_STATEMENT syntax nodes."""
    package = _select_package(sources)
    statements = sum(isinstance(node, ast.stmt) for source in package for node in source.nodes)
    nodes = sum(count_nodes(source) for source in package)
    return _check_average("a statement", nodes, statements, MAX_NODES_PER_STATEMENT)


def few_functions_in_constructors(sources: Sequence[SourceFile]) -> list[str]:
    """A constructor or a dataclass takes at most MAX_FUNCTIONS_IN_CONSTRUCTOR functions.

    More of them are a missing class. Aliases of function types count, too.
    """
    package = _select_package(sources)
    function_types = {"Callable"}
    for source in package:
        function_types.update(_iterate_function_aliases(source.tree))

    breaches = []
    for source in package:
        for name, line, types in _iterate_constructors(source):
            count = sum(
                any(isinstance(n, ast.Name) and n.id in function_types for n in ast.walk(a))
                for a in types
            )
            if count > MAX_FUNCTIONS_IN_CONSTRUCTOR:
                breaches.append(
                    f"{source.module}:{line} {name} takes {count} functions; the limit is"
                    f" {MAX_FUNCTIONS_IN_CONSTRUCTOR}. Pass an object with a type"
                )
    return breaches


def few_parameters_of_type_any(sources: Sequence[SourceFile]) -> list[str]:
    """At most MAX_ANY_SHARE of the parameters are Any, and MAX_LOOSE_SHARE contain it."""
    annotations = [
        ast.unparse(parameter.annotation)
        for source in _select_package(sources)
        for function in source.functions
        for parameter in _list_parameters(function)
        if parameter.annotation is not None
    ]
    any_count = sum(annotation == "Any" for annotation in annotations)
    loose_count = sum(a == "object" or bool(_ANY.search(a)) for a in annotations)

    breaches = []
    if any_count > MAX_ANY_SHARE * len(annotations):
        breaches.append(
            f"{any_count} of {len(annotations)} parameters are Any; the limit is"
            f" {MAX_ANY_SHARE:.0%}. trainer_kit/typing.py has types for several libraries"
        )
    if loose_count > MAX_LOOSE_SHARE * len(annotations):
        breaches.append(
            f"{loose_count} of {len(annotations)} parameters contain Any or are object; the limit"
            f" is {MAX_LOOSE_SHARE:.0%}"
        )
    return breaches


def no_bare_participles(sources: Sequence[SourceFile]) -> list[str]:
    """No function is named by a participle alone: it is a verb with an object, or a question."""
    return [
        f"{source.module}:{function.lineno} {function.name} is a bare participle; name what the"
        " function does to what"
        for source in _select_package(sources)
        for function in source.functions
        if _PARTICIPLE.fullmatch(function.name)
        and function.name.removeprefix("_") not in _NO_PARTICIPLES
    ]


PageRule = Callable[[Sequence[SourceFile]], list[str]]
PAGE_RULES: tuple[PageRule, ...] = (
    nodes_per_line,
    nodes_per_statement,
    few_functions_in_constructors,
    few_parameters_of_type_any,
    no_bare_participles,
)


def _select_package(sources: Sequence[SourceFile]) -> list[SourceFile]:
    """Returns the modules of the package. Its experiments are written as those of users."""
    return [
        source
        for source in sources
        if source.module.split(".")[0] == PACKAGE
        and not f"{source.module}.".startswith(f"{PACKAGE}.experiments.")
    ]


def _check_average(place: str, nodes: int, count: int, limit: float) -> list[str]:
    average = nodes / max(1, count)
    if average <= limit:
        return []
    return [
        f"{place} has {average:.2f} syntax nodes on average; the limit is {limit}. Name the steps"
        " of dense statements"
    ]


def _iterate_annotations(source: SourceFile) -> Iterator[ast.expr]:
    for node in source.nodes:
        if isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            for parameter in [*parameters, arguments.vararg, arguments.kwarg]:
                if parameter is not None and parameter.annotation is not None:
                    yield parameter.annotation
            if node.returns is not None:
                yield node.returns


def _iterate_function_aliases(tree: ast.Module) -> Iterator[str]:
    """Yields the names that a module gives to types of functions."""
    for node in tree.body:
        target: ast.expr
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if (
            isinstance(target, ast.Name)
            and node.value is not None
            and _CALLABLE.match(ast.unparse(node.value))
        ):
            yield target.id


def _iterate_constructors(source: SourceFile) -> Iterator[tuple[str, int, list[ast.expr]]]:
    """Yields (class, line, annotations of what it takes) of constructors and dataclasses."""
    for node in source.nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
            yield node.name, node.lineno, [field.annotation for field in fields]
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                annotations = [parameter.annotation for parameter in _list_parameters(method)]
                yield node.name, method.lineno, [a for a in annotations if a is not None]


def _list_parameters(function: Function) -> list[ast.arg]:
    """Returns the named parameters of a function without self and cls."""
    arguments = function.args
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [parameter for parameter in parameters if parameter.arg not in ("self", "cls")]
