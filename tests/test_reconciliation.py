"""What is kept as the best, and what there are weights of: runs on a tiny task, with real files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.checkpoints.names import complete_checkpoints
from trainer_kit.config.schema import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.launcher import launch
from trainer_kit.testing import compare_runs, tiny_experiment

LOSS = {"metric": "validation_loss", "metric_comp": "lower", "keep": 2}


def _config(**trainer: Any) -> ExperimentConfig:
    average = {"optimizer_config": {"ema": {"average_decay": 0.9}}}
    return tiny_experiment(
        best_checkpoint_eval_metric="validation_loss",
        best_checkpoint_metric_comp="lower",
        best_checkpoints={"two": LOSS},
        **{"train_steps": 40, "validation_interval": 10, **trainer},
    ).replace(trainer=average)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 40 steps, evaluated and saved at each tenth; all checkpoints are there."""
    folder = tmp_path_factory.mktemp("reconciliation") / "run"
    launch(_config(), "train_and_eval", str(folder))
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


@pytest.mark.parametrize("mode", ["train_and_eval", "train"])
def test_weights_that_are_lost_are_exported_again_and_the_run_goes_on_as_if_nothing_was(
    finished: Path, run: Path, mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {name: _weights(finished / name) for name in ("best_ckpt", "best_checkpoints/two")}
    longer = _config(train_steps=50)
    untouched = Path(shutil.copytree(run, tmp_path / "untouched"))
    launch(longer, "train_and_eval", str(untouched))
    for name, steps in whole.items():
        _lose(run / name, *steps)
    (run / "final.json").unlink()
    with caplog.at_level("INFO", logger="trainer_kit"):
        if mode == "train_and_eval":
            launch(longer, mode, str(run))
            assert compare_runs(untouched, run) == []
            assert _weights(run / "best_checkpoints/two") == _weights(untouched / "best_checkpoints/two")
        else:
            launch(_config(train_steps=40), "train_and_eval", str(run))
            assert {name: _weights(run / name) for name in whole} == whole
    told = [one.getMessage() for one in caplog.records if "were exported from the checkpoint" in one.getMessage()]
    assert len(told) == 3


def test_a_sidecar_puts_its_own_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    launch(_config(), "continuous_eval", str(run), eval_name="beside")
    own = run / "evals/beside/best_checkpoints/two"
    before = _weights(own)
    assert len(before) == 2 and not (run / "evals/beside/best_checkpoints/two/archived").exists()
    _lose(own, *before)
    (own / "info.json").unlink()
    launch(_config(), "continuous_eval", str(run), eval_name="beside")
    assert _weights(own) == before
    assert json.loads((run / "evals/beside.lease.json").read_text())["reads"] is None


def test_what_is_gone_with_its_checkpoint_is_told_and_the_run_goes_on(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (best,) = _weights(run / "best_ckpt")
    _lose(run / "best_ckpt", best)
    if best == 40:  # the run goes on from there
        pytest.skip("the last one is the best")
    for path in run.glob(f"ckpt-{best}.*"):
        path.unlink()
    (run / "final.json").unlink()
    launch(_config(), "train_and_eval", str(run))
    assert f"the weights of step {best} are to be kept" in caplog.text
    assert len(_weights(run / "best_ckpt")) >= 1


def test_a_metric_that_does_not_exist_is_told_before_the_first_step(tmp_path: Path) -> None:
    config = tiny_experiment(best_checkpoints={"x": {"metric": "acuracy"}})
    with pytest.raises(UsageError, match=r"trainer\.best_checkpoints\.x\.metric: 'acuracy' .* did you mean accuracy"):
        launch(config, "train_and_eval", str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_named_best_needs_no_primary_one(tmp_path: Path) -> None:
    config = tiny_experiment(best_checkpoints={"x": {"metric": "accuracy"}}, train_steps=10)
    _, logs = launch(config, "train_and_eval", str(tmp_path))
    assert (tmp_path / "best_checkpoints/x/info.json").exists() and not (tmp_path / "best_ckpt").exists()
    assert not [name for name in logs if name.startswith("best_")]
