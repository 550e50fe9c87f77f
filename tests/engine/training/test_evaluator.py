"""Evaluations: which weights the model has when, what is exported as best, what is reported."""

from __future__ import annotations

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

from tests.builders import on_each_replica, seeded_trainer
from tests.engine.linear_task import SGD, LinearConfig, LinearTask, linear_experiment
from trainer_kit.errors import DataError
from trainer_kit.evals.best.exporter import BestWeightsExporter
from trainer_kit.optimizers.moving_average import MovingAverage
from trainer_kit.run.launcher import launch
from trainer_kit.telemetry.scalars import flatten_scalars
from trainer_kit.testing.tiny_task import CLASSES, FEATURES, tiny_arrays
from trainer_kit.training.task_inputs import ValidationSets
from trainer_kit.training.trainer import Trainer

AVERAGED = {
    "optimizer": {"type": "adam"},
    "learning_rate": {"type": "constant"},
    "ema": {"average_decay": 0.9},
}


def _read_values(trainer: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in trainer.model.trainable_variables]


class _Watched(Trainer):
    """Notes what the model contains at each moment of an evaluation, and calls `then` there."""

    then: Mapping[str, Any] = {}

    def _at(self, moment: str) -> None:
        self.notes.append((moment, _read_values(self)))
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


def _create_trainer(
    cls: type[Trainer] = Trainer,
    task_type: type[LinearTask] = LinearTask,
    exporter: BestWeightsExporter | None = None,
) -> Any:
    """Returns a trainer whose weights are not their moving average, but worse."""
    config = linear_experiment(optimizer_config=AVERAGED, eval_tf_while_loop=False)
    trainer = seeded_trainer(config, task_type, cls=cls)
    trainer.checkpoint_exporter = exporter
    for variable in trainer.model.trainable_variables:
        variable.assign(10.0 * variable + 1.0)

    return trainer


@pytest.fixture(scope="module")
def watched() -> Any:
    """A trainer that is the same after each evaluation."""
    return _create_trainer(_Watched)


def test_average_is_in_place_from_eval_begin_to_eval_end(watched: Any) -> None:
    trainer = watched
    weights = _read_values(trainer)
    trainer.evaluate(2)
    average = trainer.notes[1][1]
    later = [
        ("begun", average),
        ("step", average),
        ("step", average),
        ("end", average),
        ("ended", weights),
    ]

    assert average != weights
    assert trainer.notes == [("begin", weights), *later]

    trainer.eval_begin()
    trainer.evaluate(2)

    assert trainer.notes == [("begin", average), *later]


def test_failed_evaluation_restores_the_weights(watched: Any) -> None:
    trainer = watched
    weights = _read_values(trainer)
    logs = trainer.evaluate(-1)

    for moment in ("begun", "step", "end"):
        trainer.then = {moment: [].pop}
        with pytest.raises(IndexError, match="pop from empty list"):
            trainer.evaluate(-1)
        assert _read_values(trainer) == weights

    trainer.then = {}
    assert trainer.evaluate(-1) == logs


def test_concurrent_end_averaging_restores_the_weights_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = _create_trainer()
    swap = MovingAverage.swap
    weights = _read_values(trainer)
    swaps = []

    def slow(average: MovingAverage, name: str) -> None:
        swaps.append(average)
        time.sleep(0.1)  # until all threads are there
        swap(average, name)

    trainer.eval_begin()
    monkeypatch.setattr(MovingAverage, "swap", slow)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: trainer.restore_trained_weights(), range(4)))

    assert len(swaps) == 1
    assert _read_values(trainer) == weights


class _Interrupted(BestWeightsExporter):
    """While it exports, another thread wants the weights back, as a late save does."""

    def maybe_export_checkpoint(self, *arguments: Any) -> bool:
        other = threading.Thread(target=self.trainer.restore_trained_weights)
        other.start()
        other.join(0.2)
        return super().maybe_export_checkpoint(*arguments)


def test_average_is_exported_while_a_thread_ends_averaging(tmp_path: Path) -> None:
    best = _Interrupted(str(tmp_path), "validation_loss")
    trainer = best.trainer = _create_trainer(_Watched, exporter=best)

    trainer.evaluate(-1)
    trainer.state.weights_checkpoint.read(str(tmp_path / "ckpt-0"))

    assert ("begun", _read_values(trainer)) in trainer.notes


