"""A trainer and what keeps its best, as the config has them."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.engine.linear_task import LinearTask
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.configclass import configclass
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import UsageError
from trainer_kit.evals.best.best_checkpoints import BestCheckpoints
from trainer_kit.evals.best.criterion import Criterion
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.process.run_directory import RunDirectory
from trainer_kit.telemetry.flops import describe_model_cost
from trainer_kit.testing import TinyConfig, TinyTask, tiny_experiment
from trainer_kit.training.base_trainer import CustomParts
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import (
    check_best_metric,
    check_freeze,
    check_overfit_batches,
    choose_optimizer,
    create_exporter,
    create_trainer,
)


def _create_trainer(task_type: type[TinyTask] = LinearTask, **arguments: Any) -> Any:
    config = tiny_experiment()
    return create_trainer(config, task_type(config.task), **arguments)


def test_an_optimizer_is_made_and_built_only_to_train() -> None:
    assert _create_trainer().optimizer.built
    assert _create_trainer(train=False).optimizer is None


class _Patient(Trainer):
    """A trainer of one's own."""


@pytest.mark.parametrize("name", [f"{__name__}:_Patient", ""])
def test_the_config_can_name_the_class_of_the_trainer(name: str) -> None:
    config = tiny_experiment(trainer_class=name)
    assert type(create_trainer(config, LinearTask(config.task))) is (_Patient if name else Trainer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Mine", "trainer.trainer_class: there is no module 'no_such_module'"),
        (
            f"{__name__}:_Patiant",
            "no subclass of trainer_kit.Trainer called '_Patiant'; did you mean _Patient",
        ),
        (f"{__name__}:_Aggregating", "no subclass of trainer_kit.Trainer called '_Aggregating'"),
    ],
)
def test_a_name_of_no_trainer_is_refused(name: str, message: str) -> None:
    config = tiny_experiment(trainer_class=name)
    with pytest.raises(UsageError, match=message):
        create_trainer(config, LinearTask(config.task))


def _create_exporter(
    config: ExperimentConfig, folder: Path
) -> BestWeightsExporter | BestCheckpoints | None:
    return create_exporter(config, RunDirectory(str(folder), config.trainer))


def test_bests_with_names_are_kept_as_the_config_has_them(tmp_path: Path) -> None:
    values = {"metric": "validation_loss", "metric_comp": "lower", "keep": 3, "min_delta": 0.5}
    exporter = _create_exporter(tiny_experiment(best_checkpoints={"top": values}), tmp_path)

    assert isinstance(exporter, BestCheckpoints)
    assert exporter.primary is None
    assert exporter.named_exporters["top"].criterion == Criterion(
        "validation_loss", "lower", 3, 0.5
    )
    assert exporter.named_exporters["top"].export_dir == str(tmp_path / "best_checkpoints" / "top")


class _Aggregating(LinearTask):
    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return state


def test_a_metric_is_checked_unless_only_a_run_can_tell(tmp_path: Path) -> None:
    exporter = _create_exporter(tiny_experiment(best_checkpoint_eval_metric="acuracy"), tmp_path)
    best = BestCheckpoints.from_exporter(exporter)

    with pytest.raises(UsageError, match=r"did you mean accuracy.*all: accuracy, validation_loss"):
        check_best_metric(_create_trainer(), best)

    check_best_metric(_create_trainer(_Aggregating), best)


@pytest.mark.parametrize(("comparison", "warns"), [("higher", True), ("lower", False)])
def test_the_highest_loss_as_the_best_is_warned_of(
    comparison: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {
        "best_checkpoint_eval_metric": "validation_loss",
        "best_checkpoint_metric_comp": comparison,
    }
    config = tiny_experiment(**options)

    create_exporter(config, RunDirectory(str(tmp_path), config.trainer))

    assert ("set it to lower if lower values are better" in caplog.text) == warns


def test_the_cost_of_an_example_is_known_after_a_step() -> None:
    trainer = _create_trainer(TinyTask)

    assert "for one example" not in describe_model_cost(trainer)

    trainer.train(tf.constant(1))

    assert "195" in describe_model_cost(trainer)
    assert "for one example" in describe_model_cost(trainer)


def test_labels_and_weights_are_not_given_to_the_model() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    spec = (tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Keras warns of inputs of another structure
        assert "FLOPs unknown" not in describe_model_cost(
            SimpleNamespace(model=model, batch_spec=spec)
        )


def test_a_trainer_that_opens_its_data_itself_cannot_cut_it() -> None:
    options = tiny_experiment(overfit_batches=2).trainer
    check_overfit_batches(_create_trainer(), options)

    with pytest.raises(UsageError, match=r"trainer\.overfit_batches: Theirs opens its data itself"):
        check_overfit_batches(
            SimpleNamespace(class_name="Theirs", custom_parts=CustomParts(replaces_steps=True)),
            options,
        )


def test_a_trainer_of_another_kind_that_cannot_freeze_is_refused() -> None:
    trainer = create_trainer(config := tiny_experiment(freeze=("bias",)), LinearTask(config.task))
    check_freeze(trainer, config.trainer.freeze)
    theirs = SimpleNamespace(class_name="Theirs", custom_parts=CustomParts(replaces_steps=True))
    check_freeze(theirs, ())

    with pytest.raises(
        UsageError, match="freezes no variables; remove freeze, or inherit from the Trainer"
    ):
        check_freeze(theirs, config.trainer.freeze)


@configclass
class _OwnOptimizerConfig(TinyConfig):
    pass


@register_task(_OwnOptimizerConfig)
class _OwnOptimizer(LinearTask):
    @classmethod
    def create_optimizer(cls, optimizer_config: Any, runtime_config: Any = None) -> Any:
        return keras.optimizers.SGD(0.1)


def test_a_config_without_an_optimizer_gets_adam() -> None:
    config = tiny_experiment(optimizer_config={})

    chosen = choose_optimizer(config, LinearTask).trainer.optimizer_config
    assert (chosen.optimizer.type, chosen.learning_rate.constant.learning_rate) == ("adam", 0.001)

    # A rate that is set stays.
    with_rate = tiny_experiment(optimizer_config={"learning_rate": 0.5})
    chosen = choose_optimizer(with_rate, LinearTask).trainer.optimizer_config
    assert (chosen.optimizer.type, chosen.learning_rate.constant.learning_rate) == ("adam", 0.5)


def test_what_has_an_optimizer_gets_no_other() -> None:
    config = tiny_experiment()
    assert choose_optimizer(config, LinearTask) is config

    without = tiny_experiment(optimizer_config={})
    assert choose_optimizer(without, _OwnOptimizer) is without

    sgd = {"optimizer": "sgd", "learning_rate": 0.1}
    several = tiny_experiment(optimizer_config={}, optimizers={"first": sgd})
    assert choose_optimizer(several, LinearTask) is several
