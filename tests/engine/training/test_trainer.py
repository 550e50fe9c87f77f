"""The Trainer with real models, datasets and replicas."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import trainer_kit
from tests.builders import assert_all_close, seeded_trainer, trained_weights
from tests.engine.linear_task import LinearTask, linear_experiment
from trainer_kit.config.experiment_registry import register_task
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.errors import DataError, UsageError
from trainer_kit.runtime.precision import precision_scope
from trainer_kit.testing import TinyConfig, tiny_arrays
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer


def _create_trainer(
    config: ExperimentConfig | None = None,
    task_type: type[LinearTask] = LinearTask,
    cls: type[Trainer] = Trainer,
    count: int = 1,
    **arguments: Any,
) -> Trainer:
    return seeded_trainer(config or linear_experiment(), task_type, count, cls=cls, **arguments)


@dataclass(frozen=True)
class _Reached:
    """Where a trainer is after some steps.

    Attributes:
      weights: of the model.
      training_loss: of the loop that ended there, which begins at the number of steps before; None
        at the start.
      evaluated: what an evaluation of all data returns.
    """

    weights: list[np.ndarray]
    training_loss: np.float32 | None
    evaluated: dict[str, Any]


@pytest.fixture(scope="module")
def plain() -> dict[int, _Reached]:
    """Steps -> where a trainer of the tiny experiment is after them, to compare others with."""
    trainer = _create_trainer()
    reached = {}
    before = 0
    for steps in (0, 5, 6, 10, 20):
        loss = trainer.train(tf.constant(steps - before))["training_loss"] if steps else None
        reached[steps] = _Reached(trained_weights(trainer), loss, trainer.evaluate(tf.constant(-1)))
        before = steps

    return reached


def test_the_constructor_takes_model_gardens_arguments() -> None:
    assert list(inspect.signature(Trainer).parameters) == [
        "config",
        "task",
        "model",
        "optimizer",
        "train",
        "evaluate",
        "train_dataset",
        "validation_dataset",
        "checkpoint_exporter",
    ]


def test_a_loop_trains_counts_and_reports_until_it_is_stopped() -> None:
    trainer = _create_trainer()
    first = trainer.train(tf.constant(5))
    second = trainer.train(tf.constant(50))

    assert trainer.loop_steps == 50
    assert trainer.reached_step == 55
    assert int(trainer.global_step) == 55
    assert len(trainer.current_loop.newest_graph.outputs) == 1  # all results are one transfer
    assert set(first) == {"accuracy", "training_loss", "learning_rate"}
    assert second["training_loss"] < first["training_loss"]  # and not a mean over both loops
    assert second["learning_rate"] == np.float32(0.01)

    trainer.request_stop()
    trainer.train(tf.constant(5))

    assert (trainer.loop_steps, trainer.is_stop_requested, int(trainer.global_step)) == (
        0,
        True,
        55,
    )


@pytest.mark.parametrize(
    "switches",
    [{"train_tf_while_loop": False}, {"train_tf_while_loop": False, "train_tf_function": False}],
)
def test_every_other_way_of_looping_gives_the_same_weights(
    switches: dict[str, bool], plain: dict[int, _Reached]
) -> None:
    trainer = _create_trainer(linear_experiment(**switches))

    trainer.train(tf.constant(6))

    assert_all_close(trained_weights(trainer), plain[6].weights, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_mixed_precision_keeps_weights_and_losses_in_float32(dtype: str) -> None:
    config = linear_experiment().replace(runtime={"mixed_precision_dtype": dtype})

    with precision_scope(config.runtime):
        trainer = _create_trainer(config)
        first = trainer.train(tf.constant(10))
        reached = trained_weights(trainer)
        last = trainer.train(tf.constant(95))
        evaluated = trainer.evaluate(tf.constant(-1))
        # The loss of float16 is scaled, which the step of the guide has to do as well.
        if dtype == "float16":
            own = _create_trainer(config, _run_documented_task())
            own.train(tf.constant(10))
            assert_all_close(trained_weights(own), reached, atol=2e-5)

    assert trainer.model.compute_dtype == dtype
    assert {weight.dtype for weight in reached} == {np.dtype("float32")}
    assert last["training_loss"] < first["training_loss"] < 2
    assert evaluated["validation_loss"].dtype == evaluated["accuracy"].dtype == np.float32
    assert (type(trainer.optimizer).__name__ == "LossScaleOptimizer") == (dtype == "float16")


def test_xla_gives_the_same_loss(plain: dict[int, _Reached]) -> None:
    compiled = _create_trainer(linear_experiment().replace(runtime={"enable_xla": True})).train(
        tf.constant(5)
    )

    assert compiled["training_loss"] == pytest.approx(plain[5].training_loss, abs=1e-4)


class _RunsPython(LinearTask):
    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> Any:
        host_tensor = tf.ensure_shape(tf.numpy_function(lambda: np.float32(1), [], tf.float32), [])
        return host_tensor * super().build_losses(labels, model_outputs, aux_losses)


def test_with_xla_the_whole_step_is_compiled() -> None:
    trainer = _create_trainer(
        linear_experiment().replace(runtime={"enable_xla": True}), _RunsPython
    )
    with pytest.raises(tf.errors.OpError, match=r"PyFunc|compil"):
        trainer.train(tf.constant(1))


def test_replicas_train_and_evaluate_like_one_device(plain: dict[int, _Reached]) -> None:
    several = _create_trainer(count=2)

    several.train(tf.constant(20))

    assert_all_close(trained_weights(several), plain[20].weights, atol=2e-5)

    mine = several.evaluate(tf.constant(-1))
    theirs = plain[20].evaluated

    assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-6)
    assert mine["validation_loss"] == pytest.approx(theirs["validation_loss"], abs=1e-5)


@pytest.mark.parametrize("batch", [8, 103])
def test_validation_counts_every_example_once_whatever_the_batch(batch: int) -> None:
    config = linear_experiment()
    config = config.replace(task={"validation_data": {"global_batch_size": batch}})
    trainer = _create_trainer(config)
    logs = trainer.evaluate(tf.constant(-1))

    expected = _compute_expected(trainer)

    assert logs["accuracy"] == pytest.approx(expected["accuracy"], abs=1e-6)
    assert logs["validation_loss"] == pytest.approx(expected["validation_loss"], abs=1e-5)


# A replica without an example, and one with fewer than the other.
@pytest.mark.parametrize("batch", [1, 7])
def test_replicas_share_any_batch_to_evaluate_on(batch: int) -> None:
    config = linear_experiment(validation_steps=5).replace(
        task={"validation_data": {"global_batch_size": batch}}
    )
    several = _create_trainer(config, count=2)
    for steps in (-1, 5):
        mine = several.evaluate(tf.constant(steps))
        assert mine == pytest.approx(
            _compute_expected(several, batch * steps if steps > 0 else None), abs=1e-6
        )


def _compute_expected(trainer: Trainer, examples: int | None = None) -> dict[str, float]:
    """What an evaluation of the first examples should report."""
    points, labels = (array[:examples] for array in tiny_arrays(False))
    outputs = trainer.model(points, training=False).numpy()
    losses = keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)
    return {
        "accuracy": float(np.mean(outputs.argmax(axis=1) == labels)),
        "validation_loss": float(np.mean(losses)),
    }


def test_metrics_do_not_count_past_the_end_of_static_batches() -> None:
    config = linear_experiment().replace(task={"validation_data": {"global_batch_size": 103}})
    trainer = _create_trainer(config, _AggregatingTask)
    expected = np.float32(_compute_expected(trainer)["accuracy"])

    assert {trainer.evaluate(tf.constant(-1))["accuracy"] for _ in range(20)} == {expected}


def _run_documented_task() -> type[LinearTask]:
    """Returns a task with the train_step that docs/guides/tasks.md shows."""
    text = (Path(__file__).parents[3] / "docs" / "guides" / "tasks.md").read_text()
    step = text.split("<!-- example: train_step -->")[1].split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {"tf": tf, "tk": trainer_kit}
    exec("class Own:\n" + textwrap.indent(step, "    "), names)
    return type("_DocumentedTask", (names["Own"], LinearTask), {})


def test_train_step_of_the_guide_equals_the_default_one(plain: dict[int, _Reached]) -> None:
    own = _create_trainer(task_type=_run_documented_task(), count=2)

    own.train(tf.constant(10))

    assert_all_close(trained_weights(own), plain[10].weights, atol=2e-5)


@pytest.mark.parametrize(("fresh", "same"), [(True, True), (False, False)])
def test_config_decides_whether_evaluations_restart_the_data(fresh: bool, same: bool) -> None:
    trainer = _create_trainer(linear_experiment(eval_recreate_iterator=fresh, validation_steps=2))
    first, second = (trainer.evaluate(tf.constant(2))["validation_loss"] for _ in range(2))

    assert (first == second) == same


class _KerasTwoTask(LinearTask):
    def build_model(self) -> Any:
        return tf_keras.Sequential([tf_keras.layers.Dense(3, input_shape=(8,))])

    def build_metrics(self, training: bool = True) -> list[Any]:
        return [tf_keras.metrics.SparseCategoricalAccuracy("accuracy")]


class _Module(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kernel = tf.Variable(tf.random.stateless_normal((8, 3), (1, 2)) * 0.1)
        self.bias = tf.Variable(tf.zeros(3))

    def __call__(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return inputs @ self.kernel + self.bias


class _ModuleTask(LinearTask):
    def build_model(self) -> Any:
        return _Module()


@pytest.mark.parametrize(("task_type", "count"), [(_KerasTwoTask, 2), (_ModuleTask, 1)])
def test_models_of_other_kinds_train_evaluate_and_restore(
    task_type: type[LinearTask], count: int, tmp_path: Any
) -> None:
    trainer = _create_trainer(task_type=task_type, count=count)
    losses = [trainer.train(tf.constant(20))["training_loss"] for _ in range(3)]

    assert losses[2] < losses[0]

    before = trainer.evaluate(tf.constant(-1))
    assert before["accuracy"] > 0.5

    path = trainer.checkpoint.write(str(tmp_path / "ckpt"))
    again = _create_trainer(task_type=task_type, count=count)

    again.checkpoint.read(path).assert_consumed()

    held = [
        [variable.numpy().tobytes() for variable in member.model.variables]
        for member in (trainer, again)
    ]
    assert held[0] == held[1]
    assert int(again.global_step.numpy()) == 60
    assert trainer.evaluate(tf.constant(-1)) == before


class _AggregatingTask(LinearTask):
    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        logs = super().validation_step(inputs, model, metrics)
        return {**logs, "labels": inputs[1]}

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return [*(state or []), *(label for part in step_logs["labels"] for label in part.numpy())]

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"examples": len(aggregated_logs), "labels_seen": {"sum": sum(aggregated_logs)}}


def test_logs_of_all_examples_are_aggregated() -> None:
    trainer = _create_trainer(task_type=_AggregatingTask, count=2)
    logs = trainer.evaluate(tf.constant(-1))

    assert logs["examples"] == 103
    assert logs["labels_seen"] == {"sum": int(tiny_arrays(False)[1].sum())}
    assert trainer.validation_metric_names() is None


class _PassthroughTrainer(Trainer):
    def next_eval_inputs(self, iterator: Any) -> tuple[Any, dict[str, Any]]:
        inputs, _ = super().next_eval_inputs(iterator)
        return inputs, {"name": tf.strings.as_string(inputs[1]), "labels": tf.constant(0)}


class _NamingTask(_AggregatingTask):
    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return [*(state or []), *step_logs["name"].numpy()]

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"names": aggregated_logs}


def test_logs_passed_through_stay_on_the_host_and_the_models_win(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = _create_trainer(task_type=_NamingTask, cls=_PassthroughTrainer)
    logs = trainer.evaluate(tf.constant(-1))

    assert logs["names"] == [str(label).encode() for label in tiny_arrays(False)[1]]
    assert "replace the passed-through logs of the same names: labels" in caplog.text


class _HookedTrainer(Trainer):
    """Feeds the model with zeros, and notes when loops begin and whether the data was open."""

    begun: tuple[bool, ...] = ()

    def next_train_inputs(self, iterator: Any) -> Any:
        points, labels = super().next_train_inputs(iterator)
        return points * 0.0, labels

    def train_loop_begin(self) -> None:
        assert tf.executing_eagerly()
        self.begun = (*self.begun, self.data.source is not None)
        super().train_loop_begin()


def test_a_subclass_decides_what_is_fed_and_hears_of_each_loop() -> None:
    trainer = _create_trainer(cls=_HookedTrainer)

    assert trainer.train(tf.constant(1))["training_loss"] == pytest.approx(np.log(3), abs=1e-5)

    trainer.train(tf.constant(2))

    assert trainer.begun == (False, True)  # the second loop goes on with the iterator of the first


class _WrappingTrainer(Trainer):
    """Replaces its step by one that counts the calls, once the rest of it is there."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        step = self.train_step
        self.calls = 0

        def counted_step(iterator: Any) -> None:
            self.calls += 1
            step(iterator)

        self.train_step = counted_step


