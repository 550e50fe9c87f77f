"""The script that runs Model Garden's own tests: what it counts, and that it finds a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import model_garden_tests
from scripts.model_garden_tests import (
    PASSED,
    SKIPPED,
    Outcomes,
    Row,
    parse_listed_tests,
    run_in_processes,
    table,
)
from tests.fork_server import ForkServer

FILE = "core/registry_test.py"


def _row(**ours: str) -> Row:
    theirs = Outcomes(dict.fromkeys(("T.test_a", "T.test_a_gpu", "T.test_b"), PASSED))
    return Row(FILE, theirs, Outcomes({**theirs.tests, **ours}), frozenset({"T.test_a"}))


def test_a_test_that_fails_with_trainer_kit_alone_is_unexpected() -> None:
    row = _row(**{"T.test_a_gpu": "ValueError: no", "T.test_b": "ValueError: no"})
    assert row.expected_differences == ["T.test_a_gpu"]
    assert row.unexpected_differences == ["T.test_b"]
    assert row.outdated_entries == []
    assert table([row])[2].startswith(f"| `{FILE}` | 3 | 3 | 1 | 1 | 1 |")


def test_a_test_in_the_docs_that_passes_is_reported() -> None:
    assert _row().outdated_entries == ["T.test_a"]
    assert _row().unexpected_differences == []


def test_the_docs_are_read() -> None:
    text = "| test | |\n|---|---|\n| `core/train_lib_test.py` | `TrainTest.test_x` | because |\n"
    assert parse_listed_tests(text) == {"core/train_lib_test.py": frozenset({"TrainTest.test_x"})}


def test_model_gardens_modules_are_replaced_and_a_failure_found(tmp_path: Path) -> None:
    pytest.importorskip("official.core.registry_test")
    with ForkServer() as server:  # the file needs little of what the script imports for all
        theirs = run_in_processes(server, FILE, False, tmp_path)
        end = server.run(_run_with_a_broken_registry, str(tmp_path / "broken.jsonl"))

    assert set(theirs.tests.values()) <= {PASSED, SKIPPED}
    assert len(theirs.get_passed_tests()) >= 3
    assert not theirs.problem
    assert end.code == 0, end.text
    results = model_garden_tests.read_results(tmp_path / "broken.jsonl")
    assert "RuntimeError: broken" in results.values()


def _run_with_a_broken_registry(results: str) -> None:
    from official.core import registry, train_lib

    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    registry.lookup = fail
    modules = model_garden_tests.replace_modules()
    assert "run_experiment" in modules["official.core.train_lib"].ours
    assert train_lib.run_experiment.__module__.startswith("trainer_kit.")
    model_garden_tests.run_file(FILE, False, results)
