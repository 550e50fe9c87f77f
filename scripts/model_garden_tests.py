"""Model Garden's own tests, run with its modules and with those of trainer_kit in their place.

    .venv/bin/python -m scripts.model_garden_tests [FILE ...] [--theirs] [--jobs=N] [--logs=FOLDER]

The tests are those of the installed package; nothing of them is kept here. Each file runs twice,
each time in a process of its own: once as it is, once with the names that
trainer_kit.compat.model_garden offers put into Model Garden's modules. A test that passes in the
first run has to pass in the second, or its name has to stand in the table of
docs/guides/porting_differences.md, with the reason why trainer_kit is meant to differ. Any other
test makes the exit code 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import re
import socket
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fork_server import ForkServer

FILES = (
    "core/train_lib_test.py",
    "core/base_trainer_test.py",
    "core/train_utils_test.py",
    "core/actions_test.py",
    "core/registry_test.py",
    "common/distribute_utils_test.py",
    "modeling/multitask/base_trainer_test.py",
    "modeling/multitask/evaluator_test.py",
    "modeling/multitask/interleaving_trainer_test.py",
    "modeling/multitask/task_sampler_test.py",
    "modeling/multitask/train_lib_test.py",
    "nlp/continuous_finetune_lib_test.py",
)
_DOOR = "trainer_kit.compat.model_garden"
# Where each module of Model Garden finds the names of trainer_kit. A name that only Model Garden
# has stays.
REPLACED = {
    **{
        f"official.{name}": _DOOR
        for name in (
            *("core.train_lib", "core.base_trainer", "core.train_utils", "core.actions"),
            "common.distribute_utils",
        )
    },
    **{
        f"official.modeling.multitask.{name}": f"{_DOOR}.multitask"
        for name in ("train_lib", "base_trainer", "interleaving_trainer", "evaluator")
    },
}
NEEDS = (
    "official.common.registry_imports",
    "official.core.train_lib",
    "official.modeling.multitask.train_lib",
)
_DOCS = Path(__file__).parents[1] / "docs" / "guides" / "porting_differences.md"
_LISTED = re.compile(r"^\| `(\S+_test\.py)` \| `(\w+\.\w+)` \|")
TIME_LIMIT = 300.0  # seconds for one process
PASSED = "passed"
SKIPPED = "skipped"
CRASHED = "its process ended"


@dataclass
class Outcomes:
    """How the tests of one file ended.

    Attributes:
      tests: "passed", "skipped" or the last line of the error, by the name Class.method.
      problem: why the file, or the rest of it, did not run; "" if all of it ran.
      seconds: how long it took.
    """

    tests: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    def get_passed_tests(self) -> set[str]:
        """Returns the names of the tests that passed."""
        return {name for name, outcome in self.tests.items() if outcome == PASSED}


@dataclass(frozen=True)
class Row:
    """One file of the table: its tests with Model Garden alone, and with trainer_kit's names."""

    file: str
    theirs: Outcomes
    ours: Outcomes
    listed: frozenset[str]

    @property
    def differing_tests(self) -> list[str]:
        """The names of the tests that pass with Model Garden alone, but not with trainer_kit."""
        return sorted(self.theirs.get_passed_tests() - self.ours.get_passed_tests())

    @property
    def expected_differences(self) -> list[str]:
        """The differing tests that the docs list.

        A listed name stands for all parameters of a test.
        """
        return [
            name
            for name in self.differing_tests
            if any(_matches_listed_test(name, listed_name) for listed_name in self.listed)
        ]

    @property
    def unexpected_differences(self) -> list[str]:
        """The differing tests that the docs do not list."""
        return [name for name in self.differing_tests if name not in self.expected_differences]

    @property
    def outdated_entries(self) -> list[str]:
        """The names listed in the docs for which no test differs."""
        return [
            listed_name
            for listed_name in sorted(self.listed)
            if not any(_matches_listed_test(name, listed_name) for name in self.differing_tests)
        ]

    def format_cells(self) -> tuple[str, ...]:
        """Returns the file's cells in the table."""
        ran = sum(outcome != SKIPPED for outcome in self.theirs.tests.values())
        both = len(self.theirs.get_passed_tests() & self.ours.get_passed_tests())
        numbers = (
            ran,
            len(self.theirs.get_passed_tests()),
            both,
            len(self.expected_differences),
            len(self.unexpected_differences),
        )
        seconds = f"{self.theirs.seconds:.0f} + {self.ours.seconds:.0f}"
        return (f"`{self.file}`", *map(str, numbers), seconds)


