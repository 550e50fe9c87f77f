"""Pieces of the Markdown pages that are made from the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_ORIGIN = (
    "<!-- Made from the code. Do not edit: change the code, then run `python -m scripts.reference`."
    " -->"
)


def page(title: str, lines: Iterable[str]) -> str:
    """Returns a page: its title, a note that it is made from the code, and the lines."""
    return "\n".join([f"# {title}", "", _ORIGIN, "", *lines]) + "\n"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Returns the lines of a table."""
    cells = [[escape_html(cell).replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in [headers, ["---"] * len(headers), *cells]]


def escape_html(text: str) -> str:
    """Returns a text with `<` escaped outside of code, so that `<name>` is not HTML."""
    parts = text.split("`")
    return "`".join(
        part if number % 2 else part.replace("<", "&lt;") for number, part in enumerate(parts)
    )