def test_a_step_that_a_constructor_sets_is_trained() -> None:
    trainer = _create_trainer(cls=_WrappingTrainer)

    trainer.train(tf.constant(2))

    assert trainer.calls > 0


class _BrokenTask(LinearTask):
    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        raise AssertionError("build_inputs was called")


def test_ready_made_datasets_replace_build_inputs() -> None:
    data = tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(10)
    config = linear_experiment()
    task = _BrokenTask(config.task)
    optimizer = task.create_optimizer(config.trainer.optimizer_config, config.runtime)
    trainer = Trainer(
        config,
        task,
        task.build_model(),
        optimizer,
        train_dataset=data.repeat(),
        validation_dataset=data,
    )

    trainer.train(tf.constant(20))

    assert trainer.evaluate(tf.constant(-1))["accuracy"] > 0.3

    trainer.train_dataset = data.take(2)

    trainer.train(tf.constant(3))

    assert trainer.has_data_ended
    assert int(trainer.global_step) == 22


def test_what_is_not_needed_is_not_built() -> None:
    trainer = _create_trainer(task_type=_BrokenTask, train=False)

    assert trainer.train_metrics == []
    assert _create_trainer(task_type=_BrokenTask, evaluate=False).validation_metrics == []


@pytest.mark.parametrize("section", ["train_data", "validation_data"])
def test_data_without_a_batch_is_an_error_naming_the_section(section: str) -> None:
    empty = tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).take(0).batch(4)
    trainer = _create_trainer()
    trainer.train_dataset = empty.repeat()
    trainer.eval_dataset = empty

    with pytest.raises(DataError, match=f"task.{section} has no batch"):
        (trainer.train if section == "train_data" else trainer.evaluate)(tf.constant(2))


