"""Runs that are stopped early although they are killed, or train on two workers: real processes, real signals."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.end_to_end.killed_experiment import killed_at
from tests.process.end_to_end.test_workers import SECONDS, free_hosts
from tests.process.end_to_end.test_workers import arguments as workers_arguments
from tests.process.end_to_end.workers_experiment import LOOP, worker
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.testing import ForkServer, compare_runs

KILLED, WORKERS = "tests.process.end_to_end.killed_experiment", "tests.process.end_to_end.workers_experiment"
NEVER_BETTER = "{metric: validation_loss, metric_comp: lower, min_delta: 100.0, patience: 2}"

# What kills the run, one after the other: in its second evaluation, and in its third, which ends it, before its line is
# in the ledger; when the line is there and the last checkpoint is not; while that is written; before the end is noted.
# Each start counts its own evaluations and checkpoints.
KILLS = (
    ("ledger.append", 2),
    ("ledger.append", 2),
    ("checkpoint.save", 1),
    ("checkpoint.record.rename", 1),
    ("final.rename", 1),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([KILLED, WORKERS]) as started:
        yield started


def _arguments(folder: Path) -> list[str]:
    common = [f"--import_module={KILLED}", "--experiment=killed", "--mode=train_and_eval", f"--model_dir={folder}"]
    return [*common, f"--params_override=trainer: {{checkpoint_interval: 10, early_stopping: {NEVER_BETTER}}}"]


def _evaluated(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "evals/validation.jsonl").read_text().splitlines()]


def _final(folder: Path) -> tuple[int, str]:
    final = json.loads((folder / "final.json").read_text())
    return final["step"], final["stopped"]


def test_kills_change_neither_the_stop_step_nor_the_bits(server: ForkServer, tmp_path: Path) -> None:
    whole, hit, seen = tmp_path / "whole", tmp_path / "hit", []
    uninterrupted = server.start("train", *_arguments(whole))
    for point, occurrence in KILLS:
        death = server.run(killed_at, point, occurrence, f"{hit}.points", *_arguments(hit))
        assert death.code == -signal.SIGKILL, (point, death.text)
        seen.append((_evaluated(hit)[-1], max(complete_checkpoints(str(hit)))))
    assert seen == [(15, 30), (30, 40), (45, 40), (45, 45), (45, 45)]
    last = server.run("train", *_arguments(hit))
    assert last.code == 0, last.text
    ended = uninterrupted.wait()
    assert ended.code == 0, ended.text
    assert "the run ends at step 45: validation_loss has not improved" in ended.text
    assert _final(whole) == _final(hit)
    assert _final(whole)[0] == 45
    assert compare_runs(whole, hit) == []


def test_two_workers_are_stopped_together_by_the_chiefs_ledger(server: ForkServer, tmp_path: Path) -> None:
    early = f"--params_override=trainer: {{early_stopping: {NEVER_BETTER}, train_steps: {4 * LOOP}}}"
    hosts = free_hosts(2)
    children = [server.start(worker, hosts, own, *workers_arguments(tmp_path), early) for own in (0, 1)]
    for child in children:
        ended = child.wait(SECONDS)
        assert ended.code == 0, ended.text
        assert f"the run ends at step {3 * LOOP}: " in ended.text
    assert _final(tmp_path)[0] == 3 * LOOP
