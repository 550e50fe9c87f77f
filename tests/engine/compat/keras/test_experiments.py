"""A compiled model that is registered as an experiment trains from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf

import trainer_kit
from tests.engine.compat.keras.keras_programs import X, Y, assert_same_weights, classifier, pairs
from trainer_kit.compat import keras as tk_keras
from trainer_kit.compat.keras.keras_task import ExperimentTask
from trainer_kit.compat.keras.keras_trainer import KerasTrainer
from trainer_kit.compat.keras.task_config import KerasExperiment
from trainer_kit.config.schema.experiment import DataConfig, ExperimentConfig, TrainerConfig
from trainer_kit.errors import UsageError
from trainer_kit.inputs.sources.arrays import ArraySource


def build_arrays(params: Any) -> Any:
    """Returns arrays to train on, and a dataset to evaluate on."""
    return (X, Y) if params.is_training else pairs().batch(30)


def build_datasets(params: Any) -> tf.data.Dataset:
    """Returns a dataset to train on, and one to evaluate on."""
    return pairs().batch(20 if params.is_training else 30)


tk_keras.register_keras_experiment(
    "keras_door_arrays", classifier, build_arrays, batch_size=20, epochs=2
)
tk_keras.register_keras_experiment("keras_door_in_order", classifier, build_datasets, epochs=2)


def test_each_epoch_of_an_experiment_has_its_own_order() -> None:
    task = ExperimentTask(None, None, KerasExperiment(classifier, build_arrays))
    source = task.build_inputs(DataConfig(global_batch_size=100, is_training=True))
    first, second = (y.numpy().tolist() for _, y in source.at(0).take(2))

    assert first != second
    assert sorted(first) == sorted(second)


class _SourceTask(tk_keras.KerasTask):
    """Trains and evaluates on data that does not tell the spec of a batch by an attribute."""

    def build_model(self) -> keras.Model:
        return classifier()

    def build_inputs(self, params: DataConfig, input_context: Any = None) -> ArraySource:
        return ArraySource((X, Y), params.replace(global_batch_size=20))


def test_a_subclass_of_keras_task_reads_a_source_of_trainer_kit() -> None:
    task = trainer_kit.get_experiment("keras_door_arrays").task
    config = ExperimentConfig(task=task, trainer=TrainerConfig(train_steps=2))
    trainer = KerasTrainer.create(config, _SourceTask(config.task), train=True, evaluate=True)
    trainer.train(tf.constant(2))

    assert int(trainer.global_step) == 2


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """The folder of a run of an experiment over a dataset, its model and its logs."""
    experiment = "keras_door_in_order"
    config = trainer_kit.get_experiment(experiment)
    folder = tmp_path_factory.mktemp("run")
    return folder, *trainer_kit.launch(config, "train_and_eval", str(folder), experiment=experiment)


def test_an_experiment_has_the_numbers_of_fit(
    finished_run: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    _, model, logs = finished_run
    config = trainer_kit.get_experiment("keras_door_in_order")

    keras.utils.set_random_seed(config.runtime.random_seed)
    fitted = classifier()
    history = tk_keras.fit(
        fitted,
        pairs().batch(20),
        epochs=2,
        validation_data=pairs().batch(30),
        verbose=0,
        model_dir=str(tmp_path),
    )
    assert logs["validation_loss"] == pytest.approx(history.history["val_loss"][-1], rel=1e-6)
    assert_same_weights(model, fitted)


def test_load_model_builds_the_model_of_a_run(finished_run: tuple[Path, Any, Any]) -> None:
    folder, trained, _ = finished_run
    loaded = trainer_kit.load_model(str(folder), "latest", import_modules=[__name__])
    assert_same_weights(loaded, trained)


def test_data_that_is_missing_is_reported() -> None:
    task = ExperimentTask(None, None, KerasExperiment(classifier, lambda _: None))

    message = r"data_fn returned None for params\.is_training=True; return \(x, y\)"
    with pytest.raises(UsageError, match=message):
        task.build_inputs(DataConfig(is_training=True))


class Stop(trainer_kit.Callback):
    """Ends the first start with an error in the middle of its second epoch."""

    starts = 0
    every = 8

    def run_begin(self, run: Any) -> None:
        Stop.starts += 1

    def loop_end(self, run: Any, logs: Any) -> None:
        if Stop.starts == 1:
            raise RuntimeError("stopped by the test")


CALLS: list[tuple[int, float]] = []


def build_callbacks() -> list[Any]:
    """Returns callbacks of epochs and batches, and one that ends the first start."""
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=10.0)
    noting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: CALLS.append((batch, logs["loss"])),
        on_epoch_end=lambda epoch, logs: CALLS.append((epoch, logs["learning_rate"])),
    )
    return [plateau, noting, Stop()]


tk_keras.register_keras_experiment(
    "keras_door_called",
    classifier,
    build_arrays,
    batch_size=20,
    epochs=4,
    callbacks=build_callbacks,
)


def test_callbacks_of_an_experiment_go_on_after_an_error(tmp_path: Path) -> None:
    config = trainer_kit.get_experiment("keras_door_called").replace(
        trainer={"checkpoint_interval": 2}
    )

    with pytest.raises(RuntimeError, match="stopped by the test"):
        trainer_kit.launch(config, "train", str(tmp_path / "a"))
    trainer_kit.launch(config, "train", str(tmp_path / "a"))
    calls_of_both_starts = CALLS.copy()

    CALLS.clear()
    trainer_kit.launch(config, "train", str(tmp_path / "b"))

    assert calls_of_both_starts == CALLS
    assert [rate for _, rate in CALLS[5::6]] == pytest.approx([1e-2, 1e-2, 5e-3, 2.5e-3])


def test_callbacks_of_an_experiment_are_a_function() -> None:
    with pytest.raises(UsageError, match="give a function that returns the list"):
        tk_keras.register_keras_experiment(
            "keras_door_listed", classifier, build_arrays, callbacks=[]
        )
