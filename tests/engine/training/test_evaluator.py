"""Evaluations: which weights the model holds at each moment, what is exported as best, and what will be reported."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

from tests.engine.linear_task import SGD, LinearConfig, LinearTask, linear_experiment
from trainer_kit.errors import DataError
from trainer_kit.evals.best.exporter import BestCheckpoint
from trainer_kit.optimizers.moving_average import MovingAverage
from trainer_kit.optimizers.per_variable import native_variable
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.scalars import flat_scalars
from trainer_kit.testing.tiny_task import CLASSES, FEATURES, tiny_arrays
from trainer_kit.training.task_inputs import ValidationSets
from trainer_kit.training.trainer import Trainer
from trainer_kit.training.trainer_creation import create_trainer

AVERAGED = {"optimizer": {"type": "adam"}, "learning_rate": {"type": "constant"}, "ema": {"average_decay": 0.9}}


def _held(trainer: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in trainer.model.trainable_variables]


class _Watched(Trainer):
    """Notes what the model holds at each moment of an evaluation, and does there what `then` says."""

    then: Mapping[str, Any] = {}

    def _at(self, moment: str) -> None:
        self.notes.append((moment, _held(self)))
        self.then.get(moment, lambda: None)()

    def eval_begin(self) -> Any:
        self.notes: list[tuple[str, list[bytes]]] = []
        self._at("begin")
        super().eval_begin()
        self._at("begun")

    def eval_reduce(self, state: Any = None, step_outputs: Any = None) -> Any:
        self._at("step")

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        self._at("end")
        logs = super().eval_end(aggregated_logs)
        self._at("ended")
        return logs


def _trainer(
    cls: type[Trainer] = Trainer,
    task_type: type[LinearTask] = LinearTask,
    *,
    eval_tf_while_loop: bool = False,
    **arguments: Any,
) -> Any:
    """Returns a trainer whose weights are not their moving average, but worse."""
    config = linear_experiment(
        best_checkpoint_eval_metric="validation_loss",
        optimizer_config=AVERAGED,
        eval_tf_while_loop=eval_tf_while_loop,
    )
    keras.utils.set_random_seed(3)
    task = task_type(config.task)
    trainer = cls(config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config), **arguments)
    for variable in trainer.model.trainable_variables:
        variable.assign(10.0 * variable + 1.0)
    return trainer


def test_average_is_in_place_from_eval_begin_to_eval_end() -> None:
    trainer = _trainer(_Watched)
    weights = _held(trainer)
    trainer.evaluate(2)
    average = trainer.notes[1][1]
    later = [("begun", average), ("step", average), ("step", average), ("end", average), ("ended", weights)]
    assert average != weights
    assert trainer.notes == [("begin", weights), *later]
    trainer.eval_begin()
    trainer.evaluate(2)
    assert trainer.notes == [("begin", average), *later]


def test_failed_evaluation_restores_the_weights() -> None:
    trainer = _trainer(_Watched)
    weights, logs = _held(trainer), trainer.evaluate(-1)
    for moment in ("begun", "step", "end"):
        trainer.then = {moment: [].pop}
        with pytest.raises(IndexError, match="pop from empty list"):
            trainer.evaluate(-1)
        assert _held(trainer) == weights
    trainer.then = {}
    assert trainer.evaluate(-1) == logs


class _Growing(LinearTask):
    """Aggregates in graph, no more than so many batches."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.most = tf.Variable(99)

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        loss = tf.reshape(step_logs["loss"][0], [1])
        losses = loss if state is None else tf.concat([state, loss], axis=0)
        tf.debugging.assert_less_equal(tf.size(losses), self.most, "too many")
        return losses

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> dict[str, Any]:
        return {"first": float(aggregated_logs[0]), "batches": len(aggregated_logs)}


