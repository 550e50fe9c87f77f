"""Changes single places of trainer_kit, drawn by chance, and says which changes no test notices.

    python -m scripts.mutants --count=40 --seed=1            runs the tests of the changed module
    python -m scripts.mutants --only=3,17 --tests=tests      runs other tests on chosen mutants,
    here all of them

Each mutant lives in a copy of the checkout. It is killed by the first test that fails. A mutant
that no test kills is printed with its place: either a test is missing, or the change makes no
difference that anybody could see. The chosen tests first run on the source as it is, where they
have to pass. Tests that end in another way, such as by an error before the first test or by their
time limit, are counted by themselves.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from scripts.source_files import ROOT

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
}
_LOGS = ("_LOG.", "warnings.warn", "print")  # calls whose absence only a reader of the log notices
_COPIED = ("trainer_kit", "tests", "scripts", "configs", "docs")
_LIMITS = {
    False: 300,
    True: 3600,
}  # seconds for the tests of a mutant, which may hang; with --tests
_SURVIVES = "survives"
_KILLED = "killed"
_TIMEOUT = "timeout"


@dataclass(frozen=True)
class Mutant:
    """A change of one place: the source text `before` at `line` of `path` becomes `after`."""

    path: Path
    line: int
    begin: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before = " ".join(self.before.split())[:90]
        after = " ".join(self.after.split())[:90]
        return f"{self.path}:{self.line}: {before}  ->  {after}"

    def apply(self, text: str) -> str:
        """Returns the text of the file with the change."""
        data = text.encode()
        return (data[: self.begin] + self.after.encode() + data[self.end :]).decode()


def generate_mutants(path: Path, text: str) -> Iterator[Mutant]:
    """Yields every mutant of a file, in the order of the file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _nodes(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = text.encode()[begin:end].decode()
        if (after := _mutate_node(node)) is not None:
            yield Mutant(path, node.lineno, begin, end, before, after)


def _nodes(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yields the nodes that run: no annotations, docstrings, errors' texts or log calls."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(
            child,
            (ast.Import, ast.ImportFrom, ast.Raise, ast.AnnAssign, ast.JoinedStr, ast.arguments),
        ):
            continue
        if isinstance(child, ast.Expr) and ast.unparse(child).startswith(_LOGS):
            continue
        if isinstance(child, (ast.expr, ast.stmt)):
            yield child
        yield from _nodes(child)


def _mutate_node(node: ast.expr | ast.stmt) -> str | None:
    """Returns the source of a changed node; None for a node that is not changed."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        swapped: list[ast.cmpop] = [_SWAPPED[type(node.ops[0])](), *node.ops[1:]]  # type: ignore[list-item]
        return f"({ast.unparse(ast.Compare(node.left, swapped, node.comparators))})"
    if isinstance(node, ast.BoolOp):
        return f"({ast.unparse(ast.BoolOp(_SWAPPED[type(node.op)](), node.values))})"  # type: ignore[arg-type]
    if (
        isinstance(node, ast.BinOp)
        and type(node.op) in _SWAPPED
        and not isinstance(node.left, ast.Constant)
    ):
        return f"({ast.unparse(ast.BinOp(node.left, _SWAPPED[type(node.op)](), node.right))})"  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.unparse(node.operand)})"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value + 1)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "pass"
    if (
        isinstance(node, ast.Return)
        and node.value is not None
        and not isinstance(node.value, ast.Constant)
    ):
        return "return None"
    return None


def draw_mutants(count: int, seed: int) -> list[Mutant]:
    """Returns `count` mutants of trainer_kit.

    The same ones for the same seed and the same source.
    """
    everything = []
    for path in sorted((ROOT / "trainer_kit").rglob("*.py")):
        everything += list(generate_mutants(path.relative_to(ROOT), path.read_text()))
    return random.Random(seed).sample(everything, count)


def find_tests(path: Path) -> list[str]:
    """Returns the test files of a module.

    That is its own one, else those that import it, else all of its folder.
    """
    inside = path.relative_to("trainer_kit")
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    own = sorted((ROOT / "tests").glob(f"*/{inside.with_name(f'test_{inside.stem}.py')}"))
    users = [
        test_path
        for test_path in sorted((ROOT / "tests").rglob("test_*.py"))
        if f"from {module} import" in test_path.read_text()
    ]
    paths = own or users or sorted((ROOT / "tests").glob(f"*/{inside.parent}/test_*.py"))
    return [str(test_path.relative_to(ROOT)) for test_path in paths or [ROOT / "tests"]]


def try_mutant(mutant: Mutant | None, tests: Sequence[str], limit: float) -> str:
    """Returns how `tests` end within `limit` seconds on a copy of the checkout.

    The copy has the mutant, if there is one.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        for name in _COPIED:
            shutil.copytree(
                ROOT / name, Path(folder, name), ignore=shutil.ignore_patterns("__pycache__")
            )
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, folder)
        if mutant is not None:
            changed = Path(folder, mutant.path)
            changed.write_text(mutant.apply(changed.read_text()))
        return run_tests(folder, tests, limit)


def run_tests(folder: str, tests: Sequence[str], limit: float) -> str:
    """Returns how `tests` of `folder` end.

    It is "survives", "killed", "timeout", or "exit" and pytest's other exit code.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    nothing = subprocess.DEVNULL
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing,
        start_new_session=True,
    ) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return _TIMEOUT
        finally:  # with what the tests have started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {0: _SURVIVES, 1: _KILLED}.get(code, f"exit {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws mutants, runs their tests two at a time, and prints how each ends.

    Returns 1 if one survives.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scripts.mutants", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument(
        "--count", type=int, default=40, help="the number of mutants (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="draws the mutants (default: %(default)s)"
    )
    parser.add_argument("--only", help="numbers of the drawn mutants to try, separated by commas")
    parser.add_argument(
        "--tests", help="what pytest runs, in place of the tests of the changed module"
    )
    options = parser.parse_args(arguments)
    chosen = list(enumerate(draw_mutants(options.count, options.seed), 1))
    if options.only:
        chosen = [(number, one) for number, one in chosen if str(number) in options.only.split(",")]
    tests = [
        options.tests.split() if options.tests else find_tests(mutant.path) for _, mutant in chosen
    ]
    unchanged = try_mutant(None, sorted({test for group in tests for test in group}), _LIMITS[True])
    if unchanged != _SURVIVES:
        parser.error(
            f"the chosen tests do not pass on the source as it is ({unchanged}), so they can judge"
            " no mutant"
        )
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(2) as pool:
        limits = [_LIMITS[bool(options.tests)]] * len(chosen)
        results = pool.map(try_mutant, [one for _, one in chosen], tests, limits)
        for (number, mutant), outcome in zip(chosen, results, strict=True):
            counts[outcome] += 1
            print(
                f"{number:3d} {outcome.upper() if outcome == _SURVIVES else outcome:8} {mutant}",
                flush=True,
            )
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{len(chosen)} mutants: {summary}")
    return 1 if counts[_SURVIVES] else 0


if __name__ == "__main__":
    sys.exit(main())
