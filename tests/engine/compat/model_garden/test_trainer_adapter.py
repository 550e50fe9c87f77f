"""Model Garden's trainers under trainer_kit's runner: their own state, what happens after loops and
evaluations.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orbit
import pytest
import tensorflow as tf
import tf_keras
from official.core import base_trainer, task_factory
from official.core import train_utils as theirs

from tests.engine.compat.model_garden.garden_task import eagerly, small_config
from trainer_kit.checkpoints.state.object_graph import CheckpointGraph
from trainer_kit.compat.model_garden.conversion import convert
from trainer_kit.compat.model_garden.experiment_runner import run_experiment
from trainer_kit.compat.model_garden.trainer_adapter import TrainerAdapter, adapt_trainer
from trainer_kit.config.schema.experiment import ExperimentConfig, TrainerConfig
from trainer_kit.errors import DivergedError, UsageError
from trainer_kit.run import runner


class Counting(base_trainer.Trainer):  # type: ignore[misc]
    """Counts batches in two variables, of which its checkpoint contains one under its own name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.batches = tf.Variable(0, dtype=tf.int64)
        self.others = tf.Module()
        self.others.batches = tf.Variable(0)
        self.others.fixed = tf.Variable(3.0)
        self._checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            global_step=self.global_step,
            my_batches=self.batches,
        )

    def next_train_inputs(self, iterator: Any) -> Any:
        """Counts."""
        self.batches.assign_add(1)
        self.others.batches.assign_add(1)
        return super().next_train_inputs(iterator)


def _run_counting(config: Any, folder: Path, trainers: list[TrainerAdapter]) -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        task = task_factory.get_task(config.task)
        inner = theirs.create_trainer(config, task, train=True, evaluate=True, trainer_cls=Counting)
        trainer: Any = adapt_trainer(inner)
    trainers.append(trainer)
    runner.run_experiment(
        strategy, task, "train_and_eval", convert(config), str(folder), trainer=trainer
    )


def _config_of_steps(steps: int, **optimization: Any) -> Any:
    config = small_config(**optimization)
    config.trainer.override({"train_steps": steps, "validation_steps": 2})
    return config


def test_a_garden_trainer_goes_back_after_a_divergence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = _config_of_steps(6)
    config.trainer.override(
        {"recovery_max_trials": 1, "recovery_begin_steps": 4, "loss_upper_bound": 0.0}
    )

    trainers: list[TrainerAdapter] = []
    with eagerly(), pytest.raises(DivergedError, match="recovery_max_trials=1 is used up"):
        _run_counting(config, tmp_path, trainers)

    assert f"Recovering the model from checkpoint: {tmp_path}/ckpt-3" in caplog.text
    # As if step 4 had been done once.
    assert int(trainers[0].batches) == int(trainers[0].global_step) == 4


