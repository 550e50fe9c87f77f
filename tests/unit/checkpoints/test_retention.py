"""Which older checkpoints stay, by steps and by the times of their saves."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from trainer_kit.checkpoints.retention import first_of_each_interval, first_of_each_period
from trainer_kit.files import write_json


def test_the_first_checkpoint_after_each_multiple_is_kept() -> None:
    assert first_of_each_interval(100, range(30, 331, 30)) == {120, 210, 300}
    assert first_of_each_interval(Fraction(103, 10), [5, 10, 11, 15, 21, 31]) == {11, 21, 31}


def test_the_same_ones_are_kept_when_the_others_are_gone() -> None:
    assert first_of_each_interval(100, {120, 210, 300, 330}) == {120, 210, 300}


@pytest.mark.parametrize("in_record", [True, False])
def test_by_time_one_checkpoint_stays_for_each_hour(tmp_path: Path, in_record: bool) -> None:
    for step, minutes in ((10, 1), (20, 51), (30, 66), (40, 111), (50, 131)):
        path = tmp_path / f"ckpt-{step}.index"
        path.touch()
        if in_record:  # a copy of the folder has new times of files
            write_json(path.with_suffix(".commit.json"), {"files": {}, "time": 60 * minutes})
        else:
            os.utime(path, (60 * minutes, 60 * minutes))

    assert first_of_each_period(str(tmp_path), 3600, [10, 20, 30, 40, 50, 60]) == {10, 30, 50}
