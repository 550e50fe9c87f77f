"""The parts of a run that are made from its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.evals.best.several import BestCheckpoints
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.run import build
from trainer_kit.testing import TinyTask, tiny_experiment


def _trainer(task_type: type[TinyTask] = TinyTask, **arguments: Any) -> Any:
    config = tiny_experiment()
    return build.create_trainer(config, task_type(config.task), **arguments)


def test_an_optimizer_is_made_and_built_only_to_train() -> None:
    assert _trainer().optimizer.built
    assert _trainer(train=False).optimizer is None


def _exporter(config: ExperimentConfig, folder: Path) -> BestCheckpoint | BestCheckpoints | None:
    return build.create_exporter(config, RunDirectory(str(folder), config.trainer))


def test_bests_with_names_are_kept_as_the_config_has_them(tmp_path: Path) -> None:
    values = {"metric": "validation_loss", "metric_comp": "lower", "keep": 3, "min_delta": 0.5}
    exporter = _exporter(tiny_experiment(best_checkpoints={"top": values}), tmp_path)
    assert isinstance(exporter, BestCheckpoints) and exporter.primary is None
    assert exporter.named["top"].criterion == Criterion("validation_loss", "lower", 3, 0.5)
    assert exporter.named["top"].export_dir == str(tmp_path / "best_checkpoints" / "top")


def test_the_best_is_kept_only_when_the_config_names_a_metric(tmp_path: Path) -> None:
    assert _exporter(tiny_experiment(), tmp_path) is None
    lower = tiny_experiment(best_checkpoint_eval_metric="validation_loss", best_checkpoint_metric_comp="lower")
    exporter = _exporter(lower, tmp_path)
    assert isinstance(exporter, BestCheckpoint)
    assert exporter.export_dir == str(tmp_path / "best_ckpt")
    checkpoint = tf.train.Checkpoint(value=tf.Variable(1))
    assert [exporter.maybe_export_checkpoint(checkpoint, {"validation_loss": v}, s) for s, v in enumerate([2, 3, 1])] \
        == [True, False, True]  # fmt: skip


class _Aggregating(TinyTask):
    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return state


def test_a_metric_is_checked_unless_only_a_run_can_tell(tmp_path: Path) -> None:
    exporter = _exporter(tiny_experiment(best_checkpoint_eval_metric="acuracy"), tmp_path)
    with pytest.raises(UsageError, match=r"did you mean accuracy.*all: accuracy, validation_loss"):
        build.check_best_metric(_trainer(checkpoint_exporter=exporter), wanted=True)
    build.check_best_metric(_trainer(_Aggregating, checkpoint_exporter=exporter), wanted=True)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_trainer_that_keeps_no_best_is_told_when_one_is_wanted(
    wanted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    build.check_best_metric(_trainer(), wanted=wanted)
    assert ("no best checkpoint will be kept" in caplog.text) == wanted


def test_the_manager_saves_as_often_and_keeps_as_many_as_the_config_says(tmp_path: Path) -> None:
    config = tiny_experiment(max_to_keep=2, checkpoint_interval=3)
    trainer = build.create_trainer(config, TinyTask(config.task))
    manager = build.create_manager(trainer, config, str(tmp_path), asynchronous=False)
    for step in range(1, 11):
        trainer.global_step.assign(step)
        manager.save(step)
    kept = sorted(int(path.stem.split("-")[1]) for path in tmp_path.glob("ckpt-*.index"))
    assert kept == [7, 10]
    assert manager.checkpoint_interval == 3


def test_a_worker_that_is_not_the_chief_reports_to_nothing(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path), tiny_experiment().trainer)
    reports = build.open_reports(None, directory, False, True, True)
    reports.writer.close()
    assert reports.history is None
    assert list(tmp_path.iterdir()) == []


def test_only_runs_that_train_have_a_history(tmp_path: Path) -> None:
    directory = RunDirectory(str(tmp_path), tiny_experiment().trainer)
    for trains in (True, False):
        reports = build.open_reports(None, directory, True, trains, False)
        reports.writer.close()
        assert (reports.history is not None) == trains


class _Patience:
    """A callback that counts; what it has counted survives."""

    def __init__(self) -> None:
        self.waited = 0

    def __call__(self, logs: Any) -> None:
        self.waited += 1

    def state(self) -> int:
        return self.waited

    def restore(self, state: int) -> None:
        self.waited = state


def test_the_state_of_an_action_goes_into_every_checkpoint_and_comes_back(tmp_path: Path) -> None:
    config, first, second = tiny_experiment(), _Patience(), _Patience()
    for action in (first, second):
        trainer = _trainer()
        manager = build.create_manager(trainer, config, str(tmp_path), asynchronous=False)
        actions = build.create_actions(tf.distribute.get_strategy(), config, trainer, manager, [action, print])
        assert actions == [action, print]
        if action is first:
            first({})
            trainer.state.run_state.store()
            text = trainer.state.run_state.variable.numpy()
        else:
            trainer.state.run_state.variable.assign(text)
            trainer.state.run_state.load()
    assert second.waited == 1


def test_the_cost_of_an_example_is_known_after_a_step() -> None:
    trainer = _trainer()
    assert "for one example" not in build.model_cost(trainer)
    trainer.train(tf.constant(1))
    assert "195" in build.model_cost(trainer) and "for one example" in build.model_cost(trainer)


def test_one_process_is_the_chief() -> None:
    assert build.is_chief(tf.distribute.get_strategy())
