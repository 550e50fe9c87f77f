"""The message of each mistake in a program of Tensorpack, with the line of the program."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from trainer_kit.compat.tensorpack.models import FullyConnected
from trainer_kit.compat.tensorpack.tfutils.tower import TowerFunc

from trainer_kit.compat.tensorpack import (
    BatchData,
    DataFlow,
    DataFromList,
    FakeData,
    FeedInput,
    InferenceRunner,
    ModelDesc,
    OfflinePredictor,
    PredictConfig,
    QueueInput,
    RepeatedData,
    ScalarStats,
    SimpleTrainer,
    TowerContext,
    TrainConfig,
    ZMQInput,
    launch_train_with_config,
    tfv1,
)
from trainer_kit.compat.tensorpack.callbacks import prof
from trainer_kit.compat.tensorpack.contrib.keras import KerasModel
from trainer_kit.compat.tensorpack.train import trainers
from trainer_kit.errors import DataError, TrainerKitError, UsageError

tf = tfv1
DATA = [[np.ones(4, np.float32), np.int32(0)]] * 8


class Classifier(ModelDesc):
    """A linear net."""

    is_scalar = True

    def inputs(self) -> list[tf.TensorSpec]:
        """Returns the inputs."""
        return [
            tf.TensorSpec((None, 4), tf.float32, "features"),
            tf.TensorSpec((None,), tf.int32, "label"),
        ]

    def build_graph(self, features: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        """Returns the cost."""
        logits = FullyConnected("fc", features, 3)
        cost = tf.nn.sparse_softmax_cross_entropy_with_logits(logits=logits, labels=label)
        mean = tf.reduce_mean(cost, name="cost")
        return mean if self.is_scalar else cost

    def optimizer(self) -> tf.train.Optimizer:
        """Returns the optimizer."""
        return tf.train.GradientDescentOptimizer(0.1)


class ShortFlow(DataFlow):
    """Says that it has eight datapoints, and has five."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA[:5])


def train(data: Any, model: ModelDesc | None = None, **options: Any) -> None:
    options = {"steps_per_epoch": 2, "max_epoch": 1, **options}
    config = TrainConfig(model=model or Classifier(), data=data, **options)
    launch_train_with_config(config, SimpleTrainer())


def set_up_trainer() -> SimpleTrainer:
    trainer, model = SimpleTrainer(), Classifier()
    data = FeedInput(BatchData(DataFromList(DATA), 2))
    signature = model.get_input_signature()
    trainer.setup_graph(signature, data, model.build_graph, model.get_optimizer)
    return trainer


def return_vector_cost() -> None:
    model = Classifier()
    model.is_scalar = False
    train(FeedInput(BatchData(DataFromList(DATA), 2)), model)


def return_no_cost() -> None:
    model = Classifier()
    model.build_graph = lambda features, label: None
    train(FeedInput(BatchData(DataFromList(DATA), 2)), model)


def start_without_towers() -> None:
    SimpleTrainer().train_with_defaults(steps_per_epoch=1, max_epoch=1)


def predict_without_towers() -> None:
    SimpleTrainer().get_predictor(["features"], ["cost"])


def nest_tower_contexts() -> None:
    with TowerContext("", is_training=True), TowerContext("inner", is_training=False):
        pass


def set_second_tower_function() -> None:
    trainer = set_up_trainer()
    trainer.tower_func = TowerFunc(len, [])


def set_up_twice() -> None:
    trainer = set_up_trainer()
    trainer.setup_graph([], FeedInput(DataFromList(DATA)), len, len)


def fetch_unknown_tensor() -> None:
    set_up_trainer().get_predictor(["features"], ["fc/ouput"])


def predict_unknown_tensor() -> None:
    OfflinePredictor(
        PredictConfig(model=Classifier(), input_names=["features"], output_names=["fc/outptu"])
    )


def infer_unknown_tensor() -> None:
    data = BatchData(DataFromList(DATA), 2)
    train(FeedInput(data), callbacks=[InferenceRunner(data, ScalarStats("csot"))])


def run_unknown_tensor() -> None:
    set_up_trainer()
    tf.Session().run("fc/otput:0")


def train_endless_data() -> None:
    train(FeedInput(RepeatedData(DataFromList(DATA), -1)), steps_per_epoch=None)


def infer_short_data() -> None:
    data = BatchData(DataFromList(DATA), 2)
    runner = InferenceRunner(BatchData(ShortFlow(), 1), ScalarStats("cost"))
    train(FeedInput(data), callbacks=[runner])


def train_short_data() -> None:
    train(FeedInput(BatchData(ShortFlow(), 1), infinite=False), steps_per_epoch=8)