def test_nothing_is_exported_as_best_once_a_stop_was_asked_for(tmp_path: Path) -> None:
    trainer = _create_trainer(
        _Watched, exporter=BestWeightsExporter(str(tmp_path), "validation_loss")
    )
    first = trainer.evaluate(-1)["validation_loss"]
    trainer.initialize()  # the average is now what the weights are
    trainer.global_step.assign(5)
    trainer.then = {"end": trainer.request_stop}

    logs = trainer.evaluate(-1)

    # The higher, the better.
    assert logs["validation_loss"] > first == pytest.approx(logs["best_validation_loss"])
    assert [path.name for path in tmp_path.glob("*.index")] == ["ckpt-0.index"]


class _Parts(keras.metrics.SparseCategoricalAccuracy):
    def result(self) -> Any:
        return {
            "recall": {"low": super().result(), "high": super().result()},
            "each": tf.constant([1.0, 2.0]),
        }


class _PartsTask(LinearTask):
    def build_metrics(self, training: bool = True) -> list[Any]:
        return [_Parts("parts")]


def test_names_of_scalar_metrics_are_known_before_evaluation() -> None:
    trainer = _create_trainer(task_type=_PartsTask)
    names = trainer.validation_metric_names()

    assert sorted(names) == sorted(flatten_scalars(trainer.evaluate(-1), "|"))


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

    def reduce_aggregated_logs(
        self, aggregated_logs: Any, global_step: Any = None
    ) -> dict[str, Any]:
        return {"batches": aggregated_logs, "set": {"name_length": len(self.validation_set)}}


def _create_with_sets(
    task_type: type[LinearTask], *names: str, count: int = 1, **trainer: Any
) -> Any:
    config = linear_experiment(
        best_checkpoint_eval_metric="dev|validation_loss", best_checkpoint_metric_comp="lower"
    )
    data = config.task.validation_data
    sets = {name: data.replace(global_batch_size=8 + index) for index, name in enumerate(names)}
    config = config.replace(task={"validation_data": sets}, trainer=trainer)
    return seeded_trainer(config, task_type, count)


@pytest.fixture(scope="module")
def loss_alone() -> Any:
    """The loss of the set "dev" where it is the only one."""
    return _create_with_sets(LinearTask, "dev").evaluate(tf.constant(-1))["dev"]["validation_loss"]


@pytest.mark.parametrize("task_type", [_ByName, _CountedByName])
def test_each_validation_set_has_its_loss_steps_and_logs(
    task_type: type[LinearTask], loss_alone: Any
) -> None:
    trainer = _create_with_sets(
        task_type, "dev", "zero", "part", validation_sets={"part": {"steps": 2}}
    )
    logs = trainer.evaluate(tf.constant(-1))

    assert list(logs) == ["dev", "zero", "part"]
    assert logs["dev"]["validation_loss"] == loss_alone
    assert logs["zero"]["validation_loss"] == 0.0 < logs["dev"]["validation_loss"]
    assert logs["zero"]["accuracy"] == pytest.approx(logs["dev"]["accuracy"])

    if task_type is _CountedByName:
        assert {name: set_logs["batches"] for name, set_logs in logs.items()} == {
            "dev": 13,
            "zero": 12,
            "part": 2,
        }
        assert logs["part"]["set"]["name_length"] == 4

    some = trainer.evaluate(tf.constant(-1), sets=["zero"])
    assert some == {"zero": logs["zero"]}
    assert list(trainer.eval_seconds) == ["zero"]
    assert trainer.evaluate(tf.constant(-1)) == logs


def test_best_of_a_set_is_kept_only_when_it_is_evaluated(tmp_path: Path) -> None:
    trainer = _create_with_sets(LinearTask, "dev", "test")
    trainer.checkpoint_exporter = BestWeightsExporter(str(tmp_path), "dev|validation_loss", "lower")

    logs = trainer.evaluate(tf.constant(-1), sets=["test"])

    assert list(logs["test"]) == ["accuracy", "validation_loss"]
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
        if params.global_batch_size == 10:
            return repeated.filter(lambda points, labels: True)
        return repeated


def test_evaluating_all_of_an_endless_set_is_refused() -> None:
    names = ("short", "long", "unknown")
    trainer = _create_with_sets(_Repeated, *names, count=2)
    several = _create_with_sets(
        _Repeated,
        *names,
        count=2,
        validation_sets={"long": {"steps": 2}, "unknown": {"steps": 1}},
    )
    own = _create_with_sets(
        _Repeated, *names, validation_steps=2, validation_sets={"long": {"steps": -1}}
    )
    some = _create_with_sets(_Repeated, *names, validation_steps=2)
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
    assert several.evaluate(tf.constant(-1), sets=["long"])["long"]["validation_loss"] > 0