class Averaging(Counting):
    """Keeps a number that its evaluations report, and a second optimizer, which makes its slots in
    the first loop.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.loops = tf.Variable(0.0)
        self.weight = tf.Variable(1.0)
        self.second = tf_keras.optimizers.Adam(0.1)
        self._checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            global_step=self.global_step,
            my_batches=self.batches,
            loops=self.loops,
            weight=self.weight,
            second=self.second,
        )

    def train_loop_end(self) -> Any:
        """Trains the weight."""
        self.loops.assign_add(1.0)
        self.strategy.run(
            lambda: self.second.apply_gradients([(self.weight.read_value(), self.weight)])
        )
        return super().train_loop_end()

    def eval_end(self, aggregated_logs: Any = None) -> Any:
        """Tells both."""
        return {
            **super().eval_end(aggregated_logs),
            "loops": self.loops.read_value(),
            "w": self.weight.read_value(),
        }


def _run_averaging(
    config: Any, folder: Path, mode: str = "train_and_eval", **options: Any
) -> tuple[TrainerAdapter, Any]:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        task = task_factory.get_task(config.task)
        inner = theirs.create_trainer(config, task, "train" in mode, True, trainer_cls=Averaging)
        trainer: Any = adapt_trainer(inner)
    _, logs = run_experiment(
        strategy, task, mode, config, str(folder), trainer=trainer, run_post_eval=True, **options
    )
    return trainer, logs


def test_checkpoint_items_and_their_optimizers_are_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = tf.Variable(1.0)
    second = tf_keras.optimizers.Adam(0.1)
    for _ in range(6):  # what six loops without a stop do
        second.apply_gradients([(weight.read_value(), weight)])

    _run_averaging(_config_of_steps(3), tmp_path)

    advice = "have Averaging inherit from trainer_kit.compat.model_garden.Trainer"
    assert f"from its beginning; {advice}" in caplog.text
    names = {
        name.partition("/")[0] for name, _ in tf.train.list_variables(str(tmp_path / "ckpt-3"))
    }
    assert {"model", "optimizer", "global_step", "my_batches", "loops", "second"} <= names

    # To trace the functions again takes seconds.
    with eagerly():
        resumed, logs = _run_averaging(_config_of_steps(6), tmp_path)
        _, earlier_logs = _run_averaging(_config_of_steps(6), tmp_path, "eval", checkpoint="3")

    assert int(resumed.batches) == int(resumed.others.batches) == int(resumed.global_step) == 6
    assert float(logs["loops"]) == 6.0
    assert float(logs["w"]) == float(weight)
    assert float(earlier_logs["loops"]) == 3.0
    assert float(earlier_logs["w"]) > float(logs["w"])
    keys = CheckpointGraph(str(tmp_path / "ckpt-6")).get_section_keys("step_state")
    assert keys.keys() == {"trainer/others/batches", "trainer/others/fixed"}

    assert resumed.train_dataset is not None  # its data are those of the wrapped trainer
    other = tf.data.Dataset.range(3)
    resumed.train_dataset = other
    assert resumed.train_dataset is other


def test_a_name_that_our_checkpoints_have_is_refused() -> None:
    class Named(Counting):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self._checkpoint = tf.train.Checkpoint(global_step=self.global_step, task=self.batches)

    config = _config_of_steps(3)
    inner = theirs.create_trainer(
        config, task_factory.get_task(config.task), True, True, trainer_cls=Named
    )
    message = "every checkpoint already has a part named task; give your item another name"

    with pytest.raises(UsageError, match=message):
        adapt_trainer(inner)


def test_a_trainer_that_cannot_be_adapted_is_refused() -> None:
    message = "SimpleNamespace has no config, model, optimizer, global_step, checkpoint; g"

    with pytest.raises(UsageError, match=message):
        adapt_trainer(SimpleNamespace(strategy=None))


class OrbitTrainer(orbit.StandardTrainer):  # type: ignore[misc]
    """A trainer of Orbit, with a loop of its own, that fits a constant to 24 numbers."""

    def __init__(self, config: ExperimentConfig, log: str = "training_loss") -> None:
        super().__init__(tf.data.Dataset.range(24, output_type=tf.float32).repeat().batch(4))
        self.strategy = tf.distribute.get_strategy()
        self.config = config
        self.log = log
        self.model = tf.Module()
        self.model.weight = tf.Variable(0.5)
        self.optimizer = tf_keras.optimizers.Adam(0.1)
        self.optimizer.build([self.model.weight])
        self.global_step = orbit.utils.create_global_step()
        self.loss = tf_keras.metrics.Mean()
        self.checkpoint = tf.train.Checkpoint(
            model=self.model, optimizer=self.optimizer, step=self.global_step
        )

    def train_loop_begin(self) -> None:
        self.loss.reset_state()

    def train_step(self, iterator: Any) -> None:
        numbers = next(iterator)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((numbers - self.model.weight) ** 2)
        self.optimizer.apply_gradients(
            [(tape.gradient(loss, self.model.weight), self.model.weight)]
        )
        self.loss.update_state(loss)
        self.global_step.assign_add(1)

    def train_loop_end(self) -> Any:
        return {self.log: self.loss.result()}


def _run_of_orbit(folder: Path, steps: int, log: str = "training_loss") -> OrbitTrainer:
    options = TrainerConfig(
        train_steps=steps, steps_per_loop=2, summary_interval=2, checkpoint_interval=2
    )
    config = ExperimentConfig(trainer=options)
    trainer = OrbitTrainer(config, log)
    run_experiment(trainer.strategy, None, "train", config, str(folder), trainer=trainer)
    return trainer


def test_a_trainer_of_orbit_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = _run_of_orbit(tmp_path / "whole", 4)
    _run_of_orbit(tmp_path / "again", 2)
    again = _run_of_orbit(tmp_path / "again", 4)  # with numbers 8 to 15

    assert int(again.optimizer.iterations) == int(again.global_step) == 4
    assert again.model.weight.numpy() == whole.model.weight.numpy() != 0.5


def test_a_loop_of_orbit_without_a_training_loss_is_refused(tmp_path: Path) -> None:
    message = "a training loop returned mse and no training_loss, by which a run recovers"

    with pytest.raises(UsageError, match=message):
        _run_of_orbit(tmp_path, 4, log="mse")


def test_best_weights_that_no_trainer_keeps_are_refused() -> None:
    config = ExperimentConfig(trainer=TrainerConfig(best_checkpoint_eval_metric="accuracy"))
    message = "best_checkpoint_eval_metric=accuracy: OrbitTrainer keeps no best weights"

    with pytest.raises(UsageError, match=message):
        adapt_trainer(OrbitTrainer(config))
