"""The table of contenders, and the choice of what is measured."""

from __future__ import annotations

import pytest

from scripts import bench
from scripts.benchmarks.contenders import SECTIONS
from scripts.benchmarks.results import CONTROL, Section


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_a_section_has_its_references_and_a_control(section: Section) -> None:
    rows = {contender.name: contender for contender in section.contenders}
    references = {section.get_reference(contender) for contender in section.contenders}
    goals = {name for contender in section.contenders for name in contender.goals}

    assert len(rows) == len(section.contenders)
    assert references | goals <= set(rows)
    assert rows[CONTROL].run == rows[section.base].run
    assert rows[CONTROL].options == rows[section.base].options


def test_only_selects_sections_and_rows() -> None:
    conv, dense = bench.select_sections(SECTIONS, "dense/ours,conv", is_quick=False, rounds=None)[
        ::-1
    ]

    assert [contender.name for contender in dense.contenders] == ["by_hand", "again", "ours"]
    assert conv in SECTIONS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only=dense/nothing"], "--only: there is no 'dense/nothing'; did you mean dense"),
        (["--only="], "--only: there is no ''; see --list"),
        (["--only=variables"], "there is no 'variables'; see --list, or --list --growth"),
        (["--rounds=0"], "--rounds: 0 is less than 1"),
    ],
)
def test_a_mistake_in_the_arguments_ends_before_measuring(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)

    assert caught.value.code == 2
    assert message in capsys.readouterr().err
