"""The tests that judge a mutant, and how they may end."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import mutants

_ENDS = {
    "survives": "def test_it() -> None: ...",
    "killed": "def test_it() -> None:\n    assert False",
    "timeout": "import time\n\ndef test_it() -> None:\n    time.sleep(60)",
    "exit 2": "raise ValueError('the module cannot be imported')",
}


@pytest.mark.parametrize("end", _ENDS)
def test_only_a_test_that_fails_kills_a_mutant(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Half of the time that pytest takes to start.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_one.py").write_text(_ENDS[end])

    assert (
        mutants.run_tests(str(tmp_path), ["test_one.py"], 0.5 if end == "timeout" else 60.0) == end
    )
