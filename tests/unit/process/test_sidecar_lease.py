"""What a sidecar tells the trainer beside it, and what the trainer makes of it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainer_kit.errors import ModelDirInUseError, UsageError
from trainer_kit.evals.ledger import Ledger
from trainer_kit.process.sidecar_lease import LEASE_SECONDS, Lease, LeaseReader

STEPS = [10, 20, 30, 40]


def _create_lease(run: Path, name: str = "side", record: str | None = None) -> Lease:
    return Lease(run / "evals", name, lambda: ("evaluate", 20), record_path=record)


def _create_reader(run: Path, max_wait: int = 20) -> LeaseReader:
    return LeaseReader(run / "evals", max_wait)


def test_unevaluated_checkpoints_and_the_one_being_read_stay(tmp_path: Path) -> None:
    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=20, reading_step=10)
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {10, 30, 40}
        lease.protect_checkpoints(after_step=20, reading_step=20)
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {20, 30, 40}
        lease.protect_checkpoints(after_step=20, reading_step=None)
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30, 40}
        lease.protect_checkpoints(after_step=None, reading_step=30)
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30}

    assert _create_reader(tmp_path).select_protected_steps(STEPS) == set()  # it is done


def test_a_new_sidecar_needs_all_and_a_resumed_one_the_old_needs(
    tmp_path: Path,
) -> None:
    with _create_lease(tmp_path) as lease:
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == set(STEPS)
        lease.protect_checkpoints(after_step=20, reading_step=30)

    with _create_lease(tmp_path):
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30, 40}


def test_of_several_sidecars_each_gets_what_it_needs(tmp_path: Path) -> None:
    with _create_lease(tmp_path, "one") as first, _create_lease(tmp_path, "two") as second:
        first.protect_checkpoints(after_step=None, reading_step=10)
        second.protect_checkpoints(after_step=30, reading_step=None)
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {10, 40}


def test_the_limit_is_kept_and_the_first_loss_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leases = _create_reader(tmp_path, max_wait=2)

    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=0, reading_step=10)
        with caplog.at_level(logging.WARNING):
            assert leases.select_protected_steps(STEPS) == {10, 30, 40}
            assert leases.select_protected_steps([*STEPS, 50]) == {10, 40, 50}

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "ckpt-20 is removed before side has evaluated it"
    ]


def test_after_a_rewind_a_sidecar_needs_all_from_there_on(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "evals/validation.jsonl", dataset="validation", config_hash="a")
    leases = LeaseReader(tmp_path / "evals", 20, ledger)
    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=30, reading_step=40)
        assert leases.select_protected_steps(STEPS) == {40}
        for step in (30, 20):
            ledger.rewind(step)
        assert leases.select_protected_steps(STEPS) == {20, 30, 40}
        lease.protect_checkpoints(after_step=30, reading_step=None, lineage=2)
        assert leases.select_protected_steps(STEPS) == {40}
        lease.protect_checkpoints(after_step=None, reading_step=40, lineage=0)
        assert leases.select_protected_steps(STEPS) == {40}


def test_with_a_limit_of_0_only_the_one_being_read_stays(tmp_path: Path) -> None:
    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=0, reading_step=10)
        assert _create_reader(tmp_path, max_wait=0).select_protected_steps(STEPS) == {10}


_KILLED = """
import os, signal, sys
from trainer_kit.process.sidecar_lease import Lease
lease = Lease(sys.argv[1] + "/evals", "side", lambda: ("evaluate", 0))
lease.__enter__().protect_checkpoints(20, 30)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_sidecar_that_was_killed_may_come_back_for_a_while(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)]).returncode == -9
    assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30, 40}

    long_ago = time.time() - LEASE_SECONDS - 1

    os.utime(tmp_path / "evals/side.lease.json", (long_ago, long_ago))

    assert _create_reader(tmp_path).select_protected_steps(STEPS) == set()

    with _create_lease(tmp_path):
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30, 40}


def test_another_machines_clock_may_be_ahead(tmp_path: Path) -> None:
    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=20, reading_step=None)
        ahead = time.time() + 3600
        os.utime(tmp_path / "evals/side.lease.json", (ahead, ahead))
        assert _create_reader(tmp_path).select_protected_steps(STEPS) == {30, 40}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"after": 0}'])
def test_a_lease_that_is_torn_or_anothers_counts_for_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals/side.lease.json").write_text(text)

    assert _create_reader(tmp_path).select_protected_steps(STEPS) == set()


def test_the_second_sidecar_of_a_name_is_refused_with_advice(tmp_path: Path) -> None:
    with (
        _create_lease(tmp_path),
        pytest.raises(ModelDirInUseError, match=rf"'side' runs .*pid {os.getpid()}.*--eval_name"),
    ):
        _create_lease(tmp_path).__enter__()


def test_a_lease_is_a_heartbeat(tmp_path: Path) -> None:
    with _create_lease(tmp_path) as lease:
        lease.protect_checkpoints(after_step=20, reading_step=30)
        heartbeat = json.loads((tmp_path / "evals/side.lease.json").read_text())

    assert heartbeat.keys() >= {"host", "started", "beat"}

    expected = {
        "pid": os.getpid(),
        "phase": "evaluate",
        "step": 20,
        "ended": None,
        "after": 20,
        "reads": 30,
    }
    assert expected.items() <= heartbeat.items()


@pytest.mark.parametrize("users_files", [[], ["mine.txt"]])
def test_an_end_before_the_first_evaluation_leaves_nothing(
    tmp_path: Path, users_files: list[str]
) -> None:
    for name in users_files:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).touch()

    with pytest.raises(UsageError), _create_lease(tmp_path / "run", record="missing"):
        raise UsageError("of the metric's name")

    assert (tmp_path / "run").exists() == bool(users_files)
    assert [path.name for path in (tmp_path / "run").glob("*")] == users_files
