"""The names that a description of Tensorpack 0.8 explains, each used once, in its order."""

from __future__ import annotations

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.models import BatchNorm, Conv2D, Dropout, FullyConnected
from trainer_kit.compat.tensorpack.tfutils.tower import TowerContext, TowerFuncWrapper

from trainer_kit.compat.tensorpack import (
    Callback,
    CallbackFactory,
    FakeData,
    FeedInput,
    InputDesc,
    ModelDesc,
    ModelDescBase,
    ModelSaver,
    QueueInput,
    SimpleTrainer,
    TowerTrainer,
    logger,
    tfv1,
)
from trainer_kit.errors import UsageError

tf = tfv1


class Classifier(ModelDesc):
    """A net for images of 8x8, as version 0.8 describes it."""

    optimizers = 0

    def inputs(self) -> list[tf.Tensor]:
        """Returns placeholders."""
        return [
            tf.placeholder(tf.float32, (None, 8, 8, 1), "image"),
            tf.placeholder(tf.int32, (None,), "label"),
        ]

    def build_graph(self, image: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        """Returns the cost."""
        hidden = Conv2D("conv1", image, 4, 3, activation=tf.nn.relu)
        hidden = BatchNorm("bn", hidden)
        hidden = Dropout("dropout", hidden, keep_prob=0.5)
        logits = FullyConnected("fc", hidden, 3)
        tf.nn.softmax(logits, name="prob")
        costs = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=label)
        return tf.reduce_mean(costs, name="cost")

    def optimizer(self) -> tf.train.Optimizer:
        """Returns a new optimizer."""
        self.optimizers += 1
        return tf.train.AdamOptimizer(1e-3)


class TwoStepTrainer(TowerTrainer):
    """Builds its tower itself, as GANTrainer does."""

    def __init__(self, input: QueueInput, model: ModelDesc) -> None:
        super().__init__()
        inputs_desc = model.get_inputs_desc()
        callbacks = input.setup(inputs_desc)
        self.tower_func = TowerFuncWrapper(model.build_graph, inputs_desc)
        with TowerContext("", is_training=True):
            cost = self.tower_func(*input.get_input_tensors())
        self.train_op = model.get_optimizer().minimize(cost, name="train_op")
        self.register_callback(callbacks)


def build_data() -> FakeData:
    return FakeData([(2, 8, 8, 1), (2,)], size=10, random=False, dtype=["float32", "int32"])


def test_model_describes_its_inputs() -> None:
    model = Classifier()

    descriptions = model.get_inputs_desc()

    assert isinstance(model, ModelDescBase)
    assert all(isinstance(description, InputDesc) for description in descriptions)
    assert [description.name for description in descriptions] == ["image", "label"]
    assert [description.type for description in descriptions] == [tf.float32, tf.int32]
    assert descriptions[0].shape.as_list() == [None, 8, 8, 1]
    assert InputDesc(tf.int32, (None,), "label") == descriptions[1]
    placeholder = descriptions[1].build_placeholder()
    assert placeholder is descriptions[1].build_placeholder_reuse()
    assert placeholder.op.type == "Placeholder"


def test_optimizer_is_created_once() -> None:
    model = Classifier()

    first = model.get_optimizer()
    second = model.get_optimizer()

    assert first is second
    assert model.optimizers == 1
    assert model.optimizer() is not first


def test_predictor_is_built_without_training() -> None:
    trainer = TwoStepTrainer(QueueInput(build_data()), Classifier())
    image = np.ones((2, 8, 8, 1), np.float32)

    on_gpu = trainer.get_predictor(["image"], ["prob"], device=0)
    on_cpu = trainer.get_predictor(["image"], ["prob"], device=-1)

    seen = []
    callback = CallbackFactory(trigger=lambda _: seen.append((on_gpu(image)[0], on_cpu(image)[0])))
    trainer.train_with_defaults(callbacks=[callback], steps_per_epoch=2, max_epoch=1)
    probabilities, same = seen[0]
    # Dropout is off: two calls agree, and those of the two devices.
    np.testing.assert_allclose(probabilities, same, rtol=1e-5)
    np.testing.assert_array_equal(on_cpu(image)[0], same)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-6)


def test_tower_trainer_shows_its_tower() -> None:
    trainer = SimpleTrainer()
    with pytest.raises(UsageError, match="SimpleTrainer has no towers yet"):
        trainer.towers.training()

    model = Classifier()
    data = FeedInput(build_data())
    signature = model.get_inputs_desc()
    trainer.setup_graph(signature, data, model.build_graph, model.get_optimizer)

    assert trainer.inputs_desc == signature
    assert isinstance(trainer.tower_func, TowerFuncWrapper)
    output = trainer.towers.training()[0].get_tensor("conv1/output")
    assert output.shape.as_list() == [None, 8, 8, 4]
    assert trainer.towers[0].get_variable("conv1/W").shape == (3, 3, 1, 4)
    assert len(trainer.towers.inference()) == 0


def test_trainer_counts_epochs_and_saves() -> None:
    class Recorder(Callback):
        def _before_train(self) -> None:
            self.lengths = (self.trainer.max_epoch, self.trainer.steps_per_epoch)

        def _trigger_step(self) -> None:
            self.places = [*getattr(self, "places", ()), (self.epoch_num, self.local_step)]

    logger.set_logger_dir("run", action="k")
    trainer = TwoStepTrainer(QueueInput(build_data()), Classifier())
    recorder = Recorder()
    assert trainer.register_callback(recorder)
    trainer.register_callback(ModelSaver())

    trainer.train_with_defaults(steps_per_epoch=3, max_epoch=2)

    assert recorder.lengths == (2, 3)
    assert recorder.places == [(epoch, step) for epoch in (1, 2) for step in range(3)]
    assert trainer.global_step == 6
    with pytest.raises(UsageError, match="callbacks are registered before the training begins"):
        trainer.register_callback(Recorder())


def test_tower_context_switches_layers() -> None:
    image = tf.ones([2, 8, 8, 1])
    with TowerContext("", is_training=True):
        trained = Dropout("dropout", image, keep_prob=0.5)
    with TowerContext("test", is_training=False):
        tested = Dropout("dropout", image, keep_prob=0.5)

    with tf.Session() as session:
        trained_value, tested_value = session.run([trained, tested])

    assert (trained_value == 0).any()
    np.testing.assert_array_equal(tested_value, np.ones([2, 8, 8, 1]))
