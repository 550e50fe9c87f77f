"""Hyper-parameters from a file that is edited during the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.builders import curve
from tests.engine.linear_task import LinearTask, linear_experiment
from tests.engine.run.ready_trainer import ReadyTrainer
from trainer_kit.callbacks.callback import Callback, Run
from trainer_kit.callbacks.set_from_file import SetFromFile
from trainer_kit.callbacks.set_value import SetAtSteps
from trainer_kit.files import read_json_lines
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.metrics_jsonl import read_active_history


class Hand(Callback):
    """Writes the file at the end of loops, and takes the run back once if it should."""

    def __init__(self, texts: dict[int, str], back: tuple[int, int] | None = None) -> None:
        self._texts = texts
        self._back = back

    def loop_end(self, run: Run, logs: Any) -> None:
        if run.step in self._texts:
            Path(run.directory, "hyper_parameters.yaml").write_text(self._texts[run.step])
        if self._back and run.step == self._back[0]:
            run.rewind(self._back[1], "the test says so")

    def rewound(self, run: Run, step: int) -> None:
        self._back = None


@pytest.fixture(scope="module")
def ready() -> ReadyTrainer:
    return ReadyTrainer(linear_experiment(), LinearTask)


def _run(
    folder: Path, ready: ReadyTrainer, *hand: Any, train_steps: int = 20
) -> list[tuple[int, dict[str, float]]]:
    config = linear_experiment(train_steps=train_steps)
    callbacks = [Hand(*hand), SetFromFile()]
    launch(
        config,
        "train",
        str(folder),
        callbacks=callbacks,
        trainer=ready.again(),
        enable_async_checkpointing=False,
    )
    lines = [
        line for line in read_active_history(folder / "metrics.jsonl") if line["kind"] == "change"
    ]
    return [(line["step"], line["metrics"]) for line in lines]


def test_an_edit_counts_from_the_next_loop_on(ready: ReadyTrainer, tmp_path: Path) -> None:
    first = "learning_rate: 1e-3\n"
    second = "learning_rate: 1e-3\nlearning_rate_factor: 0.5\n"

    changes = _run(tmp_path, ready, {5: first, 15: second})

    assert changes == [(5, {"learning_rate": 0.001}), (15, {"learning_rate_factor": 0.5})]

    rates = curve(tmp_path / "metrics.jsonl", "learning_rate", "train")
    assert rates == [
        (step, pytest.approx(rate))
        for step, rate in [(5, 0.01), (10, 0.001), (15, 0.001), (20, 0.0005)]
    ]


def test_a_file_that_cannot_be_used_changes_nothing(
    ready: ReadyTrainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {
        "learning_rate: fast": "'fast' is not a number",
        "learning_rate: 1e39": "1e+39 is not a finite number of the dtype float32",
        "learning_rate_factor: 0.5\nlearnin_rate: 1": "did you mean learning_rate",
        "[1]": "write lines such as learning_rate: 0.001",
        "a: [": "hyper_parameters.yaml",
    }
    texts = dict(zip(range(5, 30, 5), told, strict=True))

    assert _run(tmp_path, ready, texts, train_steps=30) == []

    warnings = [
        record.getMessage() for record in caplog.records if "changes nothing" in record.getMessage()
    ]
    assert [
        message in warning for message, warning in zip(told.values(), warnings, strict=True)
    ] == [True] * len(told)


def test_steps_that_are_repeated_write_each_change_once(
    ready: ReadyTrainer, tmp_path: Path
) -> None:
    hand = Hand({15: "learning_rate_factor: 0.5"}, (15, 10))
    callbacks = [hand, SetAtSteps("learning_rate", [[10, 1e-3]]), SetFromFile()]

    launch(
        linear_experiment(),
        "train",
        str(tmp_path),
        callbacks=callbacks,
        trainer=ready.again(),
        enable_async_checkpointing=False,
    )
    lines = [
        line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "change"
    ]

    assert [(line["step"], line["metrics"], line["reason"]) for line in lines] == [
        (10, {"learning_rate": 0.001}, "set_at_steps"),
        (10, {"learning_rate_factor": 0.5}, "hyper_parameters.yaml"),
    ]


def test_after_a_rewind_the_file_is_read_at_once(ready: ReadyTrainer, tmp_path: Path) -> None:
    assert _run(tmp_path, ready, {15: "learning_rate: 0.5"}, (20, 10)) == [
        (10, {"learning_rate": 0.5})
    ]

    records = [
        (record["step"], record["lineage"])
        for record in read_json_lines(tmp_path / "hyper_parameters.jsonl")
    ]
    assert records == [(15, 0), (10, 1)]
