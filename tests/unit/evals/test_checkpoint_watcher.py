"""The order of checkpoints, what becomes of removed ones, and what a wait in vain reports."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_kit.errors import NothingToWaitForError
from trainer_kit.evals import checkpoint_watcher
from trainer_kit.evals.checkpoint_watcher import CheckpointWatcher


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_watcher, "_POLL_SECONDS", 0.01)


class Run:
    """Stands for a Sidecar. A test sets its answers."""

    def __init__(self, ended: bool = True) -> None:
        self.ended = ended
        self.on_record: set[int] = set()
        self.back: list[int] = []
        self.beats = 0
        self.needs: list[tuple[int | None, int | None]] = []
        self.on_need: Callable[[int | None], None] = lambda reads: None

    def is_finished(self) -> bool:
        return self.ended

    def describe_trainer(self) -> str:
        return "the trainer is gone"

    def get_evaluated_steps(self) -> set[int]:
        return self.on_record

    def poll_rewind(self) -> int | None:
        return self.back.pop() if self.back else None

    def is_alive(self) -> bool:
        self.beats -= 1
        return self.beats >= 0

    def protect_checkpoints(self, after: int | None, reads: int | None) -> None:
        self.needs.append((after, reads))
        self.on_need(reads)


def _save(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"ckpt-{step}.index").touch()


def _remove(folder: Path, step: int) -> None:
    (folder / f"ckpt-{step}.index").unlink()


def _follow(
    folder: Path, run: Any, timeout: float | None = 0, newest_only: bool = False
) -> Iterator[int]:
    arrivals = CheckpointWatcher(str(folder), timeout, run, newest_only)
    for path in arrivals.follow(lambda: False, contextlib.nullcontext):
        yield int(path.rpartition("-")[2])


def test_all_come_in_order_and_are_pinned_before_they_are_read(tmp_path: Path) -> None:
    _save(tmp_path, 100, 9, 20)
    run = Run()

    assert list(_follow(tmp_path, run)) == [9, 20, 100]
    assert run.needs == [(8, 9), (19, 20), (99, 100), (100, None)]


def test_what_is_on_record_does_not_come_again(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30)
    run = Run()
    run.on_record = {10, 20}

    assert list(_follow(tmp_path, run)) == [30]

    run.on_record = {10, 20, 30}
    assert list(_follow(tmp_path, run)) == []


def test_what_comes_meanwhile_is_taken_up_to_the_last(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    run = Run(ended=False)
    steps = []

    for step in _follow(tmp_path, run):
        steps.append(step)
        if step < 50:
            _save(tmp_path, step + 10)
        run.ended = step == 50

    assert steps == [10, 20, 30, 40, 50]


def test_the_newest_comes_next_and_what_is_left_out_is_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 10, 20)
    run = Run(ended=False)
    steps = []

    with caplog.at_level(logging.INFO):
        for step in _follow(tmp_path, run, newest_only=True):
            steps.append(step)
            if step == 20:
                _save(tmp_path, 30, 40, 50)
            run.ended = step == 50

    assert steps == [20, 50]

    first, second, *_ = [record.getMessage() for record in caplog.records]
    assert "ckpt-10" in first
    assert "ckpt-30, ckpt-40" in second
    assert "3 skipped in all" in second
    assert run.needs == [(None, 20), (None, 50), (None, None)]


def test_a_checkpoint_removed_too_early_is_logged_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 10, 20, 30)
    run = Run()

    follow = _follow(tmp_path, run)

    assert next(follow) == 10

    _remove(tmp_path, 20)

    with caplog.at_level(logging.WARNING):
        assert list(follow) == [30]

    assert "ckpt-20: removed before evaluation (1 in all)" in caplog.text


def test_one_that_goes_while_it_is_asked_for_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, 10, 20)

    def remove_when_read(reads: int) -> None:
        if reads == 10:
            _remove(tmp_path, 10)

    run = Run()
    run.on_need = remove_when_read

    with caplog.at_level(logging.WARNING):
        assert list(_follow(tmp_path, run)) == [20]

    assert "ckpt-10: removed before" in caplog.text


def test_a_run_that_goes_back_saves_the_same_steps_again(tmp_path: Path) -> None:
    _save(tmp_path, 10, 20, 30)
    run = Run()

    follow = _follow(tmp_path, run)

    assert [next(follow), next(follow), next(follow)] == [10, 20, 30]

    run.back = [10]
    assert list(follow) == [20, 30]


def test_a_wait_ends_after_the_time_without_a_sign_of_life(tmp_path: Path) -> None:
    run = Run(ended=False)
    run.beats = 3

    with pytest.raises(NothingToWaitForError):
        list(_follow(tmp_path, run))

    assert run.beats < 0  # as long as it beat, no timeout counted


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (None, "the folder does not exist"),
        ([], "the folder is empty"),
        (["model.h5", "notes"], "the folder holds no checkpoint, only model.h5, notes"),
        (["ckpt-7.index", "ckpt-12.index"], "ckpt-12 is the newest, and was handled"),
    ],
)
def test_a_wait_in_vain_tells_where_it_looked_and_what_was_there(
    tmp_path: Path, files: list[str] | None, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    if files is not None:
        folder.mkdir()
    for name in files or []:
        (folder / name).touch()

    with pytest.raises(
        NothingToWaitForError,
        match=rf"continuous_eval_timeout\) in {folder}: {told}; the trainer is gone",
    ):
        list(_follow(folder, Run(ended=False), timeout=0.01))

    with caplog.at_level(logging.INFO), pytest.raises(NothingToWaitForError):
        list(_follow(folder, Run(ended=False), timeout=0.02))

    assert f"waiting for a checkpoint in {folder}: {told}; the trainer is gone" in caplog.text


def test_a_stop_ends_it(tmp_path: Path) -> None:
    _save(tmp_path, 10)
    run: Any = Run(ended=False)
    arrivals = CheckpointWatcher(str(tmp_path), None, run)

    assert list(arrivals.follow(lambda: True, contextlib.nullcontext)) == []