def test_failed_graph_loop_restores_the_weights() -> None:
    trainer, by_step = (_trainer(task_type=_Growing, eval_tf_while_loop=looped) for looped in (True, False))
    weights, logs = _held(trainer), trainer.evaluate(-1)
    assert logs == by_step.evaluate(-1)
    trainer.task.most.assign(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too many"):
        trainer.evaluate(-1)
    assert _held(trainer) == weights
    trainer.task.most.assign(99)
    assert trainer.evaluate(-1) == logs


def test_the_weights_come_back_when_a_swap_itself_fails() -> None:
    trainer = _trainer()
    weights, logs = _held(trainer), trainer.evaluate(-1)
    average = trainer._average
    exchange = average._exchange_all["average"]
    for failing in (1, 2):
        calls: list[None] = []

        def fails_once(calls: list[None] = calls, failing: int = failing) -> None:
            calls.append(None)
            if len(calls) == failing:
                raise MemoryError("no room")
            exchange()

        average._exchange_all["average"] = fails_once
        with pytest.raises(MemoryError, match="no room"):
            trainer.evaluate(-1)
        assert (_held(trainer), average.swapped) == (weights, "")
        average._exchange_all["average"] = exchange
        assert trainer.evaluate(-1) == logs


def test_concurrent_end_averaging_restores_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, swap = _trainer(), MovingAverage.swap
    weights, swaps = _held(trainer), []

    def slow(average: MovingAverage, name: str) -> None:
        swaps.append(average)
        time.sleep(0.1)  # until all threads are there
        swap(average, name)

    trainer.eval_begin()
    monkeypatch.setattr(MovingAverage, "swap", slow)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: trainer.end_averaging(), range(4)))
    assert len(swaps) == 1
    assert _held(trainer) == weights


class _Interrupted(BestCheckpoint):
    """While it exports, another thread wants the weights back, as a late save does."""

    def maybe_export_checkpoint(self, *arguments: Any) -> bool:
        other = threading.Thread(target=self.trainer.end_averaging)
        other.start()
        other.join(0.2)
        return super().maybe_export_checkpoint(*arguments)


def test_average_is_exported_while_a_thread_ends_averaging(tmp_path: Path) -> None:
    best = _Interrupted(str(tmp_path), "validation_loss")
    trainer = best.trainer = _trainer(_Watched, checkpoint_exporter=best)
    trainer.evaluate(-1)
    trainer.state.weights.read(str(tmp_path / "ckpt-0"))
    assert ("begun", _held(trainer)) in trainer.notes


def test_nothing_is_exported_as_best_once_a_stop_was_asked_for(tmp_path: Path) -> None:
    trainer = _trainer(_Watched, checkpoint_exporter=BestCheckpoint(str(tmp_path), "validation_loss"))
    first = trainer.evaluate(-1)["validation_loss"]
    trainer.initialize()  # the average is now what the weights are
    trainer.global_step.assign(5)
    trainer.then = {"end": trainer.request_stop}
    logs = trainer.evaluate(-1)
    assert logs["validation_loss"] > first == pytest.approx(logs["best_validation_loss"])  # the higher, the better
    assert [path.name for path in tmp_path.glob("*.index")] == ["ckpt-0.index"]


class _Parts(keras.metrics.SparseCategoricalAccuracy):
    def result(self) -> Any:
        return {"recall": {"low": super().result(), "high": super().result()}, "each": tf.constant([1.0, 2.0])}


class _PartsTask(LinearTask):
    def build_metrics(self, training: bool = True) -> list[Any]:
        return [_Parts("parts")]


def test_names_of_scalar_metrics_are_known_before_evaluation() -> None:
    trainer = _trainer(task_type=_PartsTask)
    names = trainer.validation_metric_names()
    assert sorted(names) == sorted(flat_scalars(trainer.evaluate(-1), "|"))


class _ByName(LinearTask):
    """One set has a loss of its own."""

    def build_losses(self, labels: Any, model_outputs: Any, aux_losses: Any = None) -> tf.Tensor:
        if self.validation_set == "zero":
            return tf.constant(0.0)
        return super().build_losses(labels, model_outputs, aux_losses)


class _CountedByName(_ByName):
    """Counts batches too."""

    def aggregate_logs(self, state: Any, step_logs: Any) -> Any:
        return (state or 0) + 1

    def reduce_aggregated_logs(self, aggregated_logs: Any, global_step: Any = None) -> dict[str, Any]:
        return {"batches": aggregated_logs, "set": {"name_length": len(self.validation_set)}}


def _of_sets(task_type: type[LinearTask], *names: str, **trainer: Any) -> Any:
    config = linear_experiment(best_checkpoint_eval_metric="dev|validation_loss", best_checkpoint_metric_comp="lower")
    data = config.task.validation_data
    sets = {name: data.replace(global_batch_size=8 + index) for index, name in enumerate(names)}
    config = config.replace(task={"validation_data": sets}, trainer=trainer)
    keras.utils.set_random_seed(3)
    task = task_type(config.task)
    return Trainer(config, task, task.build_model(), task.create_optimizer(config.trainer.optimizer_config))


@pytest.fixture(scope="module")
def loss_alone() -> Any:
    """The loss of the set "dev" where it is the only one."""
    return _of_sets(LinearTask, "dev").evaluate(tf.constant(-1))["dev"]["validation_loss"]


