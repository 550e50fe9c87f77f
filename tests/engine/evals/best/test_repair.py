"""What is kept as the best, and what there are weights of: runs on a tiny task, with real files."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.linear_task import linear_experiment
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import compare_runs

BESTS = ("best_ckpt", "best_checkpoints/two", "best_checkpoints/first")
LOSS = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}


def _config(**trainer: Any) -> ExperimentConfig:
    average = {"optimizer_config": {"ema": {"average_decay": 0.9}}}
    return linear_experiment(
        best_checkpoint_eval_metric="validation_loss",
        best_checkpoint_metric_comp="lower",
        best_checkpoints={"two": LOSS, "first": {"metric": "validation_loss"}},
        **{"train_steps": 40, "validation_interval": 10, **trainer},
    ).replace(trainer=average)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps, evaluated and saved at each tenth; all checkpoints are there."""
    folder = tmp_path_factory.mktemp("reconciliation") / "run"
    _launch(_config(), "train_and_eval", folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def _weights(folder: Path) -> dict[int, dict[str, bytes]]:
    """Step -> the variables of the weights in `folder`, as bytes, without the counter of saves."""
    found = {}
    for step, prefix in complete_checkpoints(str(folder)).items():
        reader = tf.train.load_checkpoint(prefix)
        names = [name for name in reader.get_variable_to_shape_map() if "OBJECT_GRAPH" not in name]
        found[step] = {name: reader.get_tensor(name).tobytes() for name in names if "save_counter" not in name}
    return found


def _launch(config: ExperimentConfig, mode: str, folder: Path, **arguments: Any) -> Any:
    keras.utils.clear_session()  # names of layers count up in a process, and checkpoints hold them
    return launch(config, mode, str(folder), **arguments)


def _lose(folder: Path, *steps: int) -> None:
    for step in steps:
        (folder / f"ckpt-{step}.data-00000-of-00001").unlink()


def test_named_bests_are_kept_beside_the_primary_one(finished: Path) -> None:
    values = {
        line["step"]: line["metrics"]["validation_loss"]
        for line in map(json.loads, (finished / "evals/validation.jsonl").read_text().splitlines())
    }
    top = sorted(values, key=lambda step: values[step])[:2]
    assert list(_weights(finished / "best_checkpoints/two")) == sorted(top)
    assert json.loads((finished / "best_checkpoints/two/info.json").read_text())["step"] == top[0]
    assert list(_weights(finished / "best_ckpt")) == top[:1]


def test_lost_weights_are_exported_again_before_the_run_resumes(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    untouched = Path(shutil.copytree(run, tmp_path / "untouched"))
    longer = _config(train_steps=50)
    _launch(longer, "train_and_eval", untouched)
    for name in BESTS:
        _lose(run / name, *complete_checkpoints(str(run / name)))
    with caplog.at_level("INFO", logger="trainer_kit"):
        _launch(longer, "train_and_eval", run)
    assert compare_runs(untouched, run) == []
    assert {name: _weights(run / name) for name in BESTS} == {name: _weights(untouched / name) for name in BESTS}
    told = [one.getMessage() for one in caplog.records if "were exported from the checkpoint" in one.getMessage()]
    assert sorted(re.findall(r"step (\d+)", " ".join(told))) == ["10", "30", "40", "40"]


def test_what_is_put_back_is_what_was_lost(finished: Path, run: Path) -> None:
    for name in BESTS:
        _lose(run / name, *complete_checkpoints(str(run / name)))
        (run / name / "info.json").unlink()
    (run / "final.json").unlink()
    _launch(_config(), "train_and_eval", run)
    for name in BESTS:
        assert _weights(run / name) == _weights(finished / name)
        assert (run / name / "info.json").read_text() == (finished / name / "info.json").read_text()


def test_a_sidecar_puts_its_own_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    _launch(_config(), "continuous_eval", run, eval_name="beside")
    own = run / "evals/beside/best_checkpoints/two"
    before = _weights(own)
    assert len(before) == 2 and not (run / "evals/beside/best_checkpoints/two/archived").exists()
    _lose(own, *before)
    (own / "info.json").unlink()
    _launch(_config(), "continuous_eval", run, eval_name="beside")
    assert _weights(own) == before
    assert json.loads((run / "evals/beside.lease.json").read_text())["reads"] is None


def test_without_its_checkpoint_the_next_best_is_exported(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    for prefix in (run / "ckpt-10", run / "best_checkpoints/first/ckpt-10"):
        prefix.with_name("ckpt-10.index").unlink()
    (run / "final.json").unlink()
    _launch(_config(), "train_and_eval", run)
    assert "the weights of step 10 should be kept" in caplog.text
    assert list(_weights(run / "best_checkpoints/first")) == [20]
    assert json.loads((run / "best_checkpoints/first/info.json").read_text())["step"] == 20


def test_a_rewound_run_gets_its_earlier_best_weights_back(run: Path) -> None:
    (before,) = _weights(run / "best_ckpt")
    _launch(_config(train_steps=20), "train_and_eval", run, from_step=20)
    assert before == 40 and list(_weights(run / "best_ckpt")) == [20]
    assert list(_weights(run / "best_checkpoints/two")) == [10, 20]
    assert list(complete_checkpoints(str(run / "best_ckpt/archived"))) == [40]


def test_an_unknown_metric_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    config = linear_experiment(best_checkpoints={"x": {"metric": "acuracy"}})
    with pytest.raises(UsageError, match=r"trainer\.best_checkpoints\.x\.metric: 'acuracy' .* did you mean accuracy"):
        _launch(config, "train_and_eval", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_named_best_needs_no_primary_one(tmp_path: Path) -> None:
    config = linear_experiment(best_checkpoints={"x": {"metric": "accuracy"}}, train_steps=10)
    _, logs = _launch(config, "train_and_eval", tmp_path)
    assert (tmp_path / "best_checkpoints/x/info.json").exists() and not (tmp_path / "best_ckpt").exists()
    assert not [name for name in logs if name.startswith("best_")]