def _matches_listed_test(name: str, test: str) -> bool:
    return name == test or name.startswith((f"{test}_", f"{test}0", f"{test}1"))


@dataclass(frozen=True)
class ModuleNames:
    """The public names of a Model Garden module: the replaced ones, and those that are its own."""

    ours: list[str]
    theirs: list[str]


def replace_modules() -> dict[str, ModuleNames]:
    """Puts trainer_kit's names into Model Garden's modules in this process.

    Returns module -> Replaced.
    """
    replacements = {}
    for theirs, ours in REPLACED.items():
        module = importlib.import_module(theirs)
        door = importlib.import_module(ours)
        public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        offered = {name: getattr(door, name) for name in public if name in door.__all__}
        replaced = [name for name, value in offered.items() if value is not public[name]]
        own = [name for name, value in public.items() if getattr(value, "__module__", "") == theirs]
        replacements[theirs] = ModuleNames(replaced, [name for name in own if name not in replaced])
        vars(module).update(offered)
    return replacements


def print_names() -> None:
    """Prints, for each module, which names are trainer_kit's when the tests run."""
    for module, names in replace_modules().items():
        left = f"; still Model Garden's: {', '.join(names.theirs)}" if names.theirs else ""
        print(f"{module}: trainer_kit's {', '.join(names.ours)}{left}")


def run_file(file: str, replaced: bool, results: str) -> None:
    """Runs the tests of one file in this process.

    Appends a line of JSON for each test to the file `results`.

    A test that `results` already has is not run again.
    """
    from absl import flags

    if (
        importlib.util.find_spec("portpicker") is None
    ):  # one test file needs it; it does not come with Model Garden
        sys.modules["portpicker"] = types.ModuleType("portpicker")
        vars(sys.modules["portpicker"])["pick_unused_port"] = _free_port
    if replaced:
        replace_modules()
    sys.argv = [file]
    module = importlib.import_module("official." + file.removesuffix(".py").replace("/", "."))
    flags.FLAGS([file, f"--test_tmpdir={results}.tmp"])
    done = read_results(results)
    with open(results, "a", encoding="utf-8", buffering=1) as stream:
        tests = [
            test
            for test in _iterate_tests(unittest.defaultTestLoader.loadTestsFromModule(module))
            if _name(test) not in done
        ]
        runner = unittest.TextTestRunner(
            sys.stdout, verbosity=2, resultclass=functools.partial(_Result, stream)
        )
        runner.run(unittest.TestSuite(tests))
    sys.stdout.flush()
    os._exit(0)  # servers of a cluster in this process never end


def read_results(path: str | os.PathLike[str]) -> dict[str, str]:
    """Returns the outcomes that `run_file` has written."""
    if not os.path.exists(path):
        return {}
    with open(path, encoding="utf-8") as stream:
        return dict(json.loads(line) for line in stream)


def _iterate_tests(suite: Any) -> Iterator[unittest.TestCase]:
    for item in suite:
        yield from _iterate_tests(item) if isinstance(item, unittest.TestSuite) else [item]


def _name(test: unittest.TestCase) -> str:
    return test.id().rpartition("_test.")[2]


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