@pytest.mark.parametrize("task_type", [_ByName, _CountedByName])
def test_each_validation_set_has_its_loss_steps_and_logs(task_type: type[LinearTask], loss_alone: Any) -> None:
    trainer = _of_sets(task_type, "dev", "zero", "part", validation_sets={"part": {"steps": 2}})
    logs = trainer.evaluate(tf.constant(-1))
    assert list(logs) == ["dev", "zero", "part"]
    assert logs["dev"]["validation_loss"] == loss_alone
    assert logs["zero"]["validation_loss"] == 0.0 < logs["dev"]["validation_loss"]
    assert logs["zero"]["accuracy"] == pytest.approx(logs["dev"]["accuracy"])
    if task_type is _CountedByName:
        assert {name: one["batches"] for name, one in logs.items()} == {"dev": 13, "zero": 12, "part": 2}
        assert logs["part"]["set"]["name_length"] == 4
    some = trainer.evaluate(tf.constant(-1), sets=["zero"])
    assert some == {"zero": logs["zero"]} and list(trainer.eval_seconds) == ["zero"]
    assert trainer.evaluate(tf.constant(-1)) == logs


def test_best_of_a_set_is_kept_only_when_it_is_evaluated(tmp_path: Path) -> None:
    trainer = _of_sets(LinearTask, "dev", "test")
    trainer._checkpoint_exporter = BestCheckpoint(str(tmp_path), "dev|validation_loss", "lower")
    assert list(trainer.evaluate(tf.constant(-1), sets=["test"])["test"]) == ["accuracy", "validation_loss"]
    assert not (tmp_path / "info.json").exists()
    logs = trainer.evaluate(tf.constant(-1))
    assert logs["dev"]["best_validation_loss"] == pytest.approx(logs["dev"]["validation_loss"])
    assert "best_validation_loss" not in logs["test"]
    assert trainer.evaluate(tf.constant(-1), sets=["test"]) == {"test": logs["test"]}


class _Repeated(LinearTask):
    """Validation data that repeats; of the set "unknown" TensorFlow does not know the length."""

    def build_inputs(self, params: Any, input_context: Any = None) -> Any:
        source = super().build_inputs(params, input_context)
        if params.is_training or params.global_batch_size == 8:
            return source
        repeated = source.at(0, input_context).repeat()
        return repeated.filter(lambda points, labels: True) if params.global_batch_size == 10 else repeated


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluating_all_of_an_endless_set_is_refused(replicas: int) -> None:
    devices = [f"CPU:{index}" for index in range(replicas)]
    strategy = tf.distribute.MirroredStrategy(devices) if replicas > 1 else tf.distribute.get_strategy()
    names = ("short", "long", "unknown")
    with strategy.scope():
        trainer = _of_sets(_Repeated, *names)
        several = _of_sets(_Repeated, *names, validation_sets={"long": {"steps": 2}, "unknown": {"steps": 1}})
        own = _of_sets(_Repeated, *names, validation_steps=2, validation_sets={"long": {"steps": -1}})
        some = _of_sets(_Repeated, *names, validation_steps=2)
    message = "validation_data.long never ends, but trainer.{}=-1 evaluates all"
    with pytest.raises(DataError, match=message.format("validation_steps")):
        trainer.check_data()
    with pytest.raises(DataError, match=message.format("validation_steps")):
        trainer.evaluate(tf.constant(-1), sets=["long"])
    with pytest.raises(DataError, match=r"validation_data.unknown never ends"):
        trainer.evaluate(tf.constant(-1), sets=["unknown"])
    with pytest.raises(DataError, match=message.format("validation_sets.long.steps")):
        own.check_data()
    some.check_data()
    several.check_data()
    if replicas > 1:
        assert several.evaluate(tf.constant(-1), sets=["long"])["long"]["validation_loss"] > 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("trained")
    launch(linear_experiment(train_steps=1, checkpoint_interval=1, steps_per_loop=1), "train", str(folder))
    return folder


