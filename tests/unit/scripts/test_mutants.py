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
def test_only_a_test_that_fails_kills_a_mutant(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # half of the time that pytest takes to start
    (tmp_path / "test_one.py").write_text(_ENDS[end])
    assert mutants.run_tests(str(tmp_path), ["test_one.py"], 0.5 if end == "timeout" else 60.0) == end


def test_tests_that_fail_without_a_mutant_judge_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trainer_kit").mkdir()  # the checkout takes a second to read
    (tmp_path / "trainer_kit" / "one.py").write_text("def half(number: float) -> float:\n    return number / 2\n")
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "outcome", lambda mutant, tests, limit: "survives" if mutant else "killed")
    with pytest.raises(SystemExit):
        mutants.main(["--count=1"])
    assert "the chosen tests do not pass on the source as it is (killed)" in capsys.readouterr().err