@pytest.mark.parametrize("mode", ["train_and_eval", "train_and_post_eval"])
def test_no_mode_begins_with_validation_data_that_never_ends(mode: str, tmp_path: Path) -> None:
    endless = linear_experiment().replace(task={"validation_data": {"is_training": True}})

    with pytest.raises(
        DataError, match=r"task.validation_data never ends.*is_training=false for a Source"
    ):
        launch(endless, mode, str(tmp_path))

    assert not list(tmp_path.glob("ckpt-*"))
    assert not list(tmp_path.glob("evals/*.jsonl"))


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
    trainer = seeded_trainer(linear_experiment(), _CountingTask, train=False, cls=_WithOwnMetric)
    trainer.seen = keras.metrics.Sum()

    assert trainer.evaluate(tf.constant(-1))["seen"] > 0


def test_without_validation_sets_an_evaluation_reports_nothing() -> None:
    config = linear_experiment()
    task = LinearTask(config.task)

    trainer = Trainer(config, task, task.build_model(), None, train=False, validation_dataset={})

    assert trainer.validation_loss.name == "validation_loss"
    assert len(trainer.validation_metrics) == 1

    trainer.set_validation_sets(ValidationSets([]))

    assert trainer.evaluate(tf.constant(-1)) == {}


class _NamedTask(LinearTask):
    """Notes which of several tasks evaluates, with which model."""

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        """Notes the model, and evaluates with it."""
        self.evaluated = model
        return super().validation_step(inputs, model, metrics)


class _ReplacingTrainer(Trainer):
    """Replaces its model and its task, as subclasses of Model Garden's Trainer may."""

    def replace(self, task: LinearTask) -> None:
        self._model = task.build_model()
        self._task = task


def test_subclass_evaluates_its_replaced_model_and_task() -> None:
    config = linear_experiment()
    trainer = seeded_trainer(config, _NamedTask, train=False, cls=_ReplacingTrainer)
    first = trainer.task
    second = _NamedTask(config.task)
    trainer.replace(second)

    trainer.evaluate(tf.constant(1))

    assert second.evaluated is trainer.model
    assert not hasattr(first, "evaluated")


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
    trainer = seeded_trainer(linear_experiment(), LinearTask, train=False, cls=_AsksForMore)

    with pytest.raises(
        DataError, match=r"task\.validation_data has no more batches.*validation_steps"
    ):
        trainer.evaluate(tf.constant(-1))


class _NormalizedTask(LinearTask):
    """Its moving averages follow the last batches, which differ between replicas."""

    def build_model(self) -> Any:
        normalization = keras.layers.BatchNormalization(momentum=0.1)
        return keras.Sequential(
            [keras.Input((FEATURES,)), normalization, keras.layers.Dense(CLASSES)]
        )


class _NormalizedTaskOfKeras2(LinearTask):
    def build_model(self) -> Any:
        layers = tf_keras.layers
        normalization = layers.BatchNormalization(momentum=0.1, input_shape=(FEATURES,))
        return tf_keras.Sequential([normalization, layers.Dense(CLASSES)])


def _read_all_replicas(trainer: Any) -> list[bytes]:
    variables = trainer.model.variables
    return [
        value.tobytes()
        for variable in variables
        for value in on_each_replica(trainer.strategy, variable)
    ]


@pytest.mark.parametrize(
    ("task_type", "ema"),
    [
        (_NormalizedTask, {"average_decay": 0.5, "trainable_weights_only": False}),
        (_NormalizedTaskOfKeras2, None),
    ],
)
def test_replicas_evaluate_what_the_checkpoint_holds(
    task_type: type[LinearTask], ema: dict[str, Any] | None, tmp_path: Path
) -> None:
    trainer = seeded_trainer(linear_experiment(optimizer_config={**SGD, "ema": ema}), task_type, 2)

    trainer.train(tf.constant(5))
    own_values = _read_all_replicas(trainer)

    assert len(set(own_values)) > len(trainer.model.variables)  # the replicas differ

    logs = trainer.evaluate(-1)

    assert _read_all_replicas(trainer) == own_values

    trainer.write_weights(str(tmp_path / "weights"))
    plain_model = task_type(LinearConfig()).build_model()
    tf.train.Checkpoint(model=plain_model).read(str(tmp_path / "weights")).expect_partial()
    points, labels = tiny_arrays(False)
    losses = keras.losses.sparse_categorical_crossentropy(
        labels, plain_model(points), from_logits=True
    )

    assert logs["validation_loss"] == pytest.approx(float(tf.reduce_mean(losses)), rel=1e-5)


