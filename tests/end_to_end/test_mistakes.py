"""The mistakes of scripts/mistakes.py, each through the real command."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.mistakes import MISTAKES, Mistake, commit


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "_"))
def test_a_mistake_gets_one_clear_message_its_exit_code_and_leaves_nothing(mistake: Mistake, tmp_path: Path) -> None:
    outcome = commit(mistake, tmp_path)
    assert outcome.code == mistake.code, outcome.text
    assert mistake.expected in outcome.text
    assert "Traceback" not in outcome.text
    assert outcome.written == []


def test_the_mistakes_have_names_of_their_own() -> None:
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) >= 30
