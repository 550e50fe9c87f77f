"""A user's callback from Python, from a config file and from gin; its reports, its time, its state after kills."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

from tests.process.end_to_end.callbacks_experiment import WeightNorm
from tests.process.end_to_end.killed_experiment import killed, killed_at
from trainer_kit.files import read_lines
from trainer_kit.run.launcher import launch
from trainer_kit.testing import ForkServer, compare_runs

MODULE = "tests.process.end_to_end.callbacks_experiment"
YAML = "trainer: {callbacks: [{name: weight_norm, args: {every: 10}}]}\n"
GIN = "TrainerConfig.callbacks = [{'name': 'weight_norm', 'args': {'every': 10}}]\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([MODULE]) as started:
        yield started


def _arguments(folder: Path, *more: str) -> list[str]:
    common = [f"--import_module={MODULE}", "--experiment=with_callback", "--mode=train_and_eval"]
    return [*common, f"--model_dir={folder}", *more]


def _norms(folder: Path) -> dict[int, float]:
    lines = [line for line in read_lines(folder / "metrics.jsonl") if line["kind"] == "train"]
    return {line["step"]: line["metrics"]["weight_norm"] for line in lines if "weight_norm" in line["metrics"]}


@pytest.mark.parametrize("source", ["yaml", "gin", "python"])
def test_a_users_callback_reports_and_its_time_is_counted(server: ForkServer, tmp_path: Path, source: str) -> None:
    run, written = tmp_path / "run", tmp_path / f"callbacks.{source}"
    if source == "python":
        launch(killed(), "train_and_eval", str(run), callbacks=[WeightNorm(every=10)])
    else:
        written.write_text(YAML if source == "yaml" else GIN)
        flag = "--config_file" if source == "yaml" else "--gin_file"
        ended = server.run("train", *_arguments(run, f"{flag}={written}"))
        assert ended.code == 0, ended.text
    assert list(_norms(run)) == [10, 20, 30, 40, 50, 60]
    assert "callbacks/WeightNorm" in json.loads((run / "final.json").read_text())["time"]
    (events,) = (run / "train").glob("events*")
    found = [event for event in tf.compat.v1.train.summary_iterator(str(events)) if event.summary.value]
    steps = [event.step for event in found if any(value.tag == "weight_norm" for value in event.summary.value)]
    assert steps == [10, 20, 30, 40, 50, 60]


def test_the_state_of_a_callback_survives_kills(server: ForkServer, tmp_path: Path) -> None:
    whole, hit = tmp_path / "whole", tmp_path / "hit"
    override = "--params_override=trainer: {callbacks: [{name: weight_norm}]}"
    uninterrupted = server.start("train", *_arguments(whole, override))
    # Before the evaluation of step 15 is on record; when it is, and its weights are not exported; when all of it is
    # done, and the next checkpoint is not; in the save of a later step. Each start counts its own.
    for point, occurrence in (
        ("ledger.append", 1),
        ("best.weights", 1),
        ("checkpoint.save", 1),
        ("checkpoint.save", 2),
    ):
        death = server.run(killed_at, point, occurrence, f"{hit}.points", *_arguments(hit, override))
        assert death.code == -signal.SIGKILL, (point, death.text)
    assert server.run("train", *_arguments(hit, override)).code == 0
    assert uninterrupted.wait().code == 0
    assert compare_runs(whole, hit) == []
    assert (whole / "largest.json").read_text() == (hit / "largest.json").read_text()
    assert json.loads((whole / "largest.json").read_text())[1] == 4


def test_a_wrong_callback_config_fails_before_the_first_step(server: ForkServer, tmp_path: Path) -> None:
    for override, message in (
        ("[{name: weight_nrm}]", "did you mean weight_norm?"),
        ("[{name: weight_norm, args: {evry: 1}}]", "did you mean every?"),
        ("[{nam: weight_norm}]", "did you mean trainer.callbacks.0.name?"),
    ):
        flags = _arguments(tmp_path / "run", f"--params_override=trainer: {{callbacks: {override}}}")
        ended = server.run("train", *flags)
        assert ended.code == 2 and message in ended.text, ended.text
        assert not (tmp_path / "run").exists()
