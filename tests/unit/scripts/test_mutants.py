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
def test_only_a_test_that_fails_kills_a_mutant(end: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(_ENDS[end])
    assert mutants.run_tests(str(tmp_path), ["test_one.py"], 2.0 if end == "timeout" else 60.0) == end


def test_tests_that_fail_without_a_mutant_judge_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "outcome", lambda mutant, tests, limit: "survives" if mutant else "killed")
    with pytest.raises(SystemExit):
        mutants.main(["--count=1"])
    assert "the chosen tests do not pass on the source as it is (killed)" in capsys.readouterr().err


def test_a_package_is_judged_by_the_tests_that_import_from_it() -> None:
    assert "tests/unit/errors/test_user_frames.py" not in mutants.tests_of(Path("trainer_kit/errors/__init__.py"))
    found = mutants.tests_of(Path("trainer_kit/testing/__init__.py"))
    assert "tests/process/end_to_end/test_kills.py" in found and len(found) > 1
