"""A callback of a user from a config file; what it and others change or stop, after kills too."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.builders import curve, final_record
from tests.fork_server import ForkServer
from tests.process.end_to_end.killed_experiment import train_and_die_at
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.files import read_json_lines
from trainer_kit.testing import compare_runs

CALLBACKS = "tests.process.end_to_end.callbacks_experiment"
CHANGED = "tests.process.end_to_end.hyper_parameters_experiment"
# A callback of the user's, every way to change a hyper-parameter, and an end before the last step.
# The plateau is reached at the second evaluation, step 20, and at every one after it.
YAML = f"""
trainer:
  callbacks:
  - {{name: weight_norm, args: {{every: 10}}}}
  - {{name: "{CHANGED}:Hand", args: {{step: 25, text: "head.learning_rate: 0.003"}}}}
  - {{name: set_at_steps, args: {{parameter: loss_weight, steps: [[12, 0.5], [33, 2.0]]}}}}
  - name: set_by_function
    args: {{parameter: loss_weight, function: "{CHANGED}:rate", every: 35}}
  - {{name: set_from_file}}
  - name: reduce_on_plateau
    args: {{metric: validation_loss, metric_comp: lower, parameter: rest.learning_rate_factor,
           patience: 1, min_delta: 9.0}}
  early_stopping: {{metric: validation_loss, metric_comp: lower, min_delta: 100.0, patience: 3}}
"""
# What kills a run, one after the other, and then its last evaluation and its newest checkpoint.
# Each start counts its own evaluations and checkpoints.
KILLS = (
    # When the evaluation of step 10 is on record, and the first checkpoint is not.
    ("checkpoint.save", 1, 10, 0),
    # Of step 30; the plateau was reached at 20, and a hyper-parameter was read at 25.
    ("checkpoint.save", 2, 20, 17),
    # In the third evaluation, and in the fourth, which ends the run, before its line is in the
    # ledger; when the line is there and the last checkpoint is not; before the end is noted.
    ("ledger.append", 1, 20, 30),
    ("ledger.append", 2, 30, 30),
    ("checkpoint.save", 1, 40, 30),
    ("final.rename", 1, 40, 40),
)


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer([CALLBACKS, CHANGED]) as fork_server:
        yield fork_server


def _read_event_steps(run: Path) -> list[int]:
    """Returns the steps at which the event file of training has the norm of the weights."""
    (path,) = (run / "train").glob("events*")
    return [
        event.step
        for event in tf.compat.v1.train.summary_iterator(str(path))
        if any(value.tag == "weight_norm" for value in event.summary.value)
    ]


@pytest.fixture(scope="module")
def runs(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run with all callbacks that nothing has happened to, and one that was killed again and
    again.
    """
    base = tmp_path_factory.mktemp("changed")
    whole = base / "whole"
    hit = base / "hit"
    file = base / "callbacks.yaml"
    file.write_text(YAML)
    flags = [f"--import_module={module}" for module in (CALLBACKS, CHANGED)]
    flags += ["--experiment=changed", "--mode=train_and_eval", f"--config_file={file}"]
    uninterrupted = server.start("train", *flags, f"--model_dir={whole}")
    for point, occurrence, evaluated, saved in KILLS:
        death = server.run(
            train_and_die_at, point, occurrence, f"{hit}.points", *flags, f"--model_dir={hit}"
        )
        assert death.code == -signal.SIGKILL, (point, death.text)
        ledger = hit / "evals/validation.jsonl"
        steps = [line["step"] for line in read_json_lines(ledger)] if ledger.exists() else []
        assert max(steps, default=0) == evaluated, point
        assert max(complete_checkpoints(str(hit)), default=0) == saved, point
    for end in (server.run("train", *flags, f"--model_dir={hit}"), uninterrupted.wait()):
        assert end.code == 0, end.text
    assert "the run ends at step 40: validation_loss has not improved" in end.text
    return whole, hit


def test_a_callback_of_yaml_reports_and_keeps_its_state(runs: tuple[Path, Path]) -> None:
    whole, hit = runs

    norms = curve(whole / "metrics.jsonl", "weight_norm", "train")
    assert [step for step, _ in norms] == _read_event_steps(whole) == [10, 20, 30, 40]
    assert "callbacks/WeightNorm" in final_record(whole)["time"]
    state = (whole / "largest.json").read_text()
    assert state == (hit / "largest.json").read_text()
    assert json.loads(state)[1] == 4


def test_kills_change_neither_the_stop_step_nor_the_bits(runs: tuple[Path, Path]) -> None:
    whole_record, hit_record = map(final_record, runs)
    assert whole_record["step"] == hit_record["step"] == 40
    assert whole_record["stopped"] == hit_record["stopped"]
    assert compare_runs(*runs) == []


def test_hyper_parameters_change_at_the_same_steps_after_kills(runs: tuple[Path, Path]) -> None:
    _, hit = runs
    lines = [line for line in read_json_lines(hit / "metrics.jsonl") if line["kind"] == "change"]
    assert [(line["step"], line["metrics"]) for line in lines] == [
        (0, {"loss_weight": 0.01}),
        (12, {"loss_weight": 0.5}),
        (20, {"rest.learning_rate_factor": 0.1}),
        (25, {"head.learning_rate": 0.003}),
        (30, {"rest.learning_rate_factor": float(np.float32(0.1)) * 0.1}),
        (33, {"loss_weight": 2.0}),
        (35, {"loss_weight": 0.01 / 2}),
    ]
