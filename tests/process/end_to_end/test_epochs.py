"""A run of two epochs that is killed in the second one counts on, and ends with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import train_and_die_at
from trainer_kit.files import read_json_lines
from trainer_kit.testing import compare_runs

MODULE = "tests.process.end_to_end.epochs_experiment"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([MODULE]) as fork_server:
        yield fork_server


# What kills the run, and the step that the next start goes on from. With a Source: after the save
# at the end of an epoch and before its epoch_end, then inside the second epoch; with a dataset that
# ends: inside the second epoch.
KILLS: dict[str, tuple[tuple[str, int, int], ...]] = {
    "task.plain=false,trainer.checkpoint_interval=1": (
        ("ledger.append", 1, 11),
        ("checkpoint.save", 2, 13),
    ),
    "task.plain=true": (("checkpoint.save", 4, 13),),
}


@pytest.mark.parametrize(("overrides", "last"), list(zip(KILLS, (21, 22), strict=True)))
def test_a_kill_in_an_epoch_changes_no_bit_and_no_count(
    server: ForkServer, tmp_path: Path, overrides: str, last: int
) -> None:
    whole = tmp_path / "whole"
    hit = tmp_path / "hit"
    flags = [f"--import_module={MODULE}", "--experiment=epochs", "--mode=train_and_eval"]
    flags.append(f"--params_override={overrides}")
    uninterrupted = server.start("train", *flags, f"--model_dir={whole}")
    step = 0
    for point, occurrence, start in KILLS[overrides]:
        death = server.run(
            train_and_die_at, point, occurrence, f"{hit}.points", *flags, f"--model_dir={hit}"
        )
        assert death.code == -signal.SIGKILL, death.text
        assert f"train_and_eval from step {step}" in death.text
        step = start
    hit_end = server.run("train", *flags, f"--model_dir={hit}")
    whole_end = uninterrupted.wait()

    assert whole_end.code == hit_end.code == 0, whole_end.text + hit_end.text
    assert f"train_and_eval from step {step}" in hit_end.text
    assert compare_runs(whole, hit) == []
    events = (hit / "epochs.txt").read_text().splitlines()
    assert events == (whole / "epochs.txt").read_text().splitlines()
    expected = ["begin 1 at 0", "end 1 at 11", "begin 2 at 11", f"end 2 at {last}"]
    assert [event.split(":")[0] for event in events] == expected
    places = {
        line["step"]: (line["epoch"], line["step_in_epoch"])
        for line in read_json_lines(hit / "metrics.jsonl")
    }
    assert places[11] == (1, 11)
    assert places[13] == (2, 2)
    assert places[last] == (2, last - 11)
