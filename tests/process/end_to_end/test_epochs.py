"""A run of two epochs that is killed inside the second one counts on, and ends with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.end_to_end.killed_experiment import killed_at
from trainer_kit.files import read_lines
from trainer_kit.testing import ForkServer, compare_runs

MODULE = "tests.process.end_to_end.epochs_experiment"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([MODULE]) as started:
        yield started


@pytest.mark.parametrize(
    ("overrides", "point", "occurrence", "start", "last"),
    [
        ("task.plain=false", "checkpoint.save", 4, 13, 21),
        ("task.plain=true", "checkpoint.save", 4, 13, 22),
        # After the save at the end of an epoch, and before epoch_end of it.
        ("trainer.checkpoint_interval=1 epoch", "ledger.append", 1, 11, 21),
    ],
)
def test_a_kill_in_an_epoch_changes_no_bit_and_no_count(
    server: ForkServer, tmp_path: Path, overrides: str, point: str, occurrence: int, start: int, last: int
) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    flags = [f"--import_module={MODULE}", "--experiment=epochs", "--mode=train_and_eval"]
    flags.append(f"--params_override={overrides}")
    uninterrupted = server.start("train", *flags, f"--model_dir={whole}")
    death = server.run(killed_at, point, occurrence, f"{hit}.points", *flags, f"--model_dir={hit}")
    assert death.code == -signal.SIGKILL, death.text
    again, ended = server.run("train", *flags, f"--model_dir={hit}"), uninterrupted.wait()
    assert ended.code == again.code == 0, ended.text + again.text
    assert f"train_and_eval from step {start}" in again.text
    assert compare_runs(whole, hit) == []
    noted = (hit / "epochs.txt").read_text().splitlines()
    assert noted == (whole / "epochs.txt").read_text().splitlines()
    ends = ["begin 1 at 0", "end 1 at 11", "begin 2 at 11", f"end 2 at {last}"]
    assert [line.split(":")[0] for line in noted] == ends
    places = {line["step"]: (line["epoch"], line["step_in_epoch"]) for line in read_lines(hit / "metrics.jsonl")}
    assert places[11] == (1, 11) and places[13] == (2, 2) and places[last] == (2, last - 11)