class _TableTask(LinearTask):
    """The loss of an example is its label, 0 to 10.

    A scalar and a table of 10 rows precede the features.
    """

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        size = input_context.get_per_replica_batch_size(4) if input_context else 4
        table = tf.zeros([10, 2])
        dataset = tf.data.Dataset.from_tensor_slices(
            (tf.zeros([11, FEATURES]), tf.range(11))
        ).batch(size)
        return dataset.map(
            lambda points, labels: (
                {"a_scalar": 1.0, "a_table": table, "points": points},
                labels,
            )
        )

    def build_metrics(self, training: bool = True) -> list[Any]:
        return []

    def validation_step(self, inputs: Any, model: Any, metrics: Any = None) -> dict[str, Any]:
        mean = tf.reduce_mean(tf.cast(self.labels(inputs), tf.float32))
        return {self.loss: mean, "label": mean}

    def labels(self, inputs: Any) -> Any:
        return inputs[1]


class _UnlabelledTask(_TableTask):
    """The labels are among the features, where nothing tells them from a table."""

    def build_inputs(self, params: Any, input_context: Any = None) -> tf.data.Dataset:
        dataset = super().build_inputs(params, input_context)
        return dataset.map(lambda features, labels: {**features, "target": labels})

    def labels(self, inputs: Any) -> Any:
        return inputs["target"]


@pytest.mark.parametrize(
    ("task_type", "count"),
    [(_TableTask, 1), (_TableTask, 2), (_UnlabelledTask, 1)],
)
def test_batches_count_by_their_labels(task_type: type[LinearTask], count: int) -> None:
    logs = seeded_trainer(linear_experiment(), task_type, count).evaluate(-1)
    assert logs == {"validation_loss": 5.0, "label": 5.0}


def test_a_batch_whose_examples_cannot_be_counted_is_refused() -> None:
    named = (
        r"cannot be counted: {a_scalar: .*, a_table: .*, target: .*}; return \(features, labels\)"
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match=named):
        seeded_trainer(linear_experiment(), _UnlabelledTask, 2).evaluate(-1)


class _Lazy(keras.metrics.Metric):
    """The sum of the outputs, with a variable of their width."""

    def __init__(self) -> None:
        super().__init__(name="lazy")
        self.sums: Any = None

    def update_state(self, labels: Any, outputs: Any, sample_weight: Any = None) -> None:
        if self.sums is None:
            self.sums = self.add_weight(
                shape=(outputs.shape[-1],), initializer="zeros", name="sums"
            )
        self.sums.assign_add(tf.reduce_sum(outputs, 0))

    def result(self) -> Any:
        return tf.reduce_max(self.sums)


class _LazyTask(LinearTask):
    """Metrics that make variables at their first update; R2Score has one before."""

    def build_metrics(self, training: bool = True) -> list[Any]:
        metrics = keras.metrics
        return [
            metrics.F1Score("macro"),
            metrics.R2Score(),
            metrics.AUC(multi_label=True, name="auc"),
            _Lazy(),
        ]

    def process_metrics(self, metrics: Any, labels: Any, model_outputs: Any, **kwargs: Any) -> None:
        for metric in metrics:
            metric.update_state(tf.one_hot(labels, CLASSES), tf.nn.softmax(model_outputs))


def test_metrics_that_make_variables_late_have_keras_values() -> None:
    trainer = seeded_trainer(linear_experiment(best_checkpoint_eval_metric="lazy"), _LazyTask, 2)
    names = ["f1_score", "r2_score", "auc", "lazy"]

    assert trainer.validation_metric_names() == [*names, "validation_loss"]
    assert {*names} < trainer.train(tf.constant(2)).keys()

    trainer.evaluate(-1)
    logs = trainer.evaluate(-1)

    points, labels = tiny_arrays(False)
    for metric in _LazyTask(LinearConfig()).build_metrics():
        metric.update_state(tf.one_hot(labels, CLASSES), tf.nn.softmax(trainer.model(points)))
        assert logs[metric.name] == pytest.approx(float(metric.result()), rel=1e-5, abs=1e-6)
