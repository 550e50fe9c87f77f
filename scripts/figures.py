"""Prints the size of the package: files, code lines and longest function of each floor, tests, annotations, docstrings.

    .venv/bin/python -m scripts.figures

How things are measured is said in source_files.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scripts.house import FLOORS, PACKAGE, floor_of
from scripts.source_files import Source, documented, is_annotated, length, read_sources


def main() -> None:
    """Prints the figures of this checkout."""
    house, experiments, scripts = read_sources(PACKAGE), read_sources("experiments"), read_sources("scripts")
    print(f"{'floor':<22}{'files':>6}{'lines':>8}{'longest file':>14}   longest function")
    for floor in reversed(FLOORS):
        _print_row(floor, [s for s in house if floor_of(s.module) == floor])
    _print_row("front door", [s for s in house if s.module == PACKAGE])
    _print_row(PACKAGE, house)
    _print_row("experiments", experiments)
    _print_row("scripts", scripts)
    _print_row("tests", tests := read_sources("tests"))
    _print_shares([*house, *experiments], tests)


def _print_row(name: str, sources: Sequence[Source]) -> None:
    lines = [source.code_lines for source in sources]
    longest = max(((length(f), f.name, s.module) for s in sources for f in s.functions), default=(0, "-", "-"))
    function = f"{longest[0]:4} {longest[1]} ({longest[2]})"
    print(f"{name:<22}{len(lines):>6}{sum(lines):>8}{max(lines, default=0):>14}   {function}")


def _print_shares(source: Sequence[Source], tests: Sequence[Source]) -> None:
    functions = [function for one in source for function in one.functions]
    annotated = [function for function in functions if is_annotated(function)]
    public, missing = documented(source)
    source_lines, test_lines = (sum(one.code_lines for one in group) for group in (source, tests))
    print(f"\nof {PACKAGE} and experiments:")
    print(f"test lines per source line   {test_lines / max(source_lines, 1):.2f}  ({test_lines} / {source_lines})")
    print(f"fully annotated functions    {_percent(len(annotated), len(functions))}")
    print(f"public names with docstring  {_percent(public - len(missing), public)}")
    sizes = [one.code_lines for one in source if one.code_lines]
    lengths = [length(function) for function in functions]
    print(f"lines of a file              {_spread(sizes)}")
    print(f"lines of a function          {_spread(lengths)}")


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %  ({part} of {whole})"


def _spread(values: Sequence[int]) -> str:
    if len(values) < 2:
        return "-"
    return (
        f"median {statistics.median(values):.0f}, p90 {statistics.quantiles(values, n=10)[-1]:.0f}, max {max(values)}"
    )


if __name__ == "__main__":
    main()
