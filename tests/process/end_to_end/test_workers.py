"""Two workers as two real processes, which talk over loopback and share a model_dir: nothing is
lost, come what may.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import final_record, free_hosts, json_lines, read_json, wait_until
from tests.fork_server import Ended, ForkServer, train
from tests.process.end_to_end.workers_experiment import (
    LOOP,
    STEPS,
    TRAIN_STEPS,
    hasty_worker,
    hit_worker,
    watched_worker,
    worker,
)
from trainer_kit.files import read_json_lines
from trainer_kit.process.run_lock import RunLock
from trainer_kit.testing import compare_runs

EXPERIMENT = "tests.process.end_to_end.workers_experiment"
SECONDS = 120.0  # the most that one process may take
# Seconds in which a worker has to notice that another one is gone; TensorFlow's heartbeats take 10
SURVIVAL = 30.0

# What happens, one after the other, to a run of STEPS steps: which worker is hit, by what, and
# when.
HITS = (
    (1, signal.SIGTERM, "on_step", 13),  # of step 13: the loop is cut when both agree, at step 20
    (0, signal.SIGKILL, "on_step", 45),  # of step 65, after the checkpoint of step 40
    (1, signal.SIGKILL, "on_step", 50),  # of step 90, after that of step 80
    (0, signal.SIGTERM, "on_batch", 3),  # in the last evaluation
)


@dataclass(frozen=True)
class Runs:
    """One run that nothing has happened to, and one that was hit; how both workers ended, at each
    start.
    """

    whole: Path
    whole_ends: list[Ended]
    changed_by_other: str
    hit: Path
    hit_ends: list[list[Ended]]
    copies: list[list[str]]  # the checkpoints of the second worker that are left after each hit


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """What starts the workers."""
    with ForkServer([EXPERIMENT]) as fork_server:
        yield fork_server


@pytest.fixture(scope="module")
def runs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Both runs, on the same two ports, one after the other."""
    base = tmp_path_factory.mktemp("workers")
    hosts = free_hosts(2)

    whole = base / "whole"
    notes = base / "notes.txt"
    starts = [
        server.start(worker, hosts, 0, *arguments(whole)),
        server.start(watched_worker, hosts, 1, str(notes), str(whole), *arguments(whole)),
    ]
    whole_ends = [start.wait(SECONDS) for start in starts]

    hit = base / "hit"
    hit_ends: list[list[Ended]] = []
    copies: list[list[str]] = []
    for index, number, moment, count in HITS:
        children = [
            server.start(hit_worker, hosts, own, int(number), moment, count, *arguments(hit))
            if own == index
            else server.start(worker, hosts, own, *arguments(hit))
            for own in (0, 1)
        ]
        children[index].wait(SECONDS)
        hit_ends.append([child.wait(SURVIVAL) for child in children])
        copies.append(sorted(path.name for path in hit.glob("workers/1/checkpoints/ckpt-*.index")))
    children = [server.start(worker, hosts, own, *arguments(hit)) for own in (0, 1)]
    hit_ends.append([child.wait(SECONDS) for child in children])
    return Runs(whole, whole_ends, notes.read_text(), hit, hit_ends, copies)


def arguments(
    folder: Path, experiment: str = "normalized", mode: str = "train_and_eval"
) -> Sequence[str]:
    return (
        f"--import_module={EXPERIMENT}",
        f"--experiment={experiment}",
        f"--mode={mode}",
        f"--model_dir={folder}",
    )


def starting_steps(ends: list[list[Ended]], index: int) -> list[int]:
    matches = [re.search(r"train_and_eval from step (\d+)", end[index].text) for end in ends]
    return [int(match[1]) if match else -1 for match in matches]


def test_two_workers_train_and_only_the_chief_writes(runs: Runs) -> None:
    chief, other = runs.whole_ends
    assert (chief.code, other.code) == (0, 0), chief.text + other.text
    assert "replicas in sync: 2" in chief.text
    assert f"train | step {STEPS}/{TRAIN_STEPS}" in chief.text
    assert f"validation | step {STEPS}/{TRAIN_STEPS}" in chief.text
    assert "train | step" not in other.text

    own_folder = f"{runs.whole}/workers"
    assert [line for line in runs.changed_by_other.splitlines() if own_folder not in line] == []
    assert not any((runs.whole / "workers").rglob("*"))
    assert len(list(runs.whole.glob("train/events*"))) == 1

    names = {path.name for path in runs.whole.glob("ckpt-*.index")}
    assert names == {f"ckpt-{STEPS}.index", "ckpt-80.index"}
    assert len(list(runs.whole.glob("export/*/saved_model.pb"))) == 1


def test_two_workers_are_stopped_together_by_the_chiefs_ledger(runs: Runs) -> None:
    for end in (*runs.whole_ends, *runs.hit_ends[-1]):
        assert f"the run ends at step {STEPS}: " in end.text, end.text
    assert final_record(runs.whole)["step"] == STEPS
    assert final_record(runs.hit)["step"] == STEPS


def test_two_workers_evaluate_what_their_checkpoint_holds(
    runs: Runs, server: ForkServer, tmp_path: Path
) -> None:
    folder = shutil.copytree(runs.whole, tmp_path / "alone")
    override = "--params_override=runtime.distribution_strategy=auto"

    end = server.start(train, *arguments(folder, mode="eval"), override).wait(SECONDS)

    assert end.code == 0, end.text
    record = json_lines(folder / "evals/validation.jsonl")[-1]
    record_of_one = json_lines(folder / "evals/eval.jsonl")[-1]
    assert record["step"] == record_of_one["step"] == STEPS
    assert record_of_one["metrics"] == pytest.approx(record["metrics"], rel=1e-6)


