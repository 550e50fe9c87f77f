"""--from_step: a run goes back to one of its checkpoints, all of it, whatever happens meanwhile."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.builders import read_json
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.checkpoint_names import complete_checkpoints
from trainer_kit.checkpoints.startup_scan import archive_later_checkpoints
from trainer_kit.errors import StorageError, UsageError
from trainer_kit.evals.ledger import active_records
from trainer_kit.files import read_json_lines
from trainer_kit.run.runner import run_experiment
from trainer_kit.runtime.determinism import seed_everything
from trainer_kit.testing import compare_runs


class _Wider(LinearTask):
    """Does not fit the checkpoints of the others."""

    def build_model(self) -> Any:
        model = super().build_model()
        return keras.Sequential(
            [keras.Input(model.input_shape[1:]), *model.layers, keras.layers.Dense(3)]
        )


def _run(
    folder: Path, task: type[LinearTask] = LinearTask, train_steps: int = 30, **arguments: Any
) -> None:
    keras.utils.clear_session()  # names of variables, which checkpoints hold too, count anew
    seed_everything(1)
    config = linear_experiment(train_steps=train_steps, best_checkpoint_eval_metric="accuracy")
    run_experiment(None, task(config.task), "train_and_eval", config, str(folder), **arguments)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that never went back."""
    folder = tmp_path_factory.mktemp("reference")
    _run(folder)
    return folder


@pytest.fixture
def finished_run(reference: Path, tmp_path: Path) -> Path:
    """A finished run of a test's own."""
    return Path(shutil.copytree(reference, tmp_path / "run"))


def _evaluations(folder: Path) -> list[tuple[int, int]]:
    """(step, lineage) of the evaluations that count."""
    lines = read_json_lines(folder / "evals" / "validation.jsonl")
    return [(record["step"], record["lineage"]) for record in active_records(lines)]


def _compare_without_lineages(run: Path, other_run: Path) -> list[str]:
    return [line for line in compare_runs(run, other_run) if "lineage" not in line]


def test_a_run_that_goes_back_takes_the_same_way_again(reference: Path, finished_run: Path) -> None:
    _run(finished_run, from_step=10)
    assert sorted(complete_checkpoints(str(finished_run / "archived"))) == [20, 30]
    assert _evaluations(finished_run) == [(10, 0), (20, 1), (30, 1)]
    assert _compare_without_lineages(reference, finished_run) == []


@pytest.mark.parametrize("step", [0, 10])
def test_a_kill_after_the_archiving_does_not_stop_the_rewind(
    reference: Path, finished_run: Path, step: int
) -> None:
    # Then the process was killed; it is started again without the flag.
    archive_later_checkpoints(str(finished_run), step)
    _run(finished_run)
    assert _evaluations(finished_run) == [(10, 0 if step else 1), (20, 1), (30, 1)]
    assert _compare_without_lineages(reference, finished_run) == []

    before = _evaluations(finished_run)
    _run(finished_run)  # the rewind is finished
    assert _evaluations(finished_run) == before


def test_a_model_that_does_not_fit_moves_nothing(finished_run: Path) -> None:
    with pytest.raises(UsageError, match="does not fit"):
        _run(finished_run, _Wider, from_step=10)
    assert sorted(complete_checkpoints(str(finished_run))) == [10, 20, 30]
    assert not (finished_run / "archived").exists()

    _run(finished_run)
    assert _evaluations(finished_run) == [(10, 0), (20, 0), (30, 0)]


def test_a_rewind_to_a_damaged_checkpoint_moves_nothing(finished_run: Path) -> None:
    data = next(finished_run.glob("ckpt-10.data*"))
    data.write_bytes(data.read_bytes()[:-1])

    with pytest.raises(UsageError, match=r"--from_step: .*ckpt-10 is damaged: .*give another step"):
        _run(finished_run, from_step=10)
    assert sorted(complete_checkpoints(str(finished_run))) == [10, 20, 30]


def test_a_restarted_run_starts_again_only_with_from_step_0(
    finished_run: Path,
) -> None:
    _run(finished_run, from_step=0)
    for path in finished_run.glob("ckpt-*"):
        path.unlink()

    with pytest.raises(StorageError, match=r"no checkpoint in .* is whole.*--from_step=0"):
        _run(finished_run)

    (finished_run / "checkpoint").unlink()
    with pytest.raises(StorageError, match=r"names the checkpoint .*--from_step=0"):
        _run(finished_run)

    _run(finished_run, from_step=0)
    assert _evaluations(finished_run) == [(10, 2), (20, 2), (30, 2)]
    assert read_json(finished_run / "best_ckpt" / "info.json")["step"] in (10, 20, 30)


def test_a_run_that_lost_its_checkpoints_says_that_it_restarts(
    finished_run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # Whoever copies checkpoints alone knows that the rest is missing.
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in finished_run.glob("ckpt-*"):
        shutil.copy(path, copy)
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        _run(copy)
    assert "has lost" not in caplog.text

    for name in ("checkpoint", "final.json", "evals/validation.jsonl"):
        (finished_run / name).unlink()
    for path in finished_run.glob("ckpt-*"):
        path.unlink()
    with caplog.at_level(logging.WARNING, "trainer_kit"):
        _run(finished_run)
    message = "has reports up to step 30, but there is no checkpoint: the run begins at step 0"
    assert f"metrics.jsonl {message}" in caplog.text
