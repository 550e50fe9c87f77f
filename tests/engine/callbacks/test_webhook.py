"""The events that the webhook hears of in real runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.webhook import Webhook
from trainer_kit.errors import PreemptedError
from trainer_kit.files import read_json
from trainer_kit.run.launcher import launch


class _Told(Webhook):
    """Keeps what would be posted."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9/")
        self.told: list[tuple[str, Mapping[str, Any]]] = []

    def _post(self, run: Run, status: str, text: str, record: Mapping[str, Any]) -> None:
        self.told.append((status, record))


class _Ends(Callback):
    """Ends the run at step 10: by a stop request, or by an error."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step == 10:
            if self._fails:
                raise RuntimeError("a bug")
            run.trainer.request_stop()


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    return ReadyTrainer(linear_experiment(), LinearTask)


def test_a_run_is_told_once_when_its_record_is_written(ready: ReadyTrainer, tmp_path: Path) -> None:
    first = _Told()
    again = _Told()

    for webhook in (first, again):
        launch(
            linear_experiment(),
            "train_and_eval",
            str(tmp_path),
            callbacks=[webhook],
            trainer=ready.again(),
            enable_async_checkpointing=False,
        )

    assert first.told == [("finished", read_json(tmp_path / "final.json"))]
    assert again.told == []  # there was nothing to do


def test_an_error_is_told_and_a_preemption_is_not(ready: ReadyTrainer, tmp_path: Path) -> None:
    webhook = _Told()

    with pytest.raises(PreemptedError):
        launch(
            linear_experiment(),
            "train",
            str(tmp_path / "preempted"),
            callbacks=[webhook, _Ends(fails=False)],
            enable_async_checkpointing=False,
        )

    assert webhook.told == []

    config = linear_experiment()
    callbacks = [webhook, _Ends(fails=True)]

    with pytest.raises(RuntimeError):
        launch(
            config,
            "train",
            str(tmp_path / "failed"),
            callbacks=callbacks,
            trainer=ready.again(),
            enable_async_checkpointing=False,
        )

    ((status, record),) = webhook.told
    assert status == "failed"
    assert record["error"] == "RuntimeError: a bug"
    assert record["exit_code"] == 1
