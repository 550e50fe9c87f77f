"""How a training ends before its last epoch, and what an evaluation covers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_kit.compat.tensorpack import (
    Callback,
    DataFlow,
    EnableCallbackIf,
    FeedInput,
    FullyConnected,
    HookToCallback,
    InferenceRunner,
    MinSaver,
    ModelDesc,
    ModelSaver,
    PeriodicTrigger,
    QueueInput,
    ScalarStats,
    SimpleTrainer,
    StopTraining,
    SyncMultiGPUTrainerReplicated,
    TFDatasetInput,
    TrainConfig,
    launch_train_with_config,
    logger,
)
from trainer_kit.compat.tensorpack import tfv1 as tf
from trainer_kit.errors import UsageError


class Points(DataFlow):
    """Six batches of one point."""

    def __iter__(self) -> Iterator[list[np.ndarray]]:
        for index in range(6):
            yield [np.full((1, 2), index, np.float32)]

    def __len__(self) -> int:
        return 6


class Model(ModelDesc):
    """A linear layer."""

    def inputs(self) -> list[tf.TensorSpec]:
        return [tf.TensorSpec([None, 2], tf.float32, "points")]

    def build_graph(self, points: tf.Tensor) -> tf.Tensor:
        outputs = FullyConnected("linear", points, 1)
        return tf.reduce_mean(tf.square(outputs - 1.0), name="cost")

    def optimizer(self) -> object:
        return tf.train.GradientDescentOptimizer(0.001)


def train(
    folder: Path, *callbacks: Callback, trainer: Any = None, **options: object
) -> SimpleTrainer:
    logger.set_logger_dir(str(folder))
    trainer = trainer or SimpleTrainer()
    arguments = {"data": FeedInput(Points()), "steps_per_epoch": 3, "max_epoch": 4, **options}
    config = TrainConfig(model=Model(), callbacks=list(callbacks), **arguments)
    launch_train_with_config(config, trainer)
    return trainer


class StopInEpoch(Callback):
    """Ends the training where its third epoch begins."""

    def _before_epoch(self) -> None:
        if self.epoch_num == 3:
            raise StopTraining("enough")


def test_a_callback_stops_before_the_first_step_of_an_epoch(tmp_path: Path) -> None:
    trainer = train(tmp_path, StopInEpoch())

    assert trainer.global_step == 6
    assert trainer.stop_reason == "enough"
    assert (tmp_path / "final.json").exists()


def test_a_training_ends_with_finite_data(tmp_path: Path) -> None:
    trainer = train(tmp_path, data=FeedInput(Points(), infinite=False))

    assert trainer.global_step == 6
    assert "Points has ended" in trainer.stop_reason


def test_a_hook_stops_the_training(tmp_path: Path) -> None:
    trainer = train(tmp_path, HookToCallback(tf.train.StopAtStepHook(num_steps=4)))

    assert trainer.global_step == 4


def test_a_stray_stop_iteration_is_an_error(tmp_path: Path) -> None:
    class Careless(Callback):
        def _trigger_step(self) -> None:
            next(iter(()))

    with pytest.raises(RuntimeError, match="has raised StopIteration"):
        train(tmp_path, Careless())


def test_an_evaluation_has_all_runners_and_keeps_their_periods(tmp_path: Path) -> None:
    often = InferenceRunner(Points(), [ScalarStats("cost", prefix="often")])
    rarely = InferenceRunner(
        Points(), [ScalarStats("cost", prefix="rarely")], tower_name="RareTower"
    )

    folder = tmp_path / "run"
    train(folder, often, PeriodicTrigger(rarely, every_k_epochs=2), MinSaver("rarely_cost"))

    statistics = json.loads((folder / "stats.json").read_text())
    assert ["rarely_cost" in record for record in statistics] == [False, True, False, True]
    lines = (folder / "evals" / "validation.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [6, 12]
    assert all({"often_cost", "rarely_cost"} <= record["metrics"].keys() for record in records)
    assert (folder / "min-rarely_cost.index").exists()


def test_a_run_keeps_its_first_epoch(tmp_path: Path) -> None:
    train(tmp_path, max_epoch=2)
    tf.reset_default_graph()

    with pytest.raises(UsageError, match=r"starting_epoch=3: the run .* has starting_epoch=1"):
        train(tmp_path, starting_epoch=3)
    tf.reset_default_graph()
    with pytest.raises(UsageError, match=r"steps_per_epoch=2: the run .* has steps_per_epoch=3"):
        train(tmp_path, steps_per_epoch=2)


def test_a_resumed_run_of_two_towers_continues_inside_a_pass(tmp_path: Path) -> None:
    weights = []
    for epochs in ([3], [1, 3]):
        folder = tmp_path / f"{len(epochs)}"
        for max_epoch in epochs:
            tf.reset_default_graph()
            trainer = SyncMultiGPUTrainerReplicated(2)
            data = QueueInput(Points())
            train(folder, trainer=trainer, data=data, steps_per_epoch=4, max_epoch=max_epoch)
        weights.append(trainer.sess.run("linear/W:0").tolist())

    assert weights[0] == weights[1]


def test_an_initializer_takes_a_fed_value() -> None:
    value = tf.placeholder(tf.float32, [2])
    fed = tf.get_variable("fed", initializer=value)
    plain = tf.get_variable("plain", [2], initializer=tf.ones_initializer())
    session = tf.Session()

    session.run(fed.initializer, {value: [3.0, 4.0]})

    assert session.run([fed, plain])[0].tolist() == [3.0, 4.0]
    assert plain.eval().tolist() == [1.0, 1.0]


def test_callbacks_may_change_before_a_restart(tmp_path: Path) -> None:
    class Report(Callback):
        def _trigger_epoch(self) -> None:
            self.trainer.monitors.put_scalar("a", 1.0 + self.epoch_num)
            self.trainer.monitors.put_scalar("b", 100.0 - self.epoch_num)

    train(tmp_path, Report(), MinSaver("a"), MinSaver("b"), max_epoch=2)
    tf.reset_default_graph()
    runner = InferenceRunner(Points(), [ScalarStats("cost")])
    savers = [MinSaver("b"), MinSaver("a")]

    trainer = train(tmp_path, runner, Report(), *savers)

    assert trainer.global_step == 12
    assert trainer.monitors.get_latest("validation_cost") > 0
    # Those in another order keep what they remember.
    assert [saver.best for saver in savers] == [(12, 96.0), (3, 2.0)]


def test_a_saver_of_an_unknown_statistic_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = InferenceRunner(Points(), [ScalarStats("cost")])

    with caplog.at_level("WARNING", logger="tensorpack"):
        train(tmp_path, runner, MinSaver("validation_cots"))

    text = "MinSaver('validation_cots') saves nothing: no statistic has this name; did you mean"
    assert caplog.text.count(text) == 1


def test_a_predictor_takes_no_data_of_the_training(tmp_path: Path) -> None:
    trainer = train(tmp_path)
    feeder = trainer.program.feeders[0]
    place = feeder.state()
    predict = trainer.get_predictor([], ["cost"])

    with (
        trainer.enter(),
        pytest.raises(UsageError, match="the placeholder 'points' needs a value"),
    ):
        predict()
    assert feeder.state() == place


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_model_is_saved_at_the_step_of_its_trigger(tmp_path: Path, is_enabled: bool) -> None:
    saver: Callback = PeriodicTrigger(ModelSaver(), every_k_steps=2)
    if is_enabled:
        saver = EnableCallbackIf(saver, lambda _: True)

    train(tmp_path, saver, max_epoch=2)

    steps = sorted(int(path.stem[5:]) for path in tmp_path.glob("ckpt-*.index"))
    assert steps == [2, 3, 4, 6]


def test_a_dataset_of_tensorflow_is_read_once(tmp_path: Path) -> None:
    def read_points() -> TFDatasetInput:
        numbers = tf.data.Dataset.range(5)
        return TFDatasetInput(numbers.map(lambda n: (tf.fill([1, 2], tf.cast(n, tf.float32)),)))

    runner = InferenceRunner(read_points(), [ScalarStats("cost")])

    trainer = train(tmp_path, runner, data=read_points())

    assert trainer.global_step == 5
    assert trainer.stop_reason == "DatasetFlow has ended"


def test_a_shuffled_dataset_resumes_at_its_place(tmp_path: Path) -> None:
    weights = []
    for epochs in ([4], [2, 4]):
        for max_epoch in epochs:
            tf.reset_default_graph()
            numbers = tf.data.Dataset.range(20).shuffle(20).repeat()
            data = numbers.map(lambda n: (tf.fill([1, 2], tf.cast(n, tf.float32) / 20),))
            trainer = train(
                tmp_path / f"{len(epochs)}", data=TFDatasetInput(data), max_epoch=max_epoch
            )
        weights.append(trainer.sess.run("linear/W:0").tolist())

    assert weights[0] == weights[1]