@pytest.mark.parametrize("fuse_steps", [1, 2])
def test_taking_a_batch_shows_whether_the_data_has_ended(fuse_steps: int) -> None:
    data = tf.data.Dataset.from_tensor_slices(tiny_arrays(True)).batch(10, drop_remainder=True)
    trainer = _create_trainer(linear_experiment(fuse_steps=fuse_steps))
    trainer.train_dataset = data.take(2)
    assert not trainer.probe_end_of_data()
    # With fused steps this is the second batch of the first element.
    assert not trainer.probe_end_of_data()
    trainer.global_step.assign(2)
    assert trainer.probe_end_of_data()
    assert trainer.has_data_ended


class _ModelWithItems(_Module):
    def __init__(self) -> None:
        super().__init__()
        self.checkpoint_items = {"extra": tf.train.Checkpoint(count=tf.Variable(7))}


class _ItemsTask(LinearTask):
    def build_model(self) -> Any:
        return _ModelWithItems()


def test_what_the_model_adds_is_in_the_checkpoint(tmp_path: Any) -> None:
    trainer = _create_trainer(task_type=_ItemsTask)
    trainer.model.checkpoint_items["extra"].count.assign(8)
    path = trainer.checkpoint.write(str(tmp_path / "ckpt"))

    again = _create_trainer(task_type=_ItemsTask)

    again.checkpoint.read(path).assert_consumed()
    assert int(again.model.checkpoint_items["extra"].count) == 8


