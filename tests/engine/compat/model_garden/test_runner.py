"""run_experiment beside theirs, on Model Garden's own mock task, in every mode."""

from __future__ import annotations

import dataclasses
import json
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

from tests.engine.compat.model_garden.garden_task import SmallConfig, SmallTask, eagerly
from trainer_kit.compat.model_garden.best_checkpoint import BestCheckpointExporter
from trainer_kit.compat.model_garden.config_classes import build_original
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.experiment_runner import OrbitExperimentRunner, run_experiment
from trainer_kit.compat.model_garden.garden_trainer import Trainer
from trainer_kit.config.serialize import from_yaml
from trainer_kit.errors import ConfigError, UsageError

STEPS, LOOP = 6, 2


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


def _theirs(mode: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    with eagerly():
        return _run(train_lib.run_experiment, mode, folder, **options)


def _ours(mode: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    return _run(run_experiment, mode, folder, **options)


def _numbers(logs: Any) -> dict[str, float]:
    """The numbers of an evaluation, but for the speed that theirs adds."""
    return {
        name: float(orbit.utils.get_value(one))
        for name, one in logs.items()
        if name != "steps_per_second"
    }


def _weights(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.variables]


def _assert_equal(ours: Any, theirs: Any) -> None:
    for one, other in zip(_weights(ours), _weights(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def _steps(folder: Path) -> list[int]:
    names = [path.stem.removeprefix("ckpt-") for path in folder.glob("ckpt-*.index")]
    return sorted(int(name) for name in names if name.isdigit())


def _written(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/events.*")}


@dataclass(frozen=True)
class Trained:
    """A finished run in mode "train": its folder, its model, the logs of each loop, and what was
    returned beside it.
    """

    folder: Path
    model: Any
    loops: list[dict[str, float]]
    logs: Any


def _train(run: Any, folder: Path) -> Trained:
    loops: list[dict[str, float]] = []
    model, logs = run("train", folder, train_actions=[lambda logs: loops.append(_numbers(logs))])
    return Trained(folder, model, loops, logs)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of theirs: what evaluations begin with, and what our runs are compared with."""
    return _train(_theirs, tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def trained_here(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The same run of ours."""
    return _train(_ours, tmp_path_factory.mktemp("ours"))


def test_training_alone_gives_what_theirs_gives(trained: Trained, trained_here: Trained) -> None:
    _assert_equal(trained_here.model, trained.model)
    assert _steps(trained_here.folder) == [2, 4, 6] and _steps(trained.folder)[-1] == 6
    assert trained_here.logs == {} and len(trained_here.loops) == 3
    for one, other in zip(trained_here.loops, trained.loops, strict=True):
        assert one == pytest.approx(other)
    assert _written(trained_here.folder) == _written(trained.folder) == {"train"}


@pytest.mark.parametrize(
    ("mode", "evaluations"), [("train_and_eval", 4), ("train_and_post_eval", 1)]
)
def test_training_with_evaluations_gives_what_theirs_gives(
    mode: str, evaluations: int, tmp_path: Path
) -> None:
    results, evaluated = [], ([], [])
    for run, seen in zip((_ours, _theirs), evaluated, strict=True):
        actions = [lambda logs, seen=seen: seen.append(_numbers(logs))]
        options = {"run_post_eval": mode == "train_and_eval", "eval_actions": actions}
        results.append(run(mode, tmp_path / run.__name__, **options))
    (model, logs), (their_model, their_logs) = results
    _assert_equal(model, their_model)
    assert logs and _numbers(logs) == pytest.approx(_numbers(their_logs))
    assert len(evaluated[0]) == evaluations
    for one, other in zip(*evaluated, strict=True):
        assert one == pytest.approx(other)
    assert _written(tmp_path / "_ours") == _written(tmp_path / "_theirs") == {"train", "validation"}


@pytest.mark.parametrize(("mode", "evaluations"), [("eval", 1), ("continuous_eval", 3)])
def test_a_mode_that_evaluates_gives_what_theirs_gives(
    mode: str, evaluations: int, trained: Trained, tmp_path: Path
) -> None:
    expected: list[dict[str, float]] = []
    seen: list[dict[str, float]] = []
    shutil.copytree(trained.folder, tmp_path / "theirs")
    shutil.copytree(trained.folder, tmp_path / "ours")
    # Theirs may skip checkpoints in mode "continuous_eval".
    _theirs(
        "eval", tmp_path / "theirs", eval_actions=[lambda logs: expected.append(_numbers(logs))]
    )
    model, logs = _ours(
        mode, tmp_path / "ours", eval_actions=[lambda logs: seen.append(_numbers(logs))]
    )
    assert logs == {}
    _assert_equal(model, trained.model)
    assert seen[-1] == pytest.approx(expected[0]) and expected[0]["counter"] == 3
    assert len(seen) == evaluations


def test_each_framework_goes_on_with_a_run_of_the_other(
    trained: Trained, trained_here: Trained, tmp_path: Path
) -> None:
    longer = _config(train_steps=10)
    straight, _ = _theirs("train", tmp_path / "straight", config=longer)
    for begun, run in ((trained, _ours), (trained_here, _theirs)):
        folder = shutil.copytree(begun.folder, tmp_path / run.__name__)
        model, _ = run("train", folder, config=longer)
        _assert_equal(model, straight)
        assert _steps(folder)[-1] == 10


def test_a_finished_run_is_not_trained_again(trained_here: Trained, tmp_path: Path) -> None:
    config, folder = _config(), shutil.copytree(trained_here.folder, tmp_path / "run")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("ckpt-*"))
    record = (folder / "params.yaml").read_text()
    assert from_yaml(record, convert(_config(train_steps=9))).as_dict() == convert(config).as_dict()
    assert (folder / "metrics.jsonl").exists() and (folder / "final.json").exists()
    again, _ = _ours(
        "train", folder, config=convert(config)
    )  # either kind of config has the same record
    _assert_equal(again, trained_here.model)
    assert sorted((path.name, path.stat().st_mtime_ns) for path in folder.glob("ckpt-*")) == before
    assert (folder / "params.yaml").read_text() == record


def test_options_of_our_engine_are_keywords(trained: Trained, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.folder, tmp_path / "run")
    first, last = (
        _ours("eval", folder, checkpoint=name, run_post_eval=True)[1] for name in ("2", "latest")
    )
    assert _numbers(first)["validation_loss"] > _numbers(last)["validation_loss"]
    with pytest.raises(UsageError, match="5"):
        _ours("eval", folder, checkpoint="5")


def test_mistakes_are_reported_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="train_and_eval"):
        _ours("train_and_evaluate", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"trainer\.steps_per_loop"):
        _ours("train", tmp_path / "run", config=_config(steps_per_loop=0))
    assert not (tmp_path / "run").exists()


class _Counting(orbit.Controller):  # type: ignore[misc]
    """A controller of a user's, written against Orbit."""

    made: ClassVar[list[Any]] = []

    def __init__(self, **arguments: Any) -> None:
        self.made.append(self)
        super().__init__(**arguments)


def test_a_controller_of_a_users_drives_a_run_without_summaries(
    trained: Trained, tmp_path: Path
) -> None:
    _Counting.made.clear()
    model, _ = _ours("train_and_eval", tmp_path, controller_cls=_Counting, save_summary=False)
    assert len(_Counting.made) == 1
    _assert_equal(model, trained.model)
    assert _steps(tmp_path)[-1] == STEPS
    assert _written(tmp_path) == set()


def _their_runner(
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
    _their_runner(_OwnTrainer, tmp_path, config, "eval").run()
    assert not list(tmp_path.rglob("best_ckpt"))


def test_the_parts_of_a_runner_are_there_when_its_run_has_begun(tmp_path: Path) -> None:
    config = _config(train_steps=2, best_checkpoint_eval_metric="validation_loss")
    made = _their_runner(OrbitExperimentRunner, tmp_path / "run", config)
    with pytest.raises(UsageError, match="do not exist before run"):
        _ = made.controller
    model, _ = made.run()
    assert made.trainer.model is model and made.controller.trainer is made.trainer
    assert made.checkpoint_manager.latest_checkpoint == str(tmp_path / "run" / "ckpt-2")
    best = made.trainer.checkpoint_exporter  # which tells what theirs tells
    assert (
        best.best_ckpt_path
        == tf.train.latest_checkpoint(str(tmp_path / "run" / "best_ckpt"))
        is not None
    )
    assert best.best_ckpt_logs_path == str(tmp_path / "run" / "best_ckpt" / "info.json")


def test_a_subclass_keeps_the_best_where_it_wants(tmp_path: Path) -> None:
    made = _their_runner(_OwnKeeper, tmp_path, _config(train_steps=2))
    trainer = made.trainer  # one that is asked for before is the one that runs
    assert int(trainer.global_step) == 0
    model, _ = made.run()
    assert trainer.model is model and int(trainer.global_step) == 2
    assert json.loads((tmp_path / "mine" / "info.json").read_text())["best_ckpt_global_step"] == 2


def test_another_config_is_refused_before_any_file_is_touched(
    trained_here: Trained, tmp_path: Path
) -> None:
    shutil.copytree(trained_here.folder, tmp_path, dirs_exist_ok=True)
    for folder in (
        "best_ckpt",
        "mine",
    ):  # with what Model Garden has left, which a run would take over
        theirs = train_utils.BestCheckpointExporter(
            str(tmp_path / folder), "validation_loss", "lower"
        )
        step = tf.Variable(2, dtype=tf.int64)
        theirs.maybe_export_checkpoint(
            tf.train.Checkpoint(global_step=step), {"validation_loss": 0.5}, 2
        )
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    other = _config(best_checkpoint_eval_metric="validation_loss")
    other.trainer.optimizer_config.optimizer.type = "adam"
    for cls in (OrbitExperimentRunner, _OwnKeeper):
        with pytest.raises(
            ConfigError, match=r"optimizer.type: was 'sgd' when this run began and is 'adam' now"
        ):
            _their_runner(cls, tmp_path, other).run()
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
        momentum, adam = (
            tf_keras.optimizers.legacy.SGD(0.1, 0.9),
            tf_keras.optimizers.legacy.Adam(0.01),
        )
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
    trainer = OwnTrainerConfig(
        train_steps=steps, steps_per_loop=2, summary_interval=2, checkpoint_interval=2
    )
    data = config_definitions.DataConfig(is_training=True)
    params = config_definitions.ExperimentConfig(task=SmallConfig(train_data=data), trainer=trainer)
    task = OwnTask(params.task)
    model = task.build_model()
    made = OwnTrainer(params, task, model, model.optimizer, train=True, evaluate=False)
    run_experiment(tf.distribute.get_strategy(), task, "train", params, str(folder), trainer=made)
    return made


def test_a_program_with_own_sections_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = _run_with_own_sections(tmp_path / "whole", 4)
    _run_with_own_sections(tmp_path / "again", 2)
    again = _run_with_own_sections(tmp_path / "again", 4)
    for found, expected in zip(_weights(again.model), _weights(whole.model), strict=True):
        np.testing.assert_array_equal(found, expected)
    first, last = tf.nest.map_structure(
        float, [again.train_loss.result(), again.optimizer.optimizers[1].iterations]
    )
    assert (first, last) == (0.0, 4.0)  # the loss was reset
    reported = [
        json.loads(line) for line in (tmp_path / "again" / "metrics.jsonl").read_text().splitlines()
    ]
    rates = [one["metrics"]["momentum_rate"] for one in reported if one["kind"] == "train"]
    assert rates == pytest.approx([0.1, 0.1])