class _Result(unittest.TextTestResult):
    """Writes each outcome as soon as it is known."""

    def __init__(self, stream: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lines = stream

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._outcome = PASSED
        self._lines.write(
            json.dumps([_name(test), CRASHED]) + "\n"
        )  # the last line of a test counts

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        self._lines.write(json.dumps([_name(test), self._outcome]) + "\n")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._outcome = SKIPPED

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._outcome = _one_line(err)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._outcome = _one_line(err)

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._outcome = _one_line(err)


def _one_line(error: Any) -> str:
    text = " ".join(str(error[1]).split())
    return f"{error[0].__name__}: {text[:300]}"


def run_in_processes(server: ForkServer, file: str, replaced: bool, folder: Path) -> Outcomes:
    """Runs the tests of one file in a separate process, and returns their outcomes.

    After a test that ends the process, or takes too long, the remaining tests run in another
    process.
    """
    results = folder / f"{file.replace('/', '.')}.{'ours' if replaced else 'theirs'}.jsonl"
    results.unlink(missing_ok=True)
    log = results.with_suffix(".log")
    begin = time.monotonic()
    outcomes = Outcomes()
    log.write_text("", encoding="utf-8")
    while True:
        problem, text = _run_in_process(server, file, replaced, str(results))
        with log.open("a", encoding="utf-8") as stream:
            stream.write(text)
        known_count = len(outcomes.tests)
        outcomes.tests = read_results(results)
        if not problem or len(outcomes.tests) == known_count:
            break
    outcomes.seconds = time.monotonic() - begin
    outcomes.problem = problem and f"{problem}; see {log}"
    return outcomes


def _run_in_process(server: ForkServer, *arguments: Any) -> tuple[str, str]:
    """Runs tests in one process; returns the problem ("" if none) and the output."""
    try:
        ended = server.run(run_file, *arguments, timeout=TIME_LIMIT)
    except TimeoutError as error:
        return f"did not end within {TIME_LIMIT:g} s", str(error)
    return "" if ended.code == 0 else f"ended with {ended.code}", ended.text


def parse_listed_tests(text: str) -> dict[str, frozenset[str]]:
    """Returns the tests that are meant to differ, by file, as Class.method."""
    matches = [match.groups() for line in text.splitlines() if (match := _LISTED.match(line))]
    return {
        file: frozenset(test for other, test in matches if other == file) for file, _ in matches
    }


def table(rows: Sequence[Row]) -> list[str]:
    """Returns the lines of the table, with the sums."""
    head = (
        "file",
        "tests",
        "Model Garden passed",
        "trainer_kit passed",
        "meant to differ",
        "unexpected",
        "seconds",
    )
    cells = [row.format_cells() for row in rows]
    sums = [str(sum(int(row_cells[column]) for row_cells in cells)) for column in range(1, 6)]
    their_seconds = sum(row.theirs.seconds for row in rows)
    our_seconds = sum(row.ours.seconds for row in rows)
    seconds = f"{their_seconds:.0f} + {our_seconds:.0f}"
    lines = [head, ("---", *["---:"] * 6), *cells, ("all", *sums, seconds)]
    return [f"| {' | '.join(line)} |" for line in lines]


def describe_problems(row: Row) -> list[str]:
    """Returns lines about a file's problems and differences, and outdated entries in the docs."""
    lines = [
        f"{row.file}: {kind}: {outcomes.problem}"
        for kind, outcomes in (("Model Garden", row.theirs), ("trainer_kit", row.ours))
        if outcomes.problem
    ]
    lines += [
        f"{row.file}: {name}: {row.ours.tests.get(name, 'did not run')}"
        for name in row.unexpected_differences
    ]
    return lines + [
        f"{row.file}: {name} is listed in {_DOCS.name}, but does not differ"
        for name in row.outdated_entries
    ]


def main(arguments: Sequence[str]) -> int:
    """Prints the table and the unexpected differences; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="test files below the package `official`; default: FILES",
    )
    parser.add_argument(
        "--theirs", action="store_true", help="run Model Garden alone, and print what fails there"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="number of parallel processes",
    )
    parser.add_argument("--logs", default=None, help="folder for the logs; default: a new one")
    options = parser.parse_args(arguments)
    files = [path.partition("official/")[2] or path for path in options.files] or list(FILES)
    folder = Path(options.logs or tempfile.mkdtemp(prefix="model_garden_tests_"))
    folder.mkdir(parents=True, exist_ok=True)
    listed = parse_listed_tests(_DOCS.read_text(encoding="utf-8"))
    with ForkServer(needs=NEEDS) as server, ThreadPoolExecutor(options.jobs) as pool:
        runs = {
            (file, ours): pool.submit(run_in_processes, server, file, ours, folder)
            for file in files
            for ours in ((False,) if options.theirs else (False, True))
        }
        rows = []
        for file in files:
            theirs = runs[file, False].result()
            ours = theirs if options.theirs else runs[file, True].result()
            rows.append(Row(file, theirs, ours, listed.get(file, frozenset())))
            for line in describe_problems(rows[-1]):
                print(line, flush=True)
        said = "" if options.theirs else server.run(print_names).text
    print("\n".join(line for line in said.splitlines() if line.startswith("official.")))
    print("\n".join(table(rows)))
    return int(any(row.unexpected_differences for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