def test_model_gardens_init_async_refuses_parameter_servers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = _create_trainer()
    trainer.init_async()
    kind = tf.distribute.experimental.ParameterServerStrategy
    monkeypatch.setattr(trainer, "_strategy", kind.__new__(kind))

    with pytest.raises(UsageError, match="distribution_strategy: "):
        trainer.init_async()


def test_loop_functions_can_be_had_by_themselves() -> None:
    trainer = _create_trainer()

    trainer.create_train_loop_fn()(iter(trainer.train_dataset), tf.constant(3))

    assert int(trainer.global_step) == 3

    outputs: list[Any] = []
    loop = trainer.create_eval_loop_fn(has_state=True)

    loop(
        iter(trainer.eval_dataset),
        tf.constant(2),
        None,
        lambda state, output: outputs.append(output),
    )

    assert len(outputs) == 2
    assert isinstance(outputs[0]["loss"], tuple)


def test_the_class_that_is_registered_with_a_task_trains_it() -> None:
    @trainer_kit.configclass
    class OwnConfig(TinyConfig):
        pass

    class Own(Trainer):
        @classmethod
        def create(
            cls,
            config: Any,
            task: Any,
            train: bool,
            evaluate: bool,
            checkpoint_exporter: Any = None,
        ) -> Any:
            trainer = super().create(config, task, train, evaluate, checkpoint_exporter)
            trainer.made_by = cls
            return trainer

    register_task(OwnConfig, LinearTask, trainer=Own)
    config = linear_experiment().replace(task=OwnConfig())

    assert (
        type(create_trainer(linear_experiment(), LinearTask(linear_experiment().task))) is Trainer
    )

    own = create_trainer(config, LinearTask(config.task), evaluate=False)
    assert type(own) is own.made_by is Own