def test_logs_of_one_worker_are_not_aggregated(server: ForkServer, tmp_path: Path) -> None:
    hosts = free_hosts(2)
    starts = [
        server.start(worker, hosts, own, *arguments(tmp_path, "aggregating")) for own in (0, 1)
    ]
    ends = [start.wait(SECONDS) for start in starts]

    message = "AggregatingTask.aggregate_logs gets only the logs of one worker's replicas"
    for end in ends:
        assert end.code == 2, end.text
        assert f"error: {message}" in end.text
    assert not list(tmp_path.glob("ckpt-*"))


def test_a_signal_to_either_worker_stops_both_at_the_same_step(runs: Runs) -> None:
    for start, index, step in ((0, 1, LOOP // 2), (3, 0, STEPS)):
        end = runs.hit_ends[start][index]
        other_end = runs.hit_ends[start][1 - index]
        assert end.code == 75, end.text
        assert other_end.code == 75, other_end.text
        assert f"stopped by SIGTERM at step {step};" in end.text
        message = f"another worker was asked to stop; this one stopped at step {step};"
        assert message in other_end.text


def test_a_worker_whose_peer_was_killed_ends_soon_with_exit_75(runs: Runs) -> None:
    for start, index in ((1, 0), (2, 1)):
        end = runs.hit_ends[start][index]
        other_end = runs.hit_ends[start][1 - index]
        assert end.code == -signal.SIGKILL, end.text
        assert other_end.code == 75, other_end.text
        assert f"worker {index} is gone" in other_end.text


def test_stopped_and_killed_workers_keep_the_same_bits(runs: Runs) -> None:
    assert [end.code for end in runs.hit_ends[-1]] == [0, 0], runs.hit_ends[-1][0].text
    for index in (0, 1):
        assert starting_steps(runs.hit_ends, index) == [0, LOOP // 2, LOOP, 2 * LOOP, STEPS]
    assert compare_runs(runs.whole, runs.hit) == []

    changes = [
        line["metrics"]
        for line in read_json_lines(runs.hit / "metrics.jsonl")
        if line["kind"] == "change"
    ]
    # From steps LOOP and 2 * LOOP on.
    assert changes == [{"learning_rate": 0.02}, {"learning_rate_factor": 0.1}]


def test_both_workers_refuse_other_data(runs: Runs, server: ForkServer, tmp_path: Path) -> None:
    folder = shutil.copytree(runs.whole, tmp_path / "run")
    manifest = read_json(folder / "manifest.json")
    assert (manifest["replicas"], manifest["workers"]) == (2, 2)
    manifest["data"]["task.train_data"]["array 1"] = "other labels"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    hosts = free_hosts(2)

    children = [server.start(worker, hosts, own, *arguments(folder)) for own in (0, 1)]
    ends = [child.wait(SECONDS) for child in children]

    message = "the data has changed since this run began: array 1 was other labels"
    for end in ends:
        assert end.code == 2
        assert f"task.train_data: {message}" in end.text


def test_the_worker_of_a_refused_chief_waits_until_sigterm(
    server: ForkServer, tmp_path: Path
) -> None:
    hosts = free_hosts(2)
    with RunLock(tmp_path):
        other = server.start(worker, hosts, 1, *arguments(tmp_path))
        chief = server.run(worker, hosts, 0, *arguments(tmp_path), timeout=SECONDS)
        assert chief.code == 4, chief.text
        assert f"{tmp_path} is in use" in chief.text
        # The chief that trains may be about to end.
        wait_until(lambda: "waits for all 2 workers" in other.text)

    other.kill(signal.SIGTERM)
    other_end = other.wait(10)

    assert other_end.code == 75, other_end.text
    assert "train_and_eval" not in other_end.text


def test_a_killed_worker_leaves_one_copy_which_goes_away(runs: Runs) -> None:
    # It was killed after it had saved steps 40 and 80.
    assert runs.copies == [[], [], [f"ckpt-{2 * LOOP}.index"], []]


def test_workers_with_other_configs_are_told_what_differs(
    server: ForkServer, tmp_path: Path
) -> None:
    hosts = free_hosts(2)
    flags = arguments(tmp_path / "run")
    override = "--params_override=trainer.train_steps=80,runtime.random_seed=7,task.width=9"

    children = [
        server.start(worker, hosts, 0, *flags),
        server.start(worker, hosts, 1, *flags, override),
    ]
    ends = [child.wait(SECONDS) for child in children]

    for end in ends:
        assert end.code == 2, end.text
        for line in (
            "trainer.train_steps: 80 on worker 1, but 160 on worker 0; "
            "start all workers with one config",
            "runtime.random_seed: 7 on worker 1, but 1 on worker 0",
            "task.width: 9 on worker 1, but 16 on worker 0",
        ):
            assert line in end.text
    assert not (tmp_path / "run").exists()


def test_a_worker_with_another_model_dir_says_so(server: ForkServer, tmp_path: Path) -> None:
    hosts = free_hosts(2)
    children = [
        server.start(hasty_worker, hosts, own, *arguments(tmp_path / f"{own}")) for own in (0, 1)
    ]
    chief_end, other_end = (child.wait(SECONDS) for child in children)

    assert chief_end.code == 2, chief_end.text
    assert other_end.code == 2, other_end.text
    message = f"worker 0 trains in another folder than {tmp_path}/1; all need one shared"
    assert f"model_dir: {message}" in other_end.text
    assert not (tmp_path / "1").exists()