def give_three_components() -> None:
    data = FakeData([(2, 4), (2,), (2,)], dtype=["float32", "int32", "int32"])
    train(QueueInput(data))


def leave_placeholder_empty() -> None:
    scale = tf.placeholder(tf.float32, [], "scale")
    with tf.Session() as session:
        session.run(scale * 2)


def build_keras_model() -> None:
    KerasModel(lambda: None, input=FeedInput(DataFromList(DATA)))


def receive_by_zmq() -> None:
    ZMQInput("ipc://data", 10)


TABLE = [
    (return_vector_cost, UsageError, "build_graph", "returned the cost .* of shape \\(None,\\)"),
    (return_no_cost, UsageError, "train", "returned None; return the cost, a scalar tensor"),
    (start_without_towers, UsageError, "", "no towers and no train_op; call setup_graph before"),
    (predict_without_towers, UsageError, "", "Must set tower_func on the trainer to use get_pred"),
    (nest_tower_contexts, UsageError, "", "Cannot nest TowerContext; leave the outer context"),
    (set_second_tower_function, UsageError, "", "only be called once .* one tower function"),
    (set_up_twice, UsageError, "", "setup_graph can only be called once .* create another"),
    (fetch_unknown_tensor, UsageError, "", "no tensor 'fc/ouput.*'; did you mean fc/output"),
    (predict_unknown_tensor, UsageError, "", "no tensor 'fc/outptu:0'; did you mean fc/output"),
    (infer_unknown_tensor, UsageError, "train", "no tensor 'csot.*'; did you mean cost"),
    (run_unknown_tensor, UsageError, "", "no tensor 'fc/otput:0'; did you mean fc/output"),
    (train_endless_data, UsageError, "train", "no steps_per_epoch, and its data has no length"),
    (infer_short_data, DataError, "train", "BatchData ended after 5 .* __len__\\(\\) returns 8"),
    (train_short_data, DataError, "train", "BatchData ended after 5 .* __len__\\(\\) returns 8"),
    (give_three_components, DataError, "train", "FakeData has 3 components, and .* 2 inputs"),
    (leave_placeholder_empty, UsageError, "", "the placeholder 'scale' needs a value"),
    (build_keras_model, UsageError, "", "train it with trainer_kit.compat.keras.fit"),
    (receive_by_zmq, UsageError, "", "use QueueInput, with RemoteDataZMQ"),
]


REFUSED = {
    "HorovodTrainer": "use SyncMultiGPUTrainerReplicated",
    "BytePSTrainer": "use SyncMultiGPUTrainerReplicated",
    "AsyncMultiGPUTrainer": "use SyncMultiGPUTrainerParameterServer",
    "DistributedTrainerParameterServer": "use SyncMultiGPUTrainerParameterServer",
    "DistributedTrainerReplicated": "use SyncMultiGPUTrainerReplicated",
    "GraphProfiler": "use tf.profiler.experimental",
    "PeakMemoryTracker": "use tf.config.experimental.get_memory_info",
}


@pytest.mark.parametrize(
    ("program", "error_class", "function", "message"),
    TABLE,
    ids=[row[0].__name__ for row in TABLE],
)
def test_message_names_the_line(
    program: Callable[[], None],
    error_class: type[TrainerKitError],
    function: str,
    message: str,
) -> None:
    with pytest.raises(error_class) as caught:
        program()

    text = str(caught.value)
    function = function or program.__name__
    assert "\n" not in text
    assert re.match(rf"{__file__}:\d+, in {function}: ", text), text
    assert re.search(message, text), text
    line = int(text.split(":")[1].split(",")[0])
    owner = getattr(Classifier, function, None) or globals()[function]
    source, first_line = inspect.getsourcelines(owner)
    assert first_line < line < first_line + len(source)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_classes_name_another_way(name: str) -> None:
    module = trainers if hasattr(trainers, name) else prof
    with pytest.raises(UsageError, match=rf"{name} is not supported: .*; {REFUSED[name]}"):
        getattr(module, name)(2)


def test_contrib_slim_names_another_way() -> None:
    with pytest.raises(
        UsageError, match=r"tf\.contrib\.slim does not exist .*; write the model with"
    ):
        tf.contrib.slim  # noqa: B018


def test_assertions_of_the_program_stay() -> None:
    class Checked(Classifier):
        def build_graph(self, features: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
            assert features.shape[1] == 5, "five features"

    with pytest.raises(AssertionError, match="five features"):
        train(FeedInput(BatchData(DataFromList(DATA), 2)), Checked())