@pytest.mark.parametrize("mode", ["train_and_eval", "train_and_post_eval", "eval", "continuous_eval"])
def test_no_mode_begins_with_validation_data_that_never_ends(mode: str, trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run")) if mode in ("eval", "continuous_eval") else tmp_path
    config = linear_experiment(train_steps=2, checkpoint_interval=1, steps_per_loop=1)
    endless = config.replace(task={"validation_data": {"is_training": True}})
    with pytest.raises(DataError, match=r"task.validation_data never ends.*is_training=false for a Source"):
        launch(endless, mode, str(run))
    assert not (run / "ckpt-2.index").exists() and not list(run.glob("evals/*.jsonl"))


class _WithOwnMetric(Trainer):
    """Adds a metric of its own to those of the task, as programs for Model Garden's Trainer do."""

    @property
    def validation_metrics(self) -> list[Any]:
        """The metrics of the task, and one more."""
        return [*super().validation_metrics, self.seen]

    def eval_end(self, aggregated_logs: Any = None) -> dict[str, Any]:
        """Returns the logs with the metric."""
        return {**super().eval_end(aggregated_logs), "seen": float(self.seen.result())}


class _CountingTask(LinearTask):
    """Updates whatever metrics its step is given."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Counts the examples with the last metric."""
        metrics[-1].update_state(tf.ones([tf.shape(inputs[1])[0]]))
        return {self.loss: tf.constant(0.0)}


def test_a_subclass_may_evaluate_with_a_metric_of_its_own() -> None:
    config = linear_experiment()
    trainer = _WithOwnMetric(config, task := _CountingTask(config.task), task.build_model(), None, train=False)
    trainer.seen = keras.metrics.Sum()
    assert trainer.evaluate(tf.constant(-1))["seen"] > 0


def test_without_validation_sets_an_evaluation_reports_nothing() -> None:
    config = linear_experiment()
    task = LinearTask(config.task)
    trainer = Trainer(config, task, task.build_model(), None, train=False, validation_dataset={})
    trainer.set_validation_sets(ValidationSets([]))
    assert trainer.evaluate(tf.constant(-1)) == {}


def test_without_validation_sets_the_task_has_the_metrics() -> None:
    config = linear_experiment()
    task = LinearTask(config.task)
    trainer = Trainer(config, task, task.build_model(), None, train=False, validation_dataset={})
    assert (trainer.validation_loss.name, len(trainer.validation_metrics)) == ("validation_loss", 1)


class _NamedTask(LinearTask):
    """Notes which of several tasks evaluates, with which model."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Notes the model, and evaluates with it."""
        self.evaluated = model
        return super().validation_step(inputs, model, metrics)


def test_subclass_evaluates_its_replaced_model_and_task() -> None:
    config = linear_experiment()
    first, second = _NamedTask(config.task), _NamedTask(config.task)
    trainer: Any = Trainer(config, first, first.build_model(), None, train=False)
    trainer._model, trainer._task = second.build_model(), second
    trainer.evaluate(tf.constant(1))
    assert second.evaluated is trainer.model and not hasattr(first, "evaluated")


class _AsksForMore(Trainer):
    """Takes more batches than there are."""

    def create_eval_loop_fn(self, has_state: bool) -> Any:
        """Returns a loop that ends with the error of the iterator."""
        step = tf.function(self.eval_step)

        def loop(iterator: Any, num_steps: Any) -> None:
            for _ in range(10_000):
                step(iterator)

        return loop


def test_error_of_a_greedy_subclass_loop_names_the_setting() -> None:
    config = linear_experiment()
    trainer = _AsksForMore(config, task := LinearTask(config.task), task.build_model(), None, train=False)
    with pytest.raises(DataError, match=r"task\.validation_data has no more batches.*validation_steps"):
        trainer.evaluate(tf.constant(-1))


def _on_replicas(task_type: type[LinearTask], replicas: int, **trainer: Any) -> Any:
    """Returns a trainer on so many replicas of one CPU, with the same initial weights each time."""
    config = linear_experiment(**trainer)
    keras.utils.set_random_seed(3)
    devices = [f"CPU:{number}" for number in range(replicas)]
    several = tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    with several.scope() if replicas > 1 else contextlib.nullcontext():
        return create_trainer(config, task_type(config.task))


class _NormalizedTask(LinearTask):
    """Its moving averages follow the last batches, which differ between replicas."""

    def build_model(self) -> Any:
        normalization = keras.layers.BatchNormalization(momentum=0.1)
        return keras.Sequential([keras.Input((FEATURES,)), normalization, keras.layers.Dense(CLASSES)])


class _NormalizedTaskOfKeras2(LinearTask):
    def build_model(self) -> Any:
        layers = tf_keras.layers
        normalization = layers.BatchNormalization(momentum=0.1, input_shape=(FEATURES,))
        return tf_keras.Sequential([normalization, layers.Dense(CLASSES)])


@pytest.mark.parametrize(
    ("task_type", "ema"),
    [
        (_NormalizedTask, None),
        (_NormalizedTask, {"average_decay": 0.5, "trainable_weights_only": False}),
        (_NormalizedTaskOfKeras2, None),
    ],
)
def test_replicas_evaluate_what_the_checkpoint_holds(
    task_type: type[LinearTask], ema: dict[str, Any] | None, tmp_path: Path
) -> None:
    trainer = _on_replicas(task_type, 2, optimizer_config={**SGD, "ema": ema})
    trainer.train(tf.constant(5))
    variables = [native_variable(variable) for variable in trainer.model.variables]
    parts = [part for variable in variables for part in trainer.strategy.experimental_local_results(variable)]
    own_values = [part.numpy().tobytes() for part in parts]
    assert len(set(own_values)) > len(variables)  # the replicas differ

    logs = trainer.evaluate(-1)

    assert [part.numpy().tobytes() for part in parts] == own_values
    trainer.write_weights(str(tmp_path / "weights"))
    plain_model = task_type(LinearConfig()).build_model()
    tf.train.Checkpoint(model=plain_model).read(str(tmp_path / "weights")).expect_partial()
    points, labels = tiny_arrays(False)
    losses = keras.losses.sparse_categorical_crossentropy(labels, plain_model(points), from_logits=True)
    assert logs["validation_loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)


class _TableTask(LinearTask):
    """The loss of an example is its label, 0 to 10. A table of 10 rows stands before the features."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        size = input_context.get_per_replica_batch_size(4) if input_context else 4
        table = tf.zeros([10, 2])
        dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([11, FEATURES]), tf.range(11))).batch(size)
        return dataset.map(lambda points, labels: ({"a_table": table, "points": points}, labels))

    def build_metrics(self, training: bool = True) -> list[Any]:
        return []

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        mean = tf.reduce_mean(tf.cast(self.labels(inputs), tf.float32))
        return {self.loss: mean, "label": mean}

    def labels(self, inputs: Any) -> Any:
        return inputs[1]


class _ScalarTask(_TableTask):
    """A scalar stands before the features."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        dataset = super().build_inputs(params, input_context)
        return dataset.map(lambda features, labels: ({"a_scalar": 1.0, "points": features["points"]}, labels))


class _UnlabelledTask(_TableTask):
    """The labels are among the features, where nothing tells them from a table."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        dataset = super().build_inputs(params, input_context)
        return dataset.map(lambda features, labels: {**features, "target": labels})

    def labels(self, inputs: Any) -> Any:
        return inputs["target"]


@pytest.mark.parametrize(
    ("task_type", "replicas"), [(_TableTask, 1), (_TableTask, 2), (_ScalarTask, 2), (_UnlabelledTask, 1)]
)
def test_batches_count_by_their_labels(task_type: type[LinearTask], replicas: int) -> None:
    logs = _on_replicas(task_type, replicas).evaluate(-1)
    assert logs == {"validation_loss": 5.0, "label": 5.0}


def test_a_batch_whose_examples_cannot_be_counted_is_refused() -> None:
    named = r"cannot be counted: {a_table: .*, target: .*}; return \(features, labels\)"
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        _on_replicas(_UnlabelledTask, 2).evaluate(-1)


class _Lazy(keras.metrics.Metric):
    """The sum of the outputs, with a variable of their width."""

    def __init__(self) -> None:
        super().__init__(name="lazy")
        self.sums: Any = None

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:
        if self.sums is None:
            self.sums = self.add_weight(shape=(outputs.shape[-1],), initializer="zeros", name="sums")
        self.sums.assign_add(tf.reduce_sum(outputs, 0))

    def result(self) -> Any:
        return tf.reduce_max(self.sums)


class _LazyTask(LinearTask):
    """Metrics that make variables at their first update; R2Score has one before."""

    def build_metrics(self, training: bool = True) -> list[Any]:
        metrics = keras.metrics
        return [metrics.F1Score("macro"), metrics.R2Score(), metrics.AUC(multi_label=True, name="auc"), _Lazy()]

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        for metric in metrics:
            metric.update_state(tf.one_hot(labels, CLASSES), tf.nn.softmax(model_outputs))


@pytest.mark.parametrize("replicas", [1, 2])
def test_metrics_that_make_variables_late_have_keras_values(replicas: int) -> None:
    trainer = _on_replicas(_LazyTask, replicas, best_checkpoint_eval_metric="lazy")
    assert trainer.validation_metric_names() == ["f1_score", "r2_score", "auc", "lazy", "validation_loss"]
    assert {"f1_score", "r2_score", "auc", "lazy"} < trainer.train(tf.constant(2)).keys()

    trainer.evaluate(-1)
    logs = trainer.evaluate(-1)

    points, labels = tiny_arrays(False)
    for metric in _LazyTask(LinearConfig()).build_metrics():
        metric.update_state(tf.one_hot(labels, CLASSES), tf.nn.softmax(trainer.model(points)))
        assert logs[metric.name] == pytest.approx(float(metric.result()), rel=1e-5, abs=1e-6)
