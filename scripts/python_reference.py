"""The page of the public Python names, read from the source without importing it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from scripts.markdown import escape_html, page, table
from scripts.source_files import ROOT, Function

PACKAGES = {
    "trainer_kit": "What most programs use. `import trainer_kit as tk`.",
    "trainer_kit.compat.keras": (
        "Keras's `fit` and loops by hand; see [Coming from Keras](../guides/from_keras.md)."
    ),
    "trainer_kit.compat.pipelines": (
        "Components of a pipeline; see [the guide](../guides/from_pipelines.md)."
    ),
    "trainer_kit.testing": "For tests of your own tasks and callbacks.",
}
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises):$")
_ENTRY = re.compile(r"^  (\*{0,2}\w[\w, *]*): ?(.*)$")
_COLUMNS = {
    "Args": ("argument", "meaning"),
    "Attributes": ("attribute", "meaning"),
    "Raises": ("error", "when"),
}
_WIDTH = 100


def render_python_page(config_page: str) -> str:
    """Returns the page of the public names, package by package.

    It links to the fields on the page of the config.
    """
    lines = [
        "The names that programs may rely on. Task, Trainer and Callback are for subclasses of"
        " your own."
    ]
    for package, about in PACKAGES.items():
        lines += ["", f"## {package}", "", about]
        for name, module in public_names(package).items():
            lines += ["", *_describe_name(name, module, f"Class: `{name}`" in config_page)]
    return page("Python", lines)


def public_names(package: str) -> dict[str, str]:
    """Returns a dict from the public names of a package to the modules that define them."""
    tree = ast.parse((_path(package)).read_text(encoding="utf-8"))
    homes = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and "_HOME" in _targets(node)
    )
    prefix = "trainer_kit" if package == "trainer_kit.testing" else package
    return {name: f"{prefix}.{module}" for name, module in ast.literal_eval(homes).items()}


def _path(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _targets(node: ast.stmt) -> list[str]:
    """Returns the names that a statement assigns to."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [
        name_node.id
        for target in targets
        for name_node in ast.walk(target)
        if isinstance(name_node, ast.Name)
    ]


def _describe_name(name: str, module: str, is_linked: bool) -> Iterator[str]:
    """Yields the lines of a name: a function, a class with its public methods, or a constant."""
    for node in ast.parse(_path(module).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield from _class(node, is_linked)
        elif (
            isinstance(node, Function) and node.name == name and ast.get_docstring(node)
        ):  # no overload
            yield from _function(f"### `{name}`", node)
        elif name in _targets(node):
            yield from (f"### `{name}`", "", f"A constant of `{module}`.")


def _class(node: ast.ClassDef, is_linked: bool) -> Iterator[str]:
    constructor = next(
        (
            member
            for member in node.body
            if isinstance(member, Function) and member.name == "__init__"
        ),
        None,
    )
    yield from (f"### `{node.name}`", "")
    if constructor is not None:
        yield from ("```python", _signature(node.name, constructor, returns=False), "```", "")
    elif node.bases:
        yield from (
            f"A subclass of {', '.join(f'`{ast.unparse(base)}`' for base in node.bases)}.",
            "",
        )
    doc = ast.get_docstring(node) or ""
    if is_linked:
        yield from _prose(doc.split("\n\nAttributes:")[0].splitlines())
        yield from ("", "Its fields are on the page of [the config](config.md).")
        return
    yield from _docstring(doc)
    for member in node.body:
        if (
            isinstance(member, Function)
            and not member.name.startswith("_")
            and ast.get_docstring(member)
        ):
            yield ""
            yield from _function(f"#### `{node.name}.{member.name}`", member)


def _function(heading: str, node: Function) -> Iterator[str]:
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    yield from (heading, "")
    if not decorators & {"property", "setter", "cached_property"}:
        yield from ("```python", _signature(node.name, node), "```", "")
    yield from _docstring(ast.get_docstring(node) or "")


def _signature(name: str, node: Function, *, returns: bool = True) -> str:
    """Returns a signature without self and cls; a long one has each argument on its own line."""
    whole = node.args
    first = [*whole.posonlyargs, *whole.args]
    defaults = [None] * (len(first) - len(whole.defaults)) + [*whole.defaults]
    parts = [
        _argument(argument, default) for argument, default in zip(first, defaults, strict=True)
    ]
    parts = (
        parts[1:] if parts[:1] in (["self"], ["cls"]) else parts
    )  # without a type: that of a method
    parts += (
        [f"*{_argument(whole.vararg, None)}"] if whole.vararg else ["*"] if whole.kwonlyargs else []
    )
    parts += [
        _argument(argument, default)
        for argument, default in zip(whole.kwonlyargs, whole.kw_defaults, strict=True)
    ]
    parts += [f"**{_argument(whole.kwarg, None)}"] if whole.kwarg else []
    end = f" -> {ast.unparse(node.returns)}" if returns and node.returns else ""
    line = f"{name}({', '.join(parts)}){end}"
    return (
        line
        if len(line) <= _WIDTH
        else f"{name}(\n" + "".join(f"    {argument},\n" for argument in parts) + f"){end}"
    )


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    value = "" if default is None else f"{' = ' if kind else '='}{ast.unparse(default)}"
    return f"{argument.arg}{kind}{value}"


def _docstring(text: str) -> Iterator[str]:
    """Yields a docstring as Markdown: its paragraphs, and its sections as tables."""
    title = ""
    lines = list[str]()
    for line in [
        *inspect.cleandoc(text).splitlines(),
        "Returns:",
    ]:  # the heading of another section ends the last one
        if not (heading := _SECTION.match(line)):
            lines.append(line)
            continue
        yield from _section(title, "\n".join(lines).rstrip().split("\n"))
        title = heading[1]
        lines = []


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if title in ("Returns", "Yields"):
        yield from ("", f"**{title}** {escape_html(' '.join(' '.join(lines).split()))}")
    elif title:
        yield from ("", *table(_COLUMNS[title], _entries(lines)))
    else:
        yield from _prose(lines)


def _entries(lines: list[str]) -> list[tuple[str, str]]:
    """Returns the entries of a section, each with its text in one line.

    A long list of names may go on in the next.
    """
    joined = re.sub(r"\n {4,}", " ", "\n".join(line for line in lines if line.strip())).split("\n")
    matches = [match for line in joined if (match := _ENTRY.match(line))]
    return [
        (", ".join(f"`{name}`" for name in match[1].split(", ")), match[2]) for match in matches
    ]


def _prose(lines: list[str]) -> Iterator[str]:
    yield from (escape_html(line) if not line.startswith("    ") else line for line in lines)
