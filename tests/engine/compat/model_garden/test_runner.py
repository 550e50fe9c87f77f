"""run_experiment beside theirs, on Model Garden's own mock task, in every mode."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import orbit
import pytest
import tensorflow as tf
import tf_keras
from official.core import config_definitions, exp_factory, task_factory, train_lib, train_utils
from official.modeling import hyperparams
from official.utils.testing import mock_task  # noqa: F401 - registers the experiment

from tests.builders import assert_all_close, curve, read_json
from tests.engine.compat.model_garden.garden_task import SmallConfig, SmallTask, eagerly
from trainer_kit.compat.model_garden.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.experiment_runner import OrbitExperimentRunner, run_experiment
from trainer_kit.compat.model_garden.garden_trainer import Trainer
from trainer_kit.config.serialize import from_yaml
from trainer_kit.errors import ConfigError, UsageError

STEPS = 6
LOOP = 2


def _config(**trainer: Any) -> Any:
    """The mock experiment with the least that a run needs; its data never end."""
    config = exp_factory.get_exp_config("mock")
    values = {
        "train_steps": STEPS,
        "steps_per_loop": LOOP,
        "summary_interval": LOOP,
        "checkpoint_interval": LOOP,
        "validation_interval": LOOP,
        "validation_steps": 3,
        "continuous_eval_timeout": 1,
        "optimizer_config": {
            "optimizer": {"type": "sgd"},
            "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
        },
    }
    config.override({"trainer": {**values, **trainer}})
    return config


def _run(run: Any, mode: str, folder: Path, config: Any = None, **options: Any) -> tuple[Any, Any]:
    tf_keras.utils.set_random_seed(1)
    config = config or _config()
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        task = task_factory.get_task(build_original(convert(config).task), logging_dir=str(folder))
    return run(strategy, task, mode, config, str(folder), **options)


def _run_theirs(mode: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    with eagerly():
        return _run(train_lib.run_experiment, mode, folder, **options)


def _run_ours(mode: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    return _run(run_experiment, mode, folder, **options)


def _read_numbers(logs: Any) -> dict[str, float]:
    """The numbers of an evaluation, but for the speed that theirs adds."""
    return {
        name: float(orbit.utils.get_value(value))
        for name, value in logs.items()
        if name != "steps_per_second"
    }


def _read_weights(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _assert_same_weights(ours: Any, theirs: Any) -> None:
    for weight, expected in zip(_read_weights(ours), _read_weights(theirs), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-6)


def _steps(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("ckpt-") for path in folder.glob("ckpt-*.index")]
    return sorted(int(name) for name in names if name.isdigit())


def _event_folders(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/events.*")}


@dataclass(frozen=True)
class FinishedRun:
    """A finished run in mode "train": its folder, its model, the logs of each loop, and what was
    returned beside it.
    """

    folder: Path
    model: Any
    loops: list[dict[str, float]]
    logs: Any


def _train(run: Any, folder: Path) -> FinishedRun:
    loops: list[dict[str, float]] = []
    model, logs = run(
        "train", folder, train_actions=[lambda logs: loops.append(_read_numbers(logs))]
    )
    return FinishedRun(folder, model, loops, logs)


@pytest.fixture(scope="module")
def their_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run of theirs: what evaluations begin with, and what our runs are compared with."""
    return _train(_run_theirs, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def our_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The same run of ours."""
    return _train(_run_ours, tmp_path_factory.mktemp("ours"))


def test_training_alone_gives_what_theirs_gives(
    their_run: FinishedRun, our_run: FinishedRun
) -> None:
    _assert_same_weights(our_run.model, their_run.model)
    assert _steps(our_run.folder) == [2, 4, 6]
    assert _steps(their_run.folder)[-1] == 6
    assert our_run.logs == {}
    assert len(our_run.loops) == 3
    for logs, expected in zip(our_run.loops, their_run.loops, strict=True):
        assert logs == pytest.approx(expected)
    assert _event_folders(our_run.folder) == _event_folders(their_run.folder) == {"train"}


@pytest.mark.parametrize(
    ("mode", "evaluations"), [("train_and_eval", 4), ("train_and_post_eval", 1)]
)
def test_training_with_evaluations_gives_what_theirs_gives(
    mode: str, evaluations: int, tmp_path: Path
) -> None:
    def run_mode(run: Any, folder: Path) -> tuple[Any, Any, list[dict[str, float]]]:
        evaluation_logs: list[dict[str, float]] = []
        model, logs = run(
            mode,
            folder,
            run_post_eval=mode == "train_and_eval",
            eval_actions=[lambda logs: evaluation_logs.append(_read_numbers(logs))],
        )
        return model, logs, evaluation_logs

    our_model, our_logs, our_evaluations = run_mode(_run_ours, tmp_path / "ours")
    their_model, their_logs, their_evaluations = run_mode(_run_theirs, tmp_path / "theirs")

    _assert_same_weights(our_model, their_model)
    assert our_logs
    assert _read_numbers(our_logs) == pytest.approx(_read_numbers(their_logs))
    assert len(our_evaluations) == evaluations
    for logs, expected in zip(our_evaluations, their_evaluations, strict=True):
        assert logs == pytest.approx(expected)
    assert _event_folders(tmp_path / "ours") == {"train", "validation"}
    assert _event_folders(tmp_path / "theirs") == {"train", "validation"}


@pytest.mark.parametrize(("mode", "evaluations"), [("eval", 1), ("continuous_eval", 3)])
def test_a_mode_that_evaluates_gives_what_theirs_gives(
    mode: str, evaluations: int, their_run: FinishedRun, tmp_path: Path
) -> None:
    shutil.copytree(their_run.folder, tmp_path / "theirs")
    shutil.copytree(their_run.folder, tmp_path / "ours")

    # Theirs may skip checkpoints in mode "continuous_eval".
    their_logs: list[dict[str, float]] = []
    note_theirs = [lambda logs: their_logs.append(_read_numbers(logs))]
    _run_theirs("eval", tmp_path / "theirs", eval_actions=note_theirs)
    our_logs: list[dict[str, float]] = []
    note_ours = [lambda logs: our_logs.append(_read_numbers(logs))]
    model, logs = _run_ours(mode, tmp_path / "ours", eval_actions=note_ours)

    assert logs == {}
    _assert_same_weights(model, their_run.model)
    assert our_logs[-1] == pytest.approx(their_logs[0])
    assert their_logs[0]["counter"] == 3
    assert len(our_logs) == evaluations


def test_each_framework_goes_on_with_a_run_of_the_other(
    their_run: FinishedRun, our_run: FinishedRun, tmp_path: Path
) -> None:
    longer = _config(train_steps=10)
    straight, _ = _run_theirs("train", tmp_path / "straight", config=longer)

    for finished_run, run in ((their_run, _run_ours), (our_run, _run_theirs)):
        folder = shutil.copytree(finished_run.folder, tmp_path / run.__name__)
        model, _ = run("train", folder, config=longer)
        _assert_same_weights(model, straight)
        assert _steps(folder)[-1] == 10


def test_a_finished_run_is_not_trained_again(our_run: FinishedRun, tmp_path: Path) -> None:
    config = _config()
    folder = shutil.copytree(our_run.folder, tmp_path / "run")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("ckpt-*"))
    record = (folder / "params.yaml").read_text()
    assert from_yaml(record, convert(_config(train_steps=9))).as_dict() == convert(config).as_dict()
    assert (folder / "metrics.jsonl").exists()
    assert (folder / "final.json").exists()

    # Either kind of config has the same record.
    again, _ = _run_ours("train", folder, config=convert(config))

    _assert_same_weights(again, our_run.model)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("ckpt-*")) == before
    assert (folder / "params.yaml").read_text() == record


def test_options_of_our_engine_are_keywords(their_run: FinishedRun, tmp_path: Path) -> None:
    folder = shutil.copytree(their_run.folder, tmp_path / "run")

    _, first = _run_ours("eval", folder, checkpoint="2", run_post_eval=True)
    _, last = _run_ours("eval", folder, checkpoint="latest", run_post_eval=True)
    assert _read_numbers(first)["validation_loss"] > _read_numbers(last)["validation_loss"]

    with pytest.raises(UsageError, match="5"):
        _run_ours("eval", folder, checkpoint="5")


def test_mistakes_are_reported_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train_and_eval"):
        _run_ours("train_and_evaluate", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer\.steps_per_loop"):
        _run_ours("train", tmp_path / "run", config=_config(steps_per_loop=0))
    assert not (tmp_path / "run").exists()


class _Counting(orbit.Controller):  # type: ignore[misc]
    """A controller of a user's, written against Orbit."""

    instances: ClassVar[list[Any]] = []

    def __init__(self, **arguments: Any) -> None:
        self.instances.append(self)
        super().__init__(**arguments)


def test_a_controller_of_a_users_drives_a_run_without_summaries(
    their_run: FinishedRun, tmp_path: Path
) -> None:
    _Counting.instances.clear()
    model, _ = _run_ours("train_and_eval", tmp_path, controller_cls=_Counting, save_summary=False)

    assert len(_Counting.instances) == 1
    _assert_same_weights(model, their_run.model)
    assert _steps(tmp_path)[-1] == STEPS
    assert _event_folders(tmp_path) == set()


def _create_runner(
    cls: type[OrbitExperimentRunner], folder: Path, config: Any, mode: str = "train_and_eval"
) -> OrbitExperimentRunner:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        task = task_factory.get_task(build_original(convert(config).task))
    return cls(strategy, task, mode, config, str(folder))


class _OwnKeeper(OrbitExperimentRunner):
    """Keeps the best in a folder of its own, as subclasses of theirs do."""

    def _build_best_checkpoint_exporter(self) -> BestCheckpointExporter:
        return BestCheckpointExporter(
            str(Path(self.model_dir) / "mine"), "validation_loss", "lower"
        )


class _OwnTrainer(OrbitExperimentRunner):
    """Creates the trainer itself, always with an exporter, as theirs does."""

    def _build_trainer(self, task: Any, train: bool, evaluate: bool) -> Any:
        with self.strategy.scope():
            exporter = self._build_best_checkpoint_exporter()
            return Trainer.create(self._config, task, train, evaluate, exporter)


def test_mode_eval_exports_no_best_weights(tmp_path: Path) -> None:
    config = _config(best_checkpoint_eval_metric="validation_loss")
    _create_runner(_OwnTrainer, tmp_path, config, "eval").run()
    assert not list(tmp_path.rglob("best_ckpt"))


def test_the_parts_of_a_runner_are_there_when_its_run_has_begun(tmp_path: Path) -> None:
    config = _config(train_steps=2, best_checkpoint_eval_metric="validation_loss")
    folder = tmp_path / "run"
    runner = _create_runner(OrbitExperimentRunner, folder, config)
    with pytest.raises(UsageError, match="do not exist before run"):
        _ = runner.controller

    model, _ = runner.run()

    assert runner.trainer.model is model
    assert runner.controller.trainer is runner.trainer
    assert runner.checkpoint_manager.latest_checkpoint == str(folder / "ckpt-2")
    exporter = runner.trainer.checkpoint_exporter  # it has the attributes of theirs
    assert exporter.best_ckpt_path is not None
    assert exporter.best_ckpt_path == tf.train.latest_checkpoint(str(folder / "best_ckpt"))
    assert exporter.best_ckpt_logs_path == str(folder / "best_ckpt" / "info.json")


def test_a_subclass_keeps_the_best_where_it_wants(tmp_path: Path) -> None:
    runner = _create_runner(_OwnKeeper, tmp_path, _config(train_steps=2))
    trainer = runner.trainer  # one that is asked for before is the one that runs
    assert int(trainer.global_step) == 0

    model, _ = runner.run()

    assert trainer.model is model
    assert int(trainer.global_step) == 2
    assert read_json(tmp_path / "mine" / "info.json")["best_ckpt_global_step"] == 2


def test_another_config_is_refused_before_any_file_is_touched(
    our_run: FinishedRun, tmp_path: Path
) -> None:
    shutil.copytree(our_run.folder, tmp_path, dirs_exist_ok=True)
    # Best weights that Model Garden has left, which a run would take over.
    for name in ("best_ckpt", "mine"):
        theirs = train_utils.BestCheckpointExporter(
            str(tmp_path / name), "validation_loss", "lower"
        )
        checkpoint = tf.train.Checkpoint(global_step=tf.Variable(2, dtype=tf.int64))
        theirs.maybe_export_checkpoint(checkpoint, {"validation_loss": 0.5}, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = _config(best_checkpoint_eval_metric="validation_loss")
    other.trainer.optimizer_config.optimizer.type = "adam"

    message = r"optimizer.type: was 'sgd' when this run began and is 'adam' now"
    for cls in (OrbitExperimentRunner, _OwnKeeper):
        with pytest.raises(ConfigError, match=message):
            _create_runner(cls, tmp_path, other).run()
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@dataclasses.dataclass
class OwnSection(hyperparams.Config):  # type: ignore[misc]
    """A section of a program, with a field that no section of trainer_kit has."""

    momentum: float = 0.9


@dataclasses.dataclass
class OwnTrainerConfig(config_definitions.TrainerConfig):  # type: ignore[misc]
    """Has sections of the program's own under names that trainer_kit uses."""

    optimizer_config: OwnSection = dataclasses.field(default_factory=OwnSection)
    callbacks: OwnSection = dataclasses.field(default_factory=OwnSection)


class Composite(tf_keras.optimizers.legacy.Optimizer):  # type: ignore[misc]
    """Updates each variable with an optimizer of its own, and has no learning rate, as one of TF
    Recommenders.
    """

    def __init__(self, optimizers: Any) -> None:
        super().__init__("Composite")
        self.optimizers = optimizers
        for number, optimizer in enumerate(optimizers):
            self._track_trackable(optimizer, f"Optimizer{number}")

    def apply_gradients(self, grads_and_vars: Any, **options: Any) -> Any:
        for optimizer, pair in zip(self.optimizers, grads_and_vars, strict=True):
            optimizer.apply_gradients([pair], **options)


class OwnTask(SmallTask):  # type: ignore[misc]
    """Makes the optimizer with the model, and none from the config, as the ranking program of Model
    Garden does.
    """

    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> None:
        del optimizer_config, runtime_config

    def build_model(self) -> Any:
        model = super().build_model()
        momentum = tf_keras.optimizers.legacy.SGD(0.1, 0.9)
        adam = tf_keras.optimizers.legacy.Adam(0.01)
        model.optimizer = Composite([momentum, adam])
        return model


class OwnTrainer(Trainer):
    """Reads and resets the metrics itself, in the words of Keras 2."""

    def train_loop_end(self) -> Any:
        self.join()
        logs = {}
        for metric in [*self.train_metrics, self.train_loss]:
            logs[metric.name] = metric.result()
            metric.reset_states()
        return {**logs, "momentum_rate": self.optimizer.optimizers[0].learning_rate}


def _run_with_own_sections(folder: Path, steps: int) -> OwnTrainer:
    options = OwnTrainerConfig(
        train_steps=steps, steps_per_loop=2, summary_interval=2, checkpoint_interval=2
    )
    data = config_definitions.DataConfig(is_training=True)
    params = config_definitions.ExperimentConfig(task=SmallConfig(train_data=data), trainer=options)
    task = OwnTask(params.task)
    model = task.build_model()
    trainer = OwnTrainer(params, task, model, model.optimizer, train=True, evaluate=False)
    strategy = tf.distribute.get_strategy()
    run_experiment(strategy, task, "train", params, str(folder), trainer=trainer)
    return trainer


def test_a_program_with_own_sections_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = _run_with_own_sections(tmp_path / "whole", 4)
    _run_with_own_sections(tmp_path / "again", 2)
    again = _run_with_own_sections(tmp_path / "again", 4)

    assert_all_close(_read_weights(again.model), _read_weights(whole.model))
    assert float(again.train_loss.result()) == 0.0  # it was reset
    assert int(again.optimizer.optimizers[1].iterations) == 4
    rates = curve(tmp_path / "again" / "metrics.jsonl", "momentum_rate", "train")
    assert [rate for _, rate in rates] == pytest.approx([0.1, 0.1])
