"""Several tasks in one run: jointly or one per step, on replicas, fused, evaluated and resumed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import trainer_kit as tk
from tests.builders import assert_all_close, read_json, replicas, trained_weights
from tests.engine.training.multitask.two_tasks import TwoTasks, two_tasks
from trainer_kit.errors import UsageError
from trainer_kit.run.launcher import launch
from trainer_kit.testing import TinyConfig, TinyTask
from trainer_kit.training.multitask.multi_task import model_of_task
from trainer_kit.training.multitask.multi_task_trainer import MultiTaskTrainer
from trainer_kit.training.trainer_creation import create_trainer

SGD = {
    "optimizer": {"type": "sgd"},
    "learning_rate": {"type": "constant", "constant": {"learning_rate": 0.1}},
}


def _create_trainer(config: tk.ExperimentConfig, count: int = 1) -> MultiTaskTrainer:
    keras.utils.set_random_seed(3)
    with replicas(count).scope():
        trainer = create_trainer(config, TwoTasks(config.task))
    assert isinstance(trainer, MultiTaskTrainer)
    return trainer


@dataclass(frozen=True)
class _TrainingResult:
    """What one replica has made of two tasks without fused steps.

    Attributes:
      first_logs: The logs of the first step.
      first: The weights of each task after the first step.
      last_logs: The logs of the last 10 of 20 steps.
      last: The weights of the model after them.
    """

    first_logs: dict[str, Any]
    first: dict[str, list[np.ndarray]]
    last_logs: dict[str, Any]
    last: list[np.ndarray]


def _train(training: str) -> _TrainingResult:
    trainer = _create_trainer(_build_config(training))
    first_logs = trainer.train(tf.constant(1))
    first = {name: part.get_weights() for name, part in trainer.model.sub_tasks.items()}
    trainer.train(tf.constant(9))
    return _TrainingResult(
        first_logs, first, trainer.train(tf.constant(10)), trained_weights(trainer)
    )


def _build_config(training: str, **trainer: Any) -> tk.ExperimentConfig:
    # Adam would hide a factor.
    return two_tasks({"training": training}, optimizer_config=SGD, **trainer)


@pytest.fixture(scope="module")
def train_once() -> Callable[[str], _TrainingResult]:
    """A function of the kind of training, which trains each kind once."""
    return functools.cache(_train)


def test_a_joint_step_follows_the_weighted_sum_of_losses(
    train_once: Callable[[str], _TrainingResult],
) -> None:
    trainer = _create_trainer(_build_config("joint"))
    batches = next(iter(trainer.task.build_inputs(None).at(0)))
    tasks = trainer.task.tasks
    model = trainer.model
    with tf.GradientTape() as tape:
        losses = {
            name: task.build_losses(batches[name][1], model.sub_tasks[name](batches[name][0]))
            for name, task in tasks.items()
        }
        total = 2.0 * losses["large"] + losses["small"]

    gradients = tape.gradient(total, model.trainable_variables)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        variable.assign_sub(0.1 * gradient)
    logs = train_once("joint").first_logs
    weights = train_once("joint").first

    for name, part in model.sub_tasks.items():
        assert_all_close(weights[name], part.get_weights(), atol=1e-6)

    assert float(logs["training_loss"]) == pytest.approx(float(total), rel=1e-5)

    for name, loss in losses.items():
        assert float(logs[name]["training_loss"]) == pytest.approx(float(loss), rel=1e-5)
        assert {*logs[name]} == {"training_loss", "accuracy"}


def test_an_interleaved_step_changes_only_the_drawn_task(
    train_once: Callable[[str], _TrainingResult],
) -> None:
    trainer = _create_trainer(_build_config("interleaving"))
    drawn = [*trainer.task.tasks][int(next(iter(trainer.task.build_inputs(None).at(0)))[0])]
    logs = train_once("interleaving").first_logs
    other = "small" if drawn == "large" else "large"
    before = model_of_task(trainer.model, other).get_weights()
    after = train_once("interleaving").first[other]

    assert all((value == old).all() for value, old in zip(after[2:], before[2:], strict=True))
    assert any((value != old).any() for value, old in zip(after[:2], before[:2], strict=True))
    assert logs[drawn]["steps"] == 1
    assert other not in logs
    assert float(logs["training_loss"]) == pytest.approx(float(logs[drawn]["training_loss"]))


@pytest.mark.parametrize(
    ("training", "fuse_steps", "count"),
    [("joint", 1, 2), ("interleaving", 1, 2), ("interleaving", 5, 1)],
)
def test_two_replicas_and_fused_steps_train_alike(
    training: str, fuse_steps: int, count: int, train_once: Callable[[str], _TrainingResult]
) -> None:
    expected = train_once(training)
    trainer = _create_trainer(_build_config(training, fuse_steps=fuse_steps), count)

    logs = [trainer.train(tf.constant(10)) for _ in range(2)][-1]

    for name in ("large", "small"):
        values = {metric: float(value) for metric, value in expected.last_logs[name].items()}
        assert logs[name] == pytest.approx(values, rel=1e-4)
    assert_all_close(trained_weights(trainer), expected.last, atol=2e-5)
    if training == "interleaving":
        assert sum(logs[name]["steps"] for name in ("large", "small")) == 10


def test_each_task_is_evaluated_on_its_own_data() -> None:
    trainer = _create_trainer(
        two_tasks(
            {
                "task_routines": {
                    "small": {"task_config": {"validation_data": {"drop_remainder": True}}}
                }
            }
        )
    )
    logs = trainer.evaluate(tf.constant(-1))
    points, labels = next(
        iter(
            trainer.task.tasks["large"]
            .build_inputs(TinyConfig().validation_data)
            .at(0)
            .rebatch(103)
        )
    )

    accuracy = np.mean(
        np.argmax(trainer.model.sub_tasks["large"](points), axis=1) == labels.numpy()
    )

    assert float(logs["large"]["accuracy"]) == pytest.approx(accuracy)
    assert float(logs["small"]["validation_loss"]) > 0
    assert {*logs} == {"large", "small"}
    assert trainer.validation_metric_names() == [
        f"{name}|{metric}"
        for name in ("large", "small")
        for metric in ("accuracy", "validation_loss")
    ]
    assert trainer.evaluate(tf.constant(-1), ["small"]).keys() == {"small"}


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    bests = {"small": {"metric": "small|accuracy"}}
    config = two_tasks(best_checkpoint_eval_metric="large|accuracy", best_checkpoints=bests)
    results = []

    for from_step in (None, 10):
        model, logs = launch(config, "train_and_eval", str(tmp_path), from_step=from_step)
        results.append((model.get_weights(), logs, read_json(tmp_path / "best_ckpt" / "info.json")))

    whole, resumed = results

    assert_all_close(whole[0], resumed[0])
    assert whole[1:] == resumed[1:]
    assert resumed[2]["metric"] == "large|accuracy"
    assert (tmp_path / "best_checkpoints" / "small" / "info.json").is_file()
    assert {*logs} == {"large", "small"}
    assert "best_accuracy" in logs["large"]


def _build_routine(task_type: type[TinyTask]) -> tk.TaskRoutine:
    """Registers a task with a config of its own, and returns a routine of it."""
    config = tk.configclass(
        type(f"{task_type.__name__}Config", (TinyConfig,), {"__module__": __name__})
    )
    tk.register_task(config, task_type)
    return tk.TaskRoutine(task_config=config())


class OwnStep(TinyTask):
    """A task that trains in its own way, as Counting does, which an interleaving run trains."""

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        return super().train_step(inputs, model, optimizer, metrics)


class Counting(TinyTask):
    """A task whose step returns a metric: the number of its examples."""

    def build_model(self) -> Any:
        raise AssertionError("several tasks have one model")

    def train_step(
        self, inputs: Any, model: Any, optimizer: Any, metrics: Any = None
    ) -> dict[str, Any]:
        if not hasattr(self, "examples"):
            self.examples = keras.metrics.Sum("examples")
        self.examples.update_state(tf.ones_like(inputs[1]))
        return {**super().train_step(inputs, model, optimizer, metrics), "examples": self.examples}


def test_a_metric_that_the_step_of_a_task_returns_is_reported() -> None:
    """XLA compiles the step, which cannot return a metric then."""
    routines = {"large": _build_routine(Counting)}
    trainer = _create_trainer(
        two_tasks({"task_routines": routines}).replace(runtime={"enable_xla": True})
    )
    for _ in range(2):  # it is reset between the loops
        logs = trainer.train(tf.constant(6))["large"]
        assert logs["examples"] == 8 * logs["steps"]


def test_names_that_the_run_reports_itself_are_refused() -> None:
    class Steps(TwoTasks):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tasks["small"].build_metrics = self._build_metrics

        def _build_metrics(self, training: bool = True) -> list[Any]:
            return [keras.metrics.Mean("steps")]

    config = two_tasks({"training": "interleaving"})

    with pytest.raises(
        UsageError, match=r"task\.training=interleaving: another metric is called 'steps' too"
    ):
        create_trainer(config, Steps(config.task))

    with pytest.raises(UsageError, match="'training_loss' cannot name a task"):
        two_tasks({"task_routines": {"training_loss": tk.TaskRoutine(task_config=TinyConfig())}})


def test_joint_training_refuses_a_step_that_it_would_not_call() -> None:
    routines = {"small": _build_routine(OwnStep)}

    with pytest.raises(
        UsageError, match=r"does not call the train_step of the task 'small' \(OwnStep\)"
    ):
        _create_trainer(two_tasks({"training": "joint", "task_routines": routines}))


def test_every_task_needs_a_model() -> None:
    class OneModel(TwoTasks):
        def build_models(self) -> dict[str, keras.Model]:
            return {"large": super().build_models()["large"]}

    config = two_tasks()

    with pytest.raises(
        UsageError, match=r"sub_tasks has no model for the task 'small'; it has \['large'\]"
    ):
        create_trainer(config, OneModel(config.task))


def test_the_own_state_of_tasks_is_saved_by_their_names() -> None:
    config = two_tasks()

    assert not hasattr(TwoTasks(config.task), "state")

    counts: dict[str, int] = {}

    class Remembering(TinyTask):
        def state(self) -> int:
            return counts.setdefault(self.name, 7)

        def restore(self, state: int) -> None:
            counts[self.name] = state

    task = TwoTasks(two_tasks({"task_routines": {"small": _build_routine(Remembering)}}).task)

    assert task.state() == {"small": 7}

    task.restore({"small": 9})

    assert task.state() == {"small": 9}
